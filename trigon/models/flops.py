"""The number of floating-point operations of a forward or an update, from config and lengths.

A multiply-add counts as two operations. Counted are matrix products: those of linear layers, and
those of attention for the pairs of tokens that attend to each other, so that causal attention
counts half a square. Not counted are norms, activations, rotary embeddings, the interpolation of
position embeddings, and recomputation, by gradient checkpointing or within a kernel.

        shared      each prompt and each image of a group once: the work that packed groups need
        repeated    prompt and images once for each completion, with logits at every token: what a
                    trainer without shared prompts computes, for comparison with published figures

The backward counts twice the forward: the gradients of the weights, and of the inputs. The first
layer of a vision tower has no gradient of its inputs, and a frozen tower has no backward. LoRA is
counted as if all weights were trained.

Families whose networks are not described here are not counted: their functions return None.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trigon.models.attention import sliding_windows

Counting = Literal["shared", "repeated"]

_TEXT = (
    *(
        "llama",
        "mistral",
        "gemma",
        "gemma3_text",
        "qwen2",
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3",
        "qwen3_vl_text",
    ),
    *("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"),
)

# Dense bfloat16 TFLOP/s as the manufacturers state them. The patterns match whole names: other
# variants (PCIe, MIG slices) have other peaks.
_PEAKS = (
    (r"H100( 80GB HBM3)?|H200|H800( 80GB HBM3)?", 989.0),
    (r"A[18]00[- ](SXM4?|PCIE?|\d+GB)[-\w ]*", 312.0),
    (r"L40S", 362.0),
    (r"L20", 119.5),
    (r"GeForce RTX 4090", 165.0),
)


@dataclass(frozen=True, slots=True)
class GroupLengths:
    """The lengths of a group in tokens.

    grids: (time, height, width) of each image or video, in patches.
    """

    prompt: int
    completions: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Flops:
    """The floating-point operations of a forward, by part of the model.

    linear: the linear layers of the decoder. attention: its attention. head: the logits.
    vision: the vision tower without its first layer. patch_embedding: that first layer.
    """

    linear: int
    attention: int
    head: int
    vision: int
    patch_embedding: int

    @property
    def total(self) -> int:
        """The sum over all parts."""
        return self.linear + self.attention + self.head + self.vision + self.patch_embedding


def forward_flops(hf_config: Any, groups: Sequence[GroupLengths], counting: Counting) -> Flops | None:
    """Return the operations of a forward over groups; None for a family that is not counted.

    Args:
        hf_config: the Hugging Face config of the model.
        groups: the lengths of each group.
        counting: how often prompts and images count, see the module.
    """
    text, vision = hf_config.get_text_config(), getattr(hf_config, "vision_config", None)
    if text.model_type not in _TEXT or (vision is not None and hf_config.model_type not in _HAS_GATED_VISION_MLP):
        return None
    tokens = pairs = logits = blocks = patch_embedding = 0
    windows = sliding_windows(text)
    for group in groups:
        prompt, lengths = group.prompt, group.completions
        if counting == "shared":
            spans = [(0, prompt), *((prompt, prompt + length) for length in lengths)]
            logits += sum(lengths)
            repeats = 1
        else:
            spans = [(0, prompt + length) for length in lengths]
            logits += sum(end for _, end in spans)
            repeats = len(lengths)
        tokens += sum(end - start for start, end in spans)
        pairs += sum(_attended_pairs(start, end, window) for window in windows for start, end in spans)
        if group.grids:
            assert vision is not None, "a text model has no images"
            of_blocks, of_patch_embedding = _vision_flops(hf_config.model_type, vision, group.grids)
            blocks += repeats * of_blocks
            patch_embedding += repeats * of_patch_embedding
    return Flops(
        linear=2 * tokens * _active_weights(text),
        attention=4 * pairs * text.num_attention_heads * head_dim(text),
        head=2 * logits * text.hidden_size * text.vocab_size,
        vision=blocks,
        patch_embedding=patch_embedding,
    )


def update_flops(
    hf_config: Any, groups: Sequence[GroupLengths], counting: Counting, *, trains_vision: bool = True
) -> int | None:
    """Return the operations of an update over groups; None for a family that is not counted.

    An update is a forward and a backward.

    Args: as in forward_flops. trains_vision: False for a frozen vision tower.
    """
    forward = forward_flops(hf_config, groups, counting)
    if forward is None:
        return None
    backward = 2 * (forward.linear + forward.attention + forward.head)
    if trains_vision:
        backward += 2 * forward.vision + forward.patch_embedding
    return forward.total + backward


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s, dense and in bfloat16; None if it is not known."""
    name = device_name.removeprefix("NVIDIA ")
    for pattern, peak in _PEAKS:
        if re.fullmatch(pattern, name) and "MIG" not in name:
            return peak
    return None


def _attended_pairs(start: int, end: int, window: int | None) -> int:
    """Return the number of (query, key) pairs of queries at positions start to end.

    A query attends to min(position + 1, window) keys.
    """
    if window is None:
        window = end
    limited = min(max(window, start), end)  # the first position that the window limits
    return (limited * (limited + 1) - start * (start + 1)) // 2 + (end - limited) * window


def head_dim(text: Any) -> int:
    """Return the dimension of an attention head, from the config of a text model."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _active_weights(text: Any) -> int:
    """Return the number of weights in linear layers that each token is multiplied with."""
    width = text.hidden_size
    attention = width * head_dim(text) * 2 * (text.num_attention_heads + text.num_key_value_heads)
    layers = int(text.num_hidden_layers)
    num_experts = getattr(text, "num_experts", None) or 0
    if not num_experts:
        return int(layers * (attention + 3 * width * text.intermediate_size))
    moe_layers = sum(
        layer not in (text.mlp_only_layers or ()) and (layer + 1) % text.decoder_sparse_step == 0
        for layer in range(layers)
    )
    moe = width * num_experts + text.num_experts_per_tok * 3 * width * text.moe_intermediate_size
    if text.model_type == "qwen2_moe":  # has a shared expert as well, and its gate
        moe += 3 * width * text.shared_expert_intermediate_size + width
    return int(layers * attention + moe_layers * moe + (layers - moe_layers) * 3 * width * text.intermediate_size)


# Whether the MLPs of a vision tower have three matrices (gated) instead of two.
_HAS_GATED_VISION_MLP = {
    "qwen2_vl": False,
    "qwen2_5_vl": True,
    "qwen3_vl": False,
    "qwen3_vl_moe": False,
}


def _vision_flops(model_type: str, vision: Any, grids: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return the operations of a vision tower for these images.

    Returns: (those of its blocks and mergers, those of its first layer).
    """
    if model_type == "qwen2_vl":  # calls the width of its tower embed_dim, and its output width hidden_size
        width, inner, out = vision.embed_dim, int(vision.embed_dim * vision.mlp_ratio), vision.hidden_size
    else:
        width, inner, out = vision.hidden_size, vision.intermediate_size, vision.out_hidden_size
    merge = vision.spatial_merge_size
    patches = sum(time * height * columns for time, height, columns in grids)
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    block = 4 * width**2 + (3 if _HAS_GATED_VISION_MLP[model_type] else 2) * width * inner
    merged = width * merge**2
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    full_pairs = sum(time * (height * columns) ** 2 for time, height, columns in grids)
    full_layers = vision.depth
    window_pairs = 0
    if model_type == "qwen2_5_vl":
        full_layers = len(vision.fullatt_block_indexes)
        side = vision.window_size // vision.patch_size // merge
        window_pairs = sum(
            time * merge**4 * _sum_of_squares(height // merge, side) * _sum_of_squares(columns // merge, side)
            for time, height, columns in grids
        )
    pairs = full_layers * full_pairs + (vision.depth - full_layers) * window_pairs
    blocks = 2 * patches * vision.depth * block + 4 * pairs * width
    merging = mergers * 2 * (patches // merge**2) * (merged**2 + merged * out)
    return blocks + merging, 2 * patches * values * width


def _sum_of_squares(length: int, window: int) -> int:
    """Return the sum of the squared lengths of the windows of a length; the last may be shorter."""
    return length // window * window**2 + (length % window) ** 2
