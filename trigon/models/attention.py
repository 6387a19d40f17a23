"""Attention within the groups of a packed row, and within the windows of a vision tower.

    keys      p p p | a a | b b b      A prompt attends to itself, causally. A completion attends
    p p p     x                        to its whole prompt and, causally, to itself. With sdpa, all
              x x                      prompts of one length are computed in one call, and all
              x x x                    completions of one length whose prompts have one length in
    a a       x x x | x                another. The only mask is that of one such completion,
              x x x | x x              [R, P + R]; no mask of a whole row is made.
    b b b     x x x |     | x
              x x x |     | x x        Windows and images of a vision tower are independent of each
              x x x |     | x x x      other: one call for all, or one call for each length.

With a sliding window, keys further back are masked as well, also in the prompt ([P, P]).

    keys      p i i i p     In some models the tokens of an image (i) attend to each other in both
    p         x             directions. The mask of a prompt with images is then [P, P]; completions
    i i i     x x x x       that observed images have a mask each.
              x x x x
              x x x x
    p         x x x x x

The functions are registered with transformers under the names below; the names in a model's config
decide which kernel it uses. The row's metadata is passed as a keyword argument, never through a
global, so that recomputation under gradient checkpointing sees the same metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trigon.models.attention_metadata import AttentionMetadata, RunLengths, run_lengths
from trigon.models.dtypes import compute_dtype
from trigon.models.families import ModelFamily
from trigon.models.kernels import (
    Kernel,
    Segments,
    flex_group_attention,
    gather_keys,
    supports,
    varlen_attention,
)
from trigon.models.sequence_parallel import heads_for_tokens, tokens_for_heads

# None of these names contains "flash": transformers would make masks for such an implementation.
GROUP_ATTENTION: dict[Kernel, str] = {
    "sdpa": "trigon_groups",
    "varlen": "trigon_groups_varlen",
    "flex": "trigon_groups_flex",
    "flash": "trigon_groups_fa",
}
# A vision tower passes the boundaries of its windows only to an implementation whose name contains
# "flash". Any other implementation is called once for each window.
WINDOW_ATTENTION: dict[Kernel, str] = {
    "sdpa": "trigon_flash_windows",
    "varlen": "trigon_flash_windows_varlen",
    "flex": "trigon_flash_windows",
    "flash": "trigon_flash_windows_fa",
}


def sliding_windows(text_config: Any) -> tuple[int | None, ...]:
    """Return each layer's sliding window in tokens; None for full attention."""
    window = getattr(text_config, "sliding_window", None) or None
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is None:
        return (window,) * int(text_config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def use_group_attention(model: Any, family: ModelFamily, kernel: Kernel = "sdpa") -> None:
    """Replace the attention of a transformers model by group attention and window attention.

    The language model attends within groups, the vision tower within windows. A tower that takes
    a batch of images, as tiles or padded, keeps its own attention. Afterwards the model runs only
    with the keyword argument that Policy passes, and has no padded path.
    """
    from transformers import AttentionInterface

    for name in GROUP_ATTENTION.values():
        AttentionInterface.register(name, _group_attention_forward)
    for window_kernel, name in WINDOW_ATTENTION.items():
        used = "sdpa" if window_kernel == "flex" else window_kernel
        AttentionInterface.register(name, partial(_window_attention_forward, kernel=used))
    family.language_model(model).set_attn_implementation(GROUP_ATTENTION[kernel])
    tower = family.vision_tower(model)
    if tower is not None and family.vision_input in ("patches", "images"):
        # transformers 5.16 to 5.19: set_attn_implementation("...flash...") looks for a downloadable
        # kernel of that name, registered or not. The setter of the config does not.
        tower.config._attn_implementation = WINDOW_ATTENTION[kernel]


def configured_kernel(language_config: Any) -> Kernel:
    """Return the kernel that use_group_attention has written into a language model's config."""
    name = language_config._attn_implementation
    for kernel, known in GROUP_ATTENTION.items():
        if name == known:
            return kernel
    raise RuntimeError(f"A model with {name!r} attention cannot score groups. Call use_group_attention first.")


def tower_kernel(tower_config: Any) -> Kernel:
    """Return the kernel that use_group_attention has written into a vision tower's config."""
    name = tower_config._attn_implementation
    for kernel, known in WINDOW_ATTENTION.items():
        if name == known:
            return kernel
    raise RuntimeError(f"A vision tower with {name!r} attention takes no windows. Call use_group_attention first.")


def group_attention(
    query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, *, scale: float, window: int | None = None
) -> Tensor:
    """Compute attention within each group of a packed row.

    Uses the kernel of the metadata, or sdpa if that kernel does not support this dtype, head
    dimension or window. Gradient flows into query, key and value.

    Args:
        query: [1, H, T, D].
        key, value: [1, K, T, D], where K divides H.
        metadata: the metadata of the row.
        scale: factor of the scores before the softmax.
        window: sliding window of the layer in tokens; None for full attention.
    Returns: [1, T, H, D], in the dtype of autocast if it is enabled, otherwise in query's dtype.
    """
    # Autocast does not know every kernel, so the functions here cast themselves.
    dtype = compute_dtype(query.device, query.dtype)
    kernel, has_images = metadata.kernel, metadata.images(window) is not None
    if not supports(kernel, dtype, query.shape[-1], has_images=has_images):
        kernel = "sdpa"
    match kernel:
        case "sdpa":
            return _group_attention_sdpa(query, key, value, metadata, scale=scale, window=window)
        case "flex":
            query, key, value = (states.to(dtype) for states in (query, key, value))
            mask = metadata.block_mask(window)
            return flex_group_attention(query, key, value, mask, scale=scale).transpose(1, 2)
        case "varlen" | "flash":
            segments, layout = metadata.segments
            query, key, value = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
            output = varlen_attention(
                query,
                gather_keys(key, layout),
                gather_keys(value, layout),
                segments,
                kernel=kernel,
                scale=scale,
                causal=True,
                window=window,
            )
            return output[None]
        case _:
            assert_never(kernel)


def _group_attention_sdpa(
    query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, *, scale: float, window: int | None
) -> Tensor:
    # One split of each tensor: the gradient of many slices would be as many tensors of the row's
    # size.
    lengths = [part for group in metadata.groups for part in (group.prompt_length, _num_tokens(group.completion_runs))]
    queries, keys, values = (torch.split(states, lengths, 2) for states in (query, key, value))
    masks = metadata.masks(window)
    # Segments of equal lengths, of one group or of several, are computed in one call.
    prompts: dict[tuple[int, bool], list[int]] = {}  # (prompt length, is causal): indices of its groups
    completions: dict[tuple[int, int], list[int]] = {}  # (prompt length, completion length): likewise
    by_length = [
        [_stack_by_length(states[2 * index + 1], group.completion_runs) for index, group in enumerate(metadata.groups)]
        for states in (queries, keys, values)
    ]
    for index, group in enumerate(metadata.groups):
        prompts.setdefault((group.prompt_length, masks[index].prompt is None), []).append(index)
        for length in by_length[0][index]:
            completions.setdefault((group.prompt_length, length), []).append(index)
    prompt_outputs: dict[int, Tensor] = {}
    for indices in prompts.values():
        batch = [_concatenate([states[2 * index] for index in indices]) for states in (queries, keys, values)]
        of_prompts = [mask for index in indices if (mask := masks[index].prompt) is not None]
        mask = _batch_masks(of_prompts, [1] * len(indices)) if of_prompts else None
        output = _sdpa(*batch, scale=scale, mask=mask, causal=mask is None)
        prompt_outputs.update(zip(indices, torch.split(output, 1), strict=True))
    completion_outputs: list[dict[int, Tensor]] = [{} for _ in metadata.groups]
    for (_, length), indices in completions.items():
        batches = [by_length[0][index][length] for index in indices]
        keys_and_values = [
            _concatenate([_prepend_prompt(states[2 * index], own[index][length]) for index in indices])
            for states, own in ((keys, by_length[1]), (values, by_length[2]))
        ]
        mask = _batch_masks([masks[index].completion[length] for index in indices], list(map(len, batches)))
        output = _sdpa(_concatenate(batches), *keys_and_values, scale=scale, mask=mask)
        for index, part in zip(indices, torch.split(output, [len(batch) for batch in batches]), strict=True):
            completion_outputs[index][length] = part
    outputs: list[Tensor] = []
    for index, group in enumerate(metadata.groups):
        outputs.append(prompt_outputs[index].transpose(1, 2))
        outputs.extend(_unstack_in_row_order(completion_outputs[index], group.completion_runs))
    return torch.cat(outputs, 1)


def _prepend_prompt(prompt: Tensor, own: Tensor) -> Tensor:
    """Put a prompt's keys or values before the keys or values of each completion.

    [1, K, P, D], [C, K, R, D] -> [C, K, P + R, D], for C completions of R tokens.
    """
    return torch.cat((prompt.expand(len(own), -1, -1, -1), own), 2)


def _batch_masks(masks: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Return the mask of segments of equal lengths, of one group or of several.

    Args: masks: of each group, [L, K] for all of its segments or [count, 1, L, K].
    Returns: [L, K] if the segments have one mask, else [segments, 1, L, K].
    """
    if all(mask is masks[0] for mask in masks):
        return masks[0]
    return torch.cat([mask.expand(count, 1, *mask.shape[-2:]) for mask, count in zip(masks, counts, strict=True)])


def _concatenate(batches: list[Tensor]) -> Tensor:
    return torch.cat(batches) if len(batches) > 1 else batches[0]


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    *,
    scale: float,
    kernel: Literal["sdpa", "varlen", "flash"] = "sdpa",
    max_length: int | None = None,
) -> Tensor:
    """Compute attention within each window of a vision tower, without a causal mask.

    Uses the kernel, or sdpa if that does not support this dtype or head dimension. Gradient flows
    into query, key and value.

    Args:
        query, key, value: [1, H, S, D].
        starts: [windows + 1] int32, the first token of each window, and S; on the device of query
            for varlen and flash. sdpa reads them: on the CPU this does not wait for a GPU.
        scale: factor of the scores before the softmax.
        max_length: tokens of the longest window; None to compute it from starts.
    Returns: [1, S, H, D].
    """
    # Autocast does not know every kernel, so the functions here cast themselves.
    dtype = compute_dtype(query.device, query.dtype)
    if kernel == "sdpa" or not supports(kernel, dtype, query.shape[-1]):
        return _window_attention_sdpa(query, key, value, starts.diff().tolist(), scale=scale)
    if max_length is None:
        max_length = int(starts.diff().max())
    segments = Segments(query_starts=starts, key_starts=starts, max_queries=max_length, max_keys=max_length)
    query, key, value = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    return varlen_attention(query, key, value, segments, kernel=kernel, scale=scale, causal=False)[None]


def _window_attention_sdpa(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, scale: float
) -> Tensor:
    runs = run_lengths(lengths)
    keys, values = _stack_by_length(key, runs), _stack_by_length(value, runs)
    outputs = {
        length: _sdpa(batch, keys[length], values[length], scale=scale)
        for length, batch in _stack_by_length(query, runs).items()
    }
    return torch.cat(_unstack_in_row_order(outputs, runs), 1)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    heads_per_key = query.shape[1] // key.shape[1]
    if heads_per_key > 1 and query.device.type != "cpu":
        # Of torch's kernels for a GPU only flash takes fewer key heads than query heads, and it
        # takes no mask, no float32 and no head above 256: all scores would be made and kept.
        key, value = (states.repeat_interleave(heads_per_key, 1) for states in (key, value))
        heads_per_key = 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=heads_per_key > 1
    )


def _num_tokens(runs: RunLengths) -> int:
    return sum(length * count for length, count in runs)


def _stack_by_length(states: Tensor, runs: RunLengths) -> dict[int, Tensor]:
    """Split [1, H, S, D] into segments and stack segments of equal length.

    Returns: {length L: [segments, H, L, D]}.
    """
    batches: dict[int, list[Tensor]] = {}
    parts = torch.split(states, [length * count for length, count in runs], 2)
    for (length, count), run in zip(runs, parts, strict=True):
        batches.setdefault(length, []).append(run[0].view(run.shape[1], count, length, -1).transpose(0, 1))
    return {length: torch.cat(batch) if len(batch) > 1 else batch[0] for length, batch in batches.items()}


def _unstack_in_row_order(batches: dict[int, Tensor], runs: RunLengths) -> list[Tensor]:
    """Undo _stack_by_length: return the runs in row order, [1, segments * L, H, D] each."""
    counts: dict[int, list[int]] = {}
    for length, count in runs:
        counts.setdefault(length, []).append(count)
    remaining = {length: iter(torch.split(batch, counts[length])) for length, batch in batches.items()}
    return [next(remaining[length]).transpose(1, 2).flatten(0, 1)[None] for length, _ in runs]


def _group_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    attention_metadata: AttentionMetadata | None = None,
    **_unused: Any,  # other arguments of transformers, which have no effect here
) -> tuple[Tensor, None]:
    assert attention_mask is None
    assert dropout == 0.0
    if attention_metadata is None:
        raise RuntimeError(
            "A model with group attention was called directly. Call its Policy, or set_attn_implementation('sdpa')."
        )
    # Read from the config, as transformers does for its masks: not every family passes its window
    # on.
    layer: Any = module
    window = sliding_windows(layer.config)[layer.layer_idx]
    ranks = attention_metadata.row_ranks
    if ranks is None:
        return group_attention(query, key, value, attention_metadata, scale=scaling, window=window), None
    length = query.shape[2]
    query, key, value = tokens_for_heads(query, key, value, attention_metadata.tokens, ranks)
    output = group_attention(query, key, value, attention_metadata, scale=scaling, window=window)
    return heads_for_tokens(output, length, ranks), None


def _window_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    kernel: Literal["sdpa", "varlen", "flash"],
    dropout: float = 0.0,
    max_length_q: int | Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None
    assert dropout == 0.0
    # A tensor before transformers 5.18.
    max_length = None if kernel == "sdpa" or max_length_q is None else int(max_length_q)
    output = window_attention(query, key, value, cu_seq_lens_q, scale=scaling, kernel=kernel, max_length=max_length)
    return output, None
