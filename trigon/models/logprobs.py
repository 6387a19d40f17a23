"""Log-probabilities and entropies of completion tokens, from hidden states and the LM head.

The only shift by one of the package is here:

    row                  [ p0 p1 p2 | a0 a1 | b0 b1 b2 ]      Each token is predicted by the state
    predicting a0 a1             p2   a0                      before it, the first of a completion
    predicting b0 b1 b2          p2           b0 b1           by the last state of the prompt.

Logits are computed in chunks of rows: of the [S, V] table only one chunk exists at a time, in the
forward and, recomputed, in the backward. Between them three numbers per token are kept. This module
does not depend on models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trigon.models import transfer
from trigon.models.dtypes import autocast_off, compute_dtype
from trigon.types import GroupSpan, TokenLogprobs

CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Bytes of one chunk of logits in float32, by type of device; two such buffers are allocated.

On a CPU larger chunks are not faster (benchmarks/logprobs.py). On a GPU each chunk reads and writes
the head's gradient, 8 bytes for each 2 * rows operations: with the 295 operations per byte of an
H100 both take equally long at 1,200 rows. For a vocabulary of 152,000, 2**30 bytes are 1,536 rows.
"""

MAX_CHUNK_ROWS = {"cpu": 1024, "cuda": 2048}

_GPU_ROW_MULTIPLE = 256  # rows of the tiles of a GPU's matrix product, or a multiple
_SLICE_ROWS = 16_384  # rows of the head's gradient that are computed at a time, where a product is not added to it


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """The factors of a model's logits for S tokens: states [S, D], head_weight [V, D].

    On one device, without gradient. Kept instead of the logits, which are [S, V].
    """

    states: Tensor
    head_weight: Tensor


def rows_per_chunk(vocab_size: int, device_type: str) -> int:
    """Return the number of rows of logits in a chunk.

    As many as CHUNK_BYTES hold, at least 1 and at most MAX_CHUNK_ROWS; on a GPU a multiple of 256
    if there are as many.
    """
    kind = "cuda" if device_type == "cuda" else "cpu"
    rows = max(1, min(MAX_CHUNK_ROWS[kind], CHUNK_BYTES[kind] // (4 * vocab_size)))
    return rows - rows % _GPU_ROW_MULTIPLE if kind == "cuda" and rows >= _GPU_ROW_MULTIPLE else rows


def target_and_source_positions(spans: Sequence[GroupSpan]) -> tuple[Tensor, Tensor]:
    """Return the positions of a row's S sampled tokens, and of the states that predict them.

    Returns: (targets [S], sources [S]) int64 on the CPU, in row order.
    """
    targets, sources = [], []
    for span in spans:
        for (first, _), sampled in zip(span.completions, span.sampled, strict=True):
            for start, end in sampled:
                targets.append(torch.arange(start, end))
                sources.append(torch.arange(start - 1, end - 1))
                if start == first:
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
    logit_cap: float | None = None,
    chunk_tokens: int | None = None,
) -> TokenLogprobs:
    """Return the log-probability and entropy of each target token.

    The distribution is softmax(logits / temperature), where logits are states @ head_weight.T or,
    with a cap, cap * tanh(states @ head_weight.T / cap). Banned tokens are excluded from it, as the
    sampler excludes them: their logits are minus infinity.

    The product is computed in the dtype of states, or in autocast's dtype if it is enabled;
    everything after it in float32 (float64 for float64). The gradient of head_weight is accumulated
    over chunks in float32. The backward recomputes the logits in the dtype of the forward.

    Args:
        states: [S, D], the states that predict the targets.
        head_weight: [V, D], in the dtype of states.
        targets: [S] int64, token ids.
        temperature: the sampling temperature, above 0.
        banned_token_ids: tokens that are never sampled.
        entropy_gradient: whether gradient flows through the entropy.
        against: a reference's predictions of the same targets. If given, the exact
            KL(policy || reference) over the vocabulary is returned as well, at the same
            temperature and with the same cap.
        logit_cap: bound of the logits' absolute values (Gemma 2, arXiv:2408.00118, section 2);
            None: they are not bounded.
        chunk_tokens: rows of logits in a chunk; None for rows_per_chunk.
    Returns: logprobs [S] and entropy [S], and kl [S] or None, in float32 (float64 for float64).
        Gradient flows into states and head_weight, from logprobs, kl and, if asked for, entropy.
    """
    banned = transfer.to_device(torch.tensor(tuple(banned_token_ids), dtype=torch.int64), states.device)
    # Fixed here: autocast is off in the backward, which has to recompute exactly the same logits.
    product_dtype = compute_dtype(states.device, states.dtype)
    settings = _Settings(
        temperature, logit_cap, chunk_tokens or rows_per_chunk(len(head_weight), states.device.type), product_dtype
    )
    with autocast_off(states.device):
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
    """How logits are computed. product_dtype: dtype of the product with the head."""

    temperature: float
    logit_cap: float | None
    chunk_tokens: int
    product_dtype: torch.dtype


class _ChunkedLogprobs(torch.autograd.Function):
    """Linear layer, log-softmax, gather and entropy in one; recomputes logits in the backward."""

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
        dtype = _float32_or_wider(states)
        logprobs, top, total, mean_gap = (torch.empty(len(states), dtype=dtype, device=states.device) for _ in range(4))
        head = weight.to(settings.product_dtype)
        buffer, second_buffer = _logits_buffer(states, head, settings), _logits_buffer(states, head, settings)
        for rows in _chunks(len(states), settings.chunk_tokens):
            logits = _logits(states[rows], head, banned, settings, buffer)
            top[rows] = logits.amax(1)
            # With a gap z_j = logit_j - top, p_j = exp(z_j) / total. The size of the logits then
            # does not matter: log p_j = z_j - log(total), entropy = log(total) - sum(p_j z_j).
            gaps = logits.sub_(top[rows, None])
            logprobs[rows] = gaps.gather(1, targets[rows, None])[:, 0]
            unnormalized = torch.exp(gaps, out=second_buffer[: len(gaps)])
            total[rows] = unnormalized.sum(1)
            gaps.index_fill_(1, banned, 0.0)  # their term below is 0 * gap; 0 * -inf would be nan
            mean_gap[rows] = unnormalized.mul_(gaps).sum(1) / total[rows]
        log_total = total.log()
        logprobs -= log_total
        entropy = log_total - mean_gap
        ctx.save_for_backward(states, weight, targets, banned, top, total, mean_gap)
        ctx.settings, ctx.entropy_gradient = settings, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, targets, banned, top, total, mean_gap = ctx.saved_tensors
        grad_logprobs, grad_entropy = gradients
        settings: _Settings = ctx.settings
        head = weight.to(settings.product_dtype)
        grad_states, grad_weight = _empty_gradients(ctx, states, weight)
        buffer, second_buffer = _logits_buffer(states, head, settings), _logits_buffer(states, head, settings)
        slope = None if settings.logit_cap is None else _logits_buffer(states, head, settings)
        for rows in _chunks(len(states), settings.chunk_tokens):
            # d logprob / d logit_j = [j is the target] - p_j
            # d entropy / d logit_j = -p_j (log p_j + entropy) = -p_j (z_j - mean of z under p)
            gaps = _logits(states[rows], head, banned, settings, buffer, slope).sub_(top[rows, None])
            unnormalized = torch.exp(gaps, out=second_buffer[: len(gaps)])
            per_logprob = (grad_logprobs[rows] / total[rows])[:, None]
            if ctx.entropy_gradient:
                gaps.index_fill_(1, banned, 0.0)  # not 0 * -inf, as above
                per_entropy = (grad_entropy[rows] / total[rows])[:, None]
                factor = gaps.sub_(mean_gap[rows, None]).mul_(-per_entropy).sub_(per_logprob)
                grad_logits = unnormalized.mul_(factor)
            else:
                grad_logits = unnormalized.mul_(-per_logprob)
            grad_logits.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            _accumulate_gradients(grad_logits, states, head, rows, settings, slope, grad_states, grad_weight)
        return (
            grad_states,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 4,
        )


class _ChunkedKl(torch.autograd.Function):
    """KL(policy || reference) over the vocabulary; recomputes both logits in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        ref_states: Tensor,
        ref_weight: Tensor,
        banned: Tensor,
        settings: _Settings,
    ) -> Tensor:
        kl = torch.empty(len(states), dtype=_float32_or_wider(states), device=states.device)
        head, ref_head = weight.to(settings.product_dtype), ref_weight.to(settings.product_dtype)
        buffer = _logits_buffer(states, head, settings)
        for rows in _chunks(len(states), settings.chunk_tokens):
            log_p = _logits(states[rows], head, banned, settings, buffer).log_softmax(1)
            log_q = _logits(ref_states[rows], ref_head, banned, settings, buffer).log_softmax(1)
            kl[rows] = torch.linalg.vecdot(log_p.exp(), _log_ratio(log_p, log_q, banned))
        ctx.save_for_backward(states, weight, ref_states, ref_weight, banned, kl)
        ctx.settings = settings
        return kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, ref_states, ref_weight, banned, kl = ctx.saved_tensors
        (grad_kl,) = gradients
        settings: _Settings = ctx.settings
        head, ref_head = weight.to(settings.product_dtype), ref_weight.to(settings.product_dtype)
        grad_states, grad_weight = _empty_gradients(ctx, states, weight)
        buffer = _logits_buffer(states, head, settings)
        slope = None if settings.logit_cap is None else _logits_buffer(states, head, settings)
        for rows in _chunks(len(states), settings.chunk_tokens):
            # d KL / d logit_j = p_j (log p_j - log q_j - KL)
            log_p = _logits(states[rows], head, banned, settings, buffer, slope).log_softmax(1)
            log_q = _logits(ref_states[rows], ref_head, banned, settings, buffer).log_softmax(1)
            factor = _log_ratio(log_p, log_q, banned).sub_(kl[rows, None]).mul_(grad_kl[rows, None])
            grad_logits = log_p.exp_().mul_(factor)
            _accumulate_gradients(grad_logits, states, head, rows, settings, slope, grad_states, grad_weight)
        return (
            grad_states,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 4,
        )


def _empty_gradients(ctx: Any, states: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return tensors for the gradients of states and weight; None where no gradient is needed."""
    states_need_grad, weight_needs_grad = ctx.needs_input_grad[:2]
    return (
        torch.empty_like(states) if states_need_grad else None,
        torch.zeros(weight.shape, dtype=_float32_or_wider(weight), device=weight.device) if weight_needs_grad else None,
    )


def _accumulate_gradients(
    grad_logits: Tensor,
    states: Tensor,
    head: Tensor,
    rows: slice,
    settings: _Settings,
    slope: Tensor | None,
    grad_states: Tensor | None,
    grad_weight: Tensor | None,
) -> None:
    """Write the states' gradient of these rows, and add to the weight's. Overwrites grad_logits.

    slope: the derivative of the cap at these rows; None without a cap.
    """
    if settings.temperature != 1.0:
        grad_logits.div_(settings.temperature)
    if slope is not None:
        grad_logits.mul_(slope[: len(grad_logits)])
    grad_product = grad_logits.to(settings.product_dtype)
    if grad_states is not None:
        grad_states[rows] = grad_product @ head
    if grad_weight is not None:
        _add_product(grad_weight, grad_product, states[rows].to(settings.product_dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left.T @ right to total.

    Without a temporary of the size of total, except on a CPU in 16 bits, where one product is
    faster than several.
    Args: total: [V, D], float32 or wider. left: [rows, V], right: [rows, D], in the same dtype.
    """
    if total.dtype == right.dtype:
        total.addmm_(left.T, right)
    elif total.device.type == "cpu":
        total += left.T @ right
    elif total.device.type in transfer.PINNED_FOR and _adds_in_float32(total.device, right.dtype):
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        for part in _chunks(len(total), _SLICE_ROWS):
            total[part] += left[:, part].T @ right


@cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether addmm adds a product in 16 bits to a float32 matrix, in place and unrounded.

    torch has this for CUDA only, and some versions refuse a matrix to add to in float32. Tried once
    for each device and dtype, since no version number says so; the host waits for the result.
    """
    total = torch.ones(16, 16, device=device)
    factor = torch.full((16, 16), 1.0078125, dtype=dtype, device=device)
    try:
        torch.addmm(total, factor.T, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17.2509765625).all())  # 1 + 16 * 1.0078125 ** 2, which bfloat16 does not have


def _log_ratio(log_p: Tensor, log_q: Tensor, banned: Tensor) -> Tensor:
    """Return log p - log q; 0 for banned tokens, where both are -inf. Overwrites log_q."""
    log_ratio = torch.sub(log_p, log_q, out=log_q)
    log_ratio.index_fill_(1, banned, 0.0)
    return log_ratio


def _logits_buffer(states: Tensor, head: Tensor, settings: _Settings) -> Tensor:
    """Return an uninitialized buffer [chunk rows, V] that all chunks use in turn.

    The operating system zeroes newly allocated memory, which on a CPU would take a quarter of the
    time.
    """
    rows = min(len(states), settings.chunk_tokens)
    return torch.empty(rows, len(head), dtype=_float32_or_wider(states), device=states.device)


def _logits(
    states: Tensor,
    head: Tensor,
    banned: Tensor,
    settings: _Settings,
    buffer: Tensor,
    slope: Tensor | None = None,
) -> Tensor:
    """Return the logits [rows, V] of a chunk, divided by the temperature, in the buffer.

    head: the weight in the dtype of the product. slope: receives the derivative of the cap.
    """
    logits = buffer[: len(states)]
    if settings.product_dtype == buffer.dtype:
        torch.mm(states.to(buffer.dtype), head.T, out=logits)
    else:
        logits.copy_(states.to(settings.product_dtype) @ head.T)
    if settings.logit_cap is not None:
        logits.div_(settings.logit_cap).tanh_()
        if slope is not None:  # 1 - tanh^2
            torch.mul(logits, logits, out=slope[: len(logits)]).neg_().add_(1.0)
        logits.mul_(settings.logit_cap)
    if settings.temperature != 1.0:
        logits.div_(settings.temperature)
    logits.index_fill_(1, banned, -torch.inf)
    return logits


def _float32_or_wider(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


class LogprobHead(nn.Linear):
    """A head that computes log-probabilities; its forward is Linear's.

    FSDP gathers the weights of a module around calls of its methods. The head's weight is therefore
    used in methods of the head only, and not taken from it.
    """

    def token_logprobs(
        self,
        states: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        banned_token_ids: Sequence[int],
        entropy_gradient: bool,
        against: Predictions | None,
        logit_cap: float | None,
        chunk_tokens: int | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logprobs, entropy and kl of the function token_logprobs, with this weight.

        They are a tuple because FSDP finds gradients in tuples, not in dataclasses.
        """
        outputs = token_logprobs(
            states,
            self.weight,
            targets,
            temperature=temperature,
            banned_token_ids=banned_token_ids,
            entropy_gradient=entropy_gradient,
            against=against,
            logit_cap=logit_cap,
            chunk_tokens=chunk_tokens,
        )
        return outputs.logprobs, outputs.entropy, outputs.kl

    def full_weight(self) -> Tensor:
        """Return the weight [V, D] without gradient; if it is sharded, until it is resharded."""
        return self.weight.detach()


def use_logprob_head(model: nn.Module) -> None:
    """Make the head of a transformers model a LogprobHead. Its parameters do not change."""
    head = model.get_submodule("lm_head")
    if not isinstance(head, LogprobHead):
        assert type(head) is nn.Linear, f"the head is a {type(head).__name__}"
        head.__class__ = LogprobHead
