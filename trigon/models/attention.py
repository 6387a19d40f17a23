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

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trigon.models.attention_metadata import AttentionCall, AttentionMetadata, run_lengths
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


def configured_kernel(config: Any) -> Kernel:
    """Return the kernel that use_group_attention has written into the config of a model's part."""
    name = config._attn_implementation
    for kernel, known in (*GROUP_ATTENTION.items(), *WINDOW_ATTENTION.items()):
        if name == known:
            return kernel
    raise RuntimeError(f"A model with {name!r} attention cannot score packed rows. Call use_group_attention first.")


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
            calls = metadata.calls(window)
            return _attention_in_calls(query, key, value, metadata.runs, calls, scale=scale, causal=True)
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


def _attention_in_calls(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Sequence[tuple[int, int]],
    calls: Iterable[AttentionCall],
    *,
    scale: float,
    causal: bool,
) -> Tensor:
    """Return the attention of these runs of equally long segments, of which each is in one call.

    runs: (length, number of segments) in row order. causal: calls without a mask are causal.
    """
    # One split of each tensor: the gradient of many slices would be as many tensors of the row's
    # size.
    sizes = [length * count for length, count in runs]
    queries, keys, values = (
        [_stack(run, count) for run, (_, count) in zip(torch.split(states, sizes, 2), runs, strict=True)]
        for states in (query, key, value)
    )
    outputs: dict[int, Tensor] = {}
    for call in calls:
        output = _sdpa(
            _concatenate([queries[run] for run in call.runs]),
            *(_concatenate([_keys_of(states, *each) for each in call.by_prompt]) for states in (keys, values)),
            scale=scale,
            mask=call.mask,
            causal=causal and call.mask is None,
        )
        outputs.update(zip(call.runs, torch.split(output, [runs[run][1] for run in call.runs]), strict=True))
    return torch.cat([outputs[run].transpose(1, 2).flatten(0, 1)[None] for run in range(len(runs))], 1)


def _stack(run: Tensor, count: int) -> Tensor:
    """Return a view of a run as a batch of its segments: [1, H, S * L, D] -> [S, H, L, D]."""
    _, heads, tokens, width = run.shape
    return run[0].view(heads, count, tokens // count, width).transpose(0, 1)


def _keys_of(states: Sequence[Tensor], prompt: int | None, runs: Sequence[int]) -> Tensor:
    """Return the keys, or values, of segments of R tokens after a prompt of P: [S, K, P + R, D]."""
    own = _concatenate([states[run] for run in runs])
    return own if prompt is None else torch.cat((states[prompt].expand(len(own), -1, -1, -1), own), 2)


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
        runs, by_length = run_lengths(starts.diff().tolist()), defaultdict[int, list[int]](list)
        for number, (length, _) in enumerate(runs):
            by_length[length].append(number)
        calls = (AttentionCall(((None, tuple(numbers)),)) for numbers in by_length.values())
        return _attention_in_calls(query, key, value, runs, calls, scale=scale, causal=False)
    if max_length is None:
        max_length = int(starts.diff().max())
    segments = Segments(query_starts=starts, key_starts=starts, max_queries=max_length, max_keys=max_length)
    query, key, value = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    return varlen_attention(query, key, value, segments, kernel=kernel, scale=scale, causal=False)[None]


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
