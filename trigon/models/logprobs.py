"""From hidden states to what the policy says of each completion token: log-probability and entropy.

The one shift by one of the whole package is here:

        row                  [ p0 p1 p2 | a0 a1 | b0 b1 b2 ]      A token is predicted by the state before it, the
        predicting a0 a1             p2   a0                      first of each completion by the last of the prompt:
        predicting b0 b1 b2          p2           b0 b1           one state, n targets.

Knows logits, a chunk at a time: of the whole [S, V] table only one chunk exists at once, forward and backward, and two
numbers a token (log-sum-exp and entropy) are kept between them. Refuses to know networks, losses, and what it is all
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trigon.types import GroupSpan, TokenLogprobs

CHUNK_BYTES = 128 * 2**20
"""Of one chunk of logits in float32, of which there is room for two at once. On a CPU larger chunks are not
faster (benchmarks/logprobs.py); on a GPU a chunk of 220 rows, which a vocabulary of 152,000 words gives, is wide enough
that multiplying by the head takes about as long as reading it."""


MAX_CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """What a model's distributions over the vocabulary are made of, for S tokens: states [S, D], head_weight [V, D].

    On one device; without gradient. The distributions themselves would be [S, V].
    """

    states: Tensor
    head_weight: Tensor


def rows_of_chunk(vocabulary: int) -> int:
    """Return how many rows of logits are made at a time: as many as CHUNK_BYTES hold, MAX_CHUNK_ROWS at most."""
    return max(1, min(MAX_CHUNK_ROWS, CHUNK_BYTES // (4 * vocabulary)))


def shifted(spans: Sequence[GroupSpan]) -> tuple[Tensor, Tensor]:
    """Return the S completion tokens of a row, and the S states that predict them, as positions in the row.

    Returns: (targets [S], sources [S]) int64 on the CPU, in row order.
    """
    targets, sources = [], []
    for span in spans:
        for start, end in span.completions:
            targets.append(torch.arange(start, end))
            sources.append(torch.arange(start - 1, end - 1))
            sources[-1][0] = span.prompt[1] - 1
    return torch.cat(targets), torch.cat(sources)


def token_logprobs(
    states: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    banned_token_ids: Sequence[int],
    entropy_gradient: bool,
    against: Predictions | None = None,
    chunk_tokens: int | None = None,
) -> TokenLogprobs:
    """Return log-probability and entropy of each target under softmax(states @ head_weight.T / temperature).

    against: other predictions of the same tokens, at the same temperature; the exact KL(ours || theirs) is then
    returned as well. chunk_tokens: rows of logits made at a time; None: see rows_of_chunk.

    Banned tokens are left out of the distribution, just as the sampler leaves them out: their logit is minus infinity.
    Args: states: [S, D]; head_weight: [V, D], both of the model's dtype; targets: [S] int64.
    Logits are a product in the model's dtype, or under autocast in that, and float32 from there on (float64 for
    float64). Gradient flows into states and head_weight; through the entropy only if entropy_gradient. The weight's is
    summed over chunks in float32.
    """
    device = states.device.type
    banned = torch.tensor(tuple(banned_token_ids), dtype=torch.int64, device=states.device)
    # Decided once: the backward runs where autocast is off, and has to meet the very logits of the forward again.
    product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    settings = _Settings(temperature, chunk_tokens or rows_of_chunk(len(head_weight)), product_dtype)
    with torch.autocast(device, enabled=False):
        logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
            states, head_weight, targets, banned, settings, entropy_gradient
        )
        kl = None
        if against is not None:
            kl = _ChunkedKl.apply(  # type: ignore[no-untyped-call]
                states, head_weight, against.states, against.head_weight, banned, settings
            )
    return TokenLogprobs(logprobs=logprobs, entropy=entropy, kl=kl)


@dataclass(frozen=True, slots=True)
class _Settings:
    """How logits are made: divided by a temperature, so many rows at a time, of a product in this dtype."""

    temperature: float
    chunk_tokens: int
    product_dtype: torch.dtype


class _ChunkedLogprobs(torch.autograd.Function):
    """Linear layer, log-softmax, gather and entropy in one, recomputing each chunk of logits in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        banned: Tensor,
        settings: _Settings,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = _wide(states)
        logprobs, entropy, lse = (torch.empty(len(states), dtype=dtype, device=states.device) for _ in range(3))
        head = weight.to(settings.product_dtype)
        room, more_room = _room(states, head, settings), _room(states, head, settings)
        for rows in _chunks(len(states), settings.chunk_tokens):
            logits = _logits(states[rows], head, banned, settings, room)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0]
            top = logits.amax(1)
            unnormalized = torch.sub(logits, top[:, None], out=more_room[: len(logits)]).exp_()
            total = unnormalized.sum(1)
            lse[rows] = top + total.log()
            logits[:, banned] = 0.0  # their share below is 0 * logit, which must not be 0 * inf
            entropy[rows] = lse[rows] - unnormalized.mul_(logits).sum(1) / total
        logprobs -= lse
        ctx.save_for_backward(states, weight, targets, banned, lse, entropy)
        ctx.settings, ctx.entropy_gradient = settings, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, targets, banned, lse, entropy = ctx.saved_tensors
        by_logprob, by_entropy = gradients
        settings: _Settings = ctx.settings
        head = weight.to(settings.product_dtype)
        states_gradient, weight_gradient = _empty_gradients(ctx, states, weight)
        room, more_room = _room(states, head, settings), _room(states, head, settings)
        for rows in _chunks(len(states), settings.chunk_tokens):
            # d logprob / d logit_j = [j is the target] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)
            log_p = _logits(states[rows], head, banned, settings, room).sub_(lse[rows, None])
            probability = torch.exp(log_p, out=more_room[: len(log_p)])
            if ctx.entropy_gradient:
                log_p[:, banned] = 0.0  # not 0 * inf, as above
                slope = log_p.add_(entropy[rows, None]).mul_(-by_entropy[rows, None]).sub_(by_logprob[rows, None])
                by_logits = probability.mul_(slope)
            else:
                by_logits = probability.mul_(-by_logprob[rows, None])
            by_logits.scatter_add_(1, targets[rows, None], by_logprob[rows, None])
            _pull_back(by_logits, states, head, rows, settings, states_gradient, weight_gradient)
        return (
            states_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            *(None,) * 4,
        )


class _ChunkedKl(torch.autograd.Function):
    """KL(ours || theirs) over the whole vocabulary, recomputing each chunk of both logits in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        their_states: Tensor,
        their_weight: Tensor,
        banned: Tensor,
        settings: _Settings,
    ) -> Tensor:
        kl = torch.empty(len(states), dtype=_wide(states), device=states.device)
        head, their_head = weight.to(settings.product_dtype), their_weight.to(settings.product_dtype)
        room = _room(states, head, settings)
        for rows in _chunks(len(states), settings.chunk_tokens):
            ours = _logits(states[rows], head, banned, settings, room).log_softmax(1)
            theirs = _logits(their_states[rows], their_head, banned, settings, room).log_softmax(1)
            kl[rows] = torch.linalg.vecdot(ours.exp(), _gap(ours, theirs, banned))
        ctx.save_for_backward(states, weight, their_states, their_weight, banned, kl)
        ctx.settings = settings
        return kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, their_states, their_weight, banned, kl = ctx.saved_tensors
        (by_kl,) = gradients
        settings: _Settings = ctx.settings
        head, their_head = weight.to(settings.product_dtype), their_weight.to(settings.product_dtype)
        states_gradient, weight_gradient = _empty_gradients(ctx, states, weight)
        room = _room(states, head, settings)
        for rows in _chunks(len(states), settings.chunk_tokens):
            # d KL / d logit_j = p_j (log p_j - log q_j - KL)
            ours = _logits(states[rows], head, banned, settings, room).log_softmax(1)
            theirs = _logits(their_states[rows], their_head, banned, settings, room).log_softmax(1)
            slope = _gap(ours, theirs, banned).sub_(kl[rows, None]).mul_(by_kl[rows, None])
            _pull_back(ours.exp_().mul_(slope), states, head, rows, settings, states_gradient, weight_gradient)
        return (
            states_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            *(None,) * 4,
        )


def _empty_gradients(ctx: Any, states: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return where the gradients of states and weight are to be gathered, None for what needs none."""
    to_states, to_weight = ctx.needs_input_grad[:2]
    return (
        torch.empty_like(states) if to_states else None,
        torch.zeros(weight.shape, dtype=_wide(weight), device=weight.device) if to_weight else None,
    )


def _pull_back(
    by_logits: Tensor,
    states: Tensor,
    head: Tensor,
    rows: slice,
    settings: _Settings,
    states_gradient: Tensor | None,
    weight_gradient: Tensor | None,
) -> None:
    """Carry the gradient of a chunk of logits on to the states' rows, and add it to the weight's. Overwrites it."""
    if settings.temperature != 1.0:
        by_logits.div_(settings.temperature)
    by_product = by_logits.to(settings.product_dtype)
    if states_gradient is not None:
        states_gradient[rows] = by_product @ head
    if weight_gradient is not None:
        seen = states[rows].to(settings.product_dtype)
        if weight_gradient.dtype == seen.dtype:
            weight_gradient.addmm_(by_product.T, seen)
        else:
            weight_gradient += by_product.T @ seen


def _gap(ours: Tensor, theirs: Tensor, banned: Tensor) -> Tensor:
    """Return log p - log q, and 0 for banned tokens, of which both are minus infinity. Overwrites theirs."""
    gap = torch.sub(ours, theirs, out=theirs)
    gap[:, banned] = 0.0
    return gap


def _room(states: Tensor, head: Tensor, settings: _Settings) -> Tensor:
    """Return room for a chunk's logits, to be used for one after the other.

    Memory that is new for each has to be cleared by the system first, which on a CPU takes a quarter of the time.
    """
    rows = min(len(states), settings.chunk_tokens)
    return torch.empty(rows, len(head), dtype=_wide(states), device=states.device)


def _logits(states: Tensor, head: Tensor, banned: Tensor, settings: _Settings, room: Tensor) -> Tensor:
    """Return logits [rows, V] in float32 or wider, in the room given. head: the weight, in the product's dtype."""
    logits = room[: len(states)]
    if settings.product_dtype == room.dtype:
        torch.mm(states.to(room.dtype), head.T, out=logits)
    else:
        logits.copy_(states.to(settings.product_dtype) @ head.T)
    if settings.temperature != 1.0:
        logits.div_(settings.temperature)
    logits[:, banned] = -torch.inf
    return logits


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]
