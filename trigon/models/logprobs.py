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
from typing import Any

import torch
from torch import Tensor

from trigon.types import GroupSpan, TokenLogprobs


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
    chunk_tokens: int,
    entropy_gradient: bool,
) -> TokenLogprobs:
    """Return log-probability and entropy of each target under softmax(states @ head_weight.T / temperature).

    Banned tokens are left out of the distribution, just as the sampler leaves them out: their logit is minus infinity.
    Args: states: [S, D]; head_weight: [V, D], both of the model's dtype; targets: [S] int64.
    Logits are a product in the model's dtype, and float32 from there on (float64 for float64). Gradient flows into
    states and head_weight; through the entropy only if entropy_gradient. The weight's is summed over chunks in float32.
    """
    banned = torch.tensor(tuple(banned_token_ids), dtype=torch.int64, device=states.device)
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        states, head_weight, targets, banned, temperature, chunk_tokens, entropy_gradient
    )
    return TokenLogprobs(logprobs=logprobs, entropy=entropy)


class _ChunkedLogprobs(torch.autograd.Function):
    """Linear layer, log-softmax, gather and entropy in one, recomputing each chunk of logits in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        banned: Tensor,
        temperature: float,
        chunk_tokens: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = _wide(states)
        logprobs, entropy, lse = (torch.empty(len(states), dtype=dtype, device=states.device) for _ in range(3))
        for rows in _chunks(len(states), chunk_tokens):
            logits = _logits(states[rows], weight, banned, temperature)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0]
            top = logits.amax(1)
            unnormalized = (logits - top[:, None]).exp_()
            total = unnormalized.sum(1)
            lse[rows] = top + total.log()
            logits[:, banned] = 0.0  # their share below is 0 * logit, which must not be 0 * inf
            entropy[rows] = lse[rows] - torch.linalg.vecdot(unnormalized, logits) / total
        logprobs -= lse
        ctx.save_for_backward(states, weight, targets, banned, lse, entropy)
        ctx.temperature, ctx.chunk_tokens, ctx.entropy_gradient = temperature, chunk_tokens, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, targets, banned, lse, entropy = ctx.saved_tensors
        by_logprob, by_entropy = gradients
        to_states, to_weight = ctx.needs_input_grad[:2]
        states_gradient = torch.empty_like(states) if to_states else None
        weight_gradient = torch.zeros(weight.shape, dtype=_wide(weight), device=weight.device) if to_weight else None
        for rows in _chunks(len(states), ctx.chunk_tokens):
            # d logprob / d logit_j = [j is the target] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)
            log_p = _logits(states[rows], weight, banned, ctx.temperature).sub_(lse[rows, None])
            probability = log_p.exp()
            if ctx.entropy_gradient:
                log_p[:, banned] = 0.0  # not 0 * inf, as above
                slope = log_p.add_(entropy[rows, None]).mul_(by_entropy[rows, None]).add_(by_logprob[rows, None])
                by_logits = probability.mul_(slope).neg_()
            else:
                by_logits = probability.mul_(-by_logprob[rows, None])
            by_logits.scatter_add_(1, targets[rows, None], by_logprob[rows, None])
            by_product = by_logits.div_(ctx.temperature).to(states.dtype)
            if states_gradient is not None:
                torch.mm(by_product, weight, out=states_gradient[rows])
            if weight_gradient is not None:
                if weight_gradient.dtype == states.dtype:
                    weight_gradient.addmm_(by_product.T, states[rows])
                else:
                    weight_gradient += by_product.T @ states[rows]
        return (
            states_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            *(None,) * 5,
        )


def _logits(states: Tensor, weight: Tensor, banned: Tensor, temperature: float) -> Tensor:
    logits = (states @ weight.T).to(_wide(states))
    if temperature != 1.0:
        logits.div_(temperature)
    logits[:, banned] = -torch.inf
    return logits


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]
