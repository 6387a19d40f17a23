"""Gated linear attention within the groups of a packed row.

A layer reads the tokens of a sequence one after the other. It keeps a state, one matrix for each
head, and the last inputs of a short convolution. In a row every completion begins with both as its
prompt left them:

    row      [ prompt | completion 1 | completion 2 | prompt' | completion 1' ]
    state     0 -> S    S ->           S ->           0 -> S'   S' ->

All prompts are computed in one call, then all completions, each from the state of its prompt, into
which the gradients of the completions add up. No state passes from one segment to another one.

On a GPU flash-linear-attention computes the calls, if it is installed; otherwise, and on the CPU,
gated_delta_rule below. Gated delta networks: arXiv:2412.06464; the computation in chunks:
arXiv:2406.06484, section 3.2.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trigon.models.attention_metadata import RECURRENT_CHUNK, AttentionMetadata, Recurrence, Segmentation
from trigon.models.dtypes import autocast_off
from trigon.models.families import ModelFamily
from trigon.models.kernels import FLASH_DTYPES, gather_keys
from trigon.models.sequence_parallel import heads_for_tokens, parts_for_heads

_EPSILON = 1e-6  # of the norm of queries and keys


def use_group_linear_attention(model: Any, family: ModelFamily) -> None:
    """Make the linear attention layers of a model compute packed rows.

    Their parameters do not change. Without metadata of a row they compute what transformers does.
    """
    if not family.linear_attention:
        return
    for layer in family.language_model(model).layers:
        mixer = getattr(layer, family.linear_attention, None)
        if mixer is not None:
            kind: Any = type(mixer)
            mixer.__class__ = _with_groups(kind)


@cache
def _with_groups(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of transformers' layer that computes packed rows as well."""

    def forward(self: Any, hidden_states: Tensor, *, attention_metadata: Any = None, **arguments: Any) -> Tensor:
        if attention_metadata is not None:
            return linear_attention(self, hidden_states, attention_metadata)
        output: Tensor = kind.forward(self, hidden_states, **arguments)
        return output

    return type(kind.__name__, (kind,), {"forward": forward})


def linear_attention(layer: Any, hidden_states: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Compute a gated delta layer of transformers on a packed row.

    With sequence parallelism the ranks of the row exchange tokens for heads, as for attention.

    Args: layer: for example a Qwen3_5GatedDeltaNet. hidden_states: [1, L, D], this rank's tokens.
    Returns: [1, L, D].
    """
    states, ranks = hidden_states[0], metadata.row_ranks
    mixed, gate, b, a = _projected(layer, states)
    kernel, log_rate, bias = layer.conv1d.weight, layer.A_log, layer.dt_bias
    widths = [layer.key_dim, layer.key_dim, layer.value_dim]
    heads = [layer.num_k_heads, layer.num_k_heads, layer.num_v_heads]
    if ranks is not None:
        *parts, b, a = parts_for_heads(
            [*_heads(mixed, widths, heads), b[..., None], a[..., None]], metadata.tokens, ranks
        )
        mixed, b, a = torch.cat([part.flatten(1) for part in parts], 1), b[..., 0], a[..., 0]
        kernel = torch.cat([part.chunk(ranks.size)[ranks.rank] for part in torch.split(kernel, widths)])
        log_rate, bias = (part.chunk(ranks.size)[ranks.rank] for part in (log_rate, bias))
        widths, heads = ([number // ranks.size for number in numbers] for numbers in (widths, heads))

    recurrence = metadata.recurrence(layer.conv_kernel_size - 1)
    query, key, value = _heads(_convolve(mixed, kernel, recurrence), widths, heads)
    exact = torch.promote_types(a.dtype, torch.float32)
    decay = -log_rate.to(exact).exp() * functional.softplus(a.to(exact) + bias)
    output = _delta_rule(query, key, value, decay[recurrence.order], b.sigmoid()[recurrence.order], recurrence)[
        recurrence.inverse
    ]
    if ranks is not None:
        output = heads_for_tokens(output[None], len(states), ranks)[0]
    normed = layer.norm(output.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    projected: Tensor = layer.out_proj(normed.view(1, len(states), -1))
    return projected


def _projected(layer: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the queries, keys and values in one, [L, C]; the output gate; beta and decay, [L, H].

    states: [L, D].
    """
    if hasattr(layer, "in_proj_qkv"):
        return layer.in_proj_qkv(states), layer.in_proj_z(states), layer.in_proj_b(states), layer.in_proj_a(states)
    # Qwen3-Next has two matrices, in which the parts of each key head are consecutive.
    fused = layer.in_proj_qkvz(states)[None], layer.in_proj_ba(states)[None]
    query, key, value, gate, b, a = (part[0] for part in layer.fix_query_key_value_ordering(*fused))
    return torch.cat([part.flatten(1) for part in (query, key, value)], 1), gate, b, a


def _heads(mixed: Tensor, widths: Sequence[int], heads: Sequence[int]) -> list[Tensor]:
    """Split [T, C] into queries, keys and values: [T, H, D] each."""
    parts = torch.split(mixed, [*widths], 1)
    return [part.reshape(len(part), number, -1) for part, number in zip(parts, heads, strict=True)]


def _convolve(mixed: Tensor, kernel: Tensor, recurrence: Recurrence) -> Tensor:
    """Return the short causal convolution of each segment, with SiLU.

    Args: mixed: [T, C]. kernel: [C, 1, K]. Returns: [T, C], with the prompts first.
    """
    # Each segment after its history: K - 1 zeros, or the last tokens of its prompt.
    extended = gather_keys(functional.pad(mixed, (0, 0, 0, 1)), recurrence.extended)
    output = functional.conv1d(extended.T[None], kernel.to(mixed.dtype), groups=kernel.shape[0])
    return functional.silu(output[0].T.index_select(0, recurrence.places))


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, recurrence: Recurrence
) -> Tensor:
    """Return what each token reads: prompts from a state of zero, then completions from theirs.

    Args:
        query, key: [T, heads, K]. value: [T, H, V], where the number of heads divides H.
        decay: [T, H], logarithms. beta: [T, H]. All with the prompts first.
    Returns: [T, H, V], with the prompts first.
    """
    inputs = (query, key, value, decay, beta)
    split = recurrence.prompts.tokens
    prompts, states = _segments([part[:split] for part in inputs], recurrence.prompts, None)
    # Their gradients are added in one sum for each group, and so in a fixed order.
    initial = torch.cat(
        [
            state.expand(count, -1, -1, -1)
            for state, count in zip(torch.split(states, 1), recurrence.completion_counts, strict=True)
        ]
    )
    completions, _ = _segments([part[split:] for part in inputs], recurrence.completions, initial)
    return torch.cat([prompts, completions])


def _segments(inputs: Sequence[Tensor], segments: Segmentation, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what the tokens of consecutive segments read, [T, H, V], and the states at their ends.

    Args: inputs: of _delta_rule. initial: [S, H, K, V]; None for zeros.
    """
    if inputs[0].is_cuda and inputs[0].dtype in FLASH_DTYPES and has_fast_kernels():
        return _segments_fla(inputs, segments, initial)
    padded = [functional.pad(part, (0,) * (2 * part.ndim - 1) + (1,)) for part in inputs]
    outputs, finals = [], []
    for batch in segments.batches:
        state = None if initial is None else initial.index_select(0, batch.indices)
        rows = (part.index_select(0, batch.sources.flatten()) for part in padded)
        inputs_of_batch = [part.view(*batch.sources.shape, *part.shape[1:]) for part in rows]
        output, final = gated_delta_rule(*inputs_of_batch, state=state)
        outputs.append(output.flatten(0, 1))
        finals.append(final)
    return (
        torch.cat(outputs).index_select(0, segments.outputs).to(inputs[2].dtype),
        torch.cat(finals).index_select(0, segments.finals),
    )


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule of a batch, in float32 or wider, and in chunks of tokens.

    A token with key k and value v changes the state: S' = e^decay S, then S = S' + k (beta (v - S'ᵀ
    k))ᵀ. It reads Sᵀ q. Keys and queries are normalized; a token with decay and beta of 0 changes
    nothing, so that segments are padded with zeros.

    Args:
        query, key: [B, L, heads, K]. value: [B, L, H, V]. decay, beta: [B, L, H].
            L is at most, or a multiple of, RECURRENT_CHUNK.
        state: [B, H, K, V] at the beginning; None for zeros.
    Returns: [B, L, H, V] and the state at the end, both in the dtype of the computation.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    chunk, repeats = min(RECURRENT_CHUNK, query.shape[1]), value.shape[2] // query.shape[2]

    def chunks(part: Tensor) -> Tensor:  # [B, L, H, ...] -> [B, H, L / chunk, chunk, ...]
        heads_first = part.to(exact).transpose(1, 2)
        return heads_first.reshape(*heads_first.shape[:2], -1, chunk, *heads_first.shape[3:])

    query, key = (
        chunks(part * (part.square().sum(-1, keepdim=True) + _EPSILON).rsqrt())
        for part in (query.to(exact), key.to(exact))
    )
    query, key = (part.repeat_interleave(repeats, 1) for part in (query * query.shape[-1] ** -0.5, key))
    value, decay, beta = chunks(value), chunks(decay).cumsum(-1), chunks(beta)[..., None]

    with autocast_off(query.device):  # which would make these products in 16 bits
        later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
        since, until = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]
        # What a token writes depends on what earlier tokens of the chunk wrote: a triangular
        # system, whose right side is what it would write into an empty state, and what it reads of
        # the state.
        system = (beta * key) @ key.mT * between
        right = torch.cat([beta * value, beta * key * since], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        written, read = torch.split(solved, [value.shape[-1], key.shape[-1]], -1)

        within, query, key = query @ key.mT * between, query * since, key * until
        outputs = []
        for index in range(value.shape[2]):
            if state is None:
                new = written[:, :, index]
                outputs.append(within[:, :, index] @ new)
                state = key[:, :, index].mT @ new
            else:
                new = written[:, :, index] - read[:, :, index] @ state
                outputs.append(query[:, :, index] @ state + within[:, :, index] @ new)
                state = state * since[:, :, index, -1:] + key[:, :, index].mT @ new
    assert state is not None
    return torch.cat(outputs, 2).transpose(1, 2), state


@cache
def has_fast_kernels() -> bool:
    """Return whether flash-linear-attention is installed."""
    return importlib.util.find_spec("fla") is not None


def _segments_fla(inputs: Sequence[Tensor], segments: Segmentation, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    query, key, value, decay, beta = (part[None] for part in inputs)
    output, final = chunk_gated_delta_rule(
        query,
        key,
        value,
        decay,
        beta.to(query.dtype),
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=segments.starts,
        cu_seqlens_cpu=segments.host_starts,
    )
    return output[0], final
