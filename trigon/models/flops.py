"""How many floating-point operations a pass takes, from a config and lengths: what a step's time is held against.

A multiplication and its addition are two. Counted are matrix products, in linear layers and in attention: at the pairs
of tokens that look at each other and no others, so that causal attention is half a square. Not counted are norms,
activations, rotary positions and the interpolation of positions, which are not matrix products; and what is computed
again, be it under gradient checkpointing or in a kernel.

        honest      what learning from the groups takes: each prompt, and each image, once
        credited    what it takes where nothing is shared, and every completion comes behind its own prompt and images,
                    with logits at every token: for comparing with figures that were published of such trainers

The backward is twice the forward: a gradient for the weights, and one for the inputs. The first layer of a vision tower
needs none for its inputs, and a tower that is frozen has no backward. LoRA is counted as if all weights were trained.

Knows configs and lengths. Refuses to know tensors and devices' clocks, and to guess: a family whose networks are not
written out here has no count, and gets None.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trigon.models.attention import windows_of

Sharing = Literal["honest", "credited"]

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

# Dense, in bfloat16, as the makers state it; TFLOP/s. A part that only looks alike (PCIe, a slice) is another one.
_PEAKS = (
    (r"H100( 80GB HBM3)?|H200|H800( 80GB HBM3)?", 989.0),
    (r"A[18]00[- ](SXM4?|PCIE?|\d+GB)[-\w ]*", 312.0),
    (r"L40S", 362.0),
    (r"L20", 119.5),
    (r"GeForce RTX 4090", 165.0),
)


@dataclass(frozen=True, slots=True)
class GroupLengths:
    """How long a group is, in tokens; of each image or video (time, height, width) in patches."""

    prompt: int
    completions: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of a forward, by where they are.

    linear: of the decoder's linear layers. attention: of its attention. head: of the logits. vision: of the tower.
    pixels: of the tower's first layer, which is not in `vision`.
    """

    linear: int
    attention: int
    head: int
    vision: int
    pixels: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.linear + self.attention + self.head + self.vision + self.pixels


def forward_flops(hf_config: Any, groups: Sequence[GroupLengths], sharing: Sharing) -> Flops | None:
    """Return what a forward over groups takes; None for a family that is not counted."""
    text, vision = hf_config.get_text_config(), getattr(hf_config, "vision_config", None)
    if text.model_type not in _TEXT or (vision is not None and hf_config.model_type not in _TOWERS):
        return None
    tokens = pairs = logits = images = pixels = 0
    windows = windows_of(text)
    for group in groups:
        once, lengths = group.prompt, group.completions
        if sharing == "honest":
            spans = [(0, once), *((once, once + length) for length in lengths)]
            logits += sum(lengths)
            repeats = 1
        else:
            spans = [(0, once + length) for length in lengths]
            logits += sum(end for _, end in spans)
            repeats = len(lengths)
        tokens += sum(end - start for start, end in spans)
        pairs += sum(_pairs(start, end, window) for window in windows for start, end in spans)
        if group.grids:
            assert vision is not None, "a text model has no images"
            of_blocks, of_pixels = _tower(hf_config.model_type, vision, group.grids)
            images += repeats * of_blocks
            pixels += repeats * of_pixels
    heads, width_of_head = text.num_attention_heads, head_dim(text)
    return Flops(
        linear=2 * tokens * _active_weights(text),
        attention=4 * pairs * heads * width_of_head,
        head=2 * logits * text.hidden_size * text.vocab_size,
        vision=images,
        pixels=pixels,
    )


def update_flops(
    hf_config: Any, groups: Sequence[GroupLengths], sharing: Sharing, *, vision_learns: bool = True
) -> int | None:
    """Return what a forward and a backward over groups take; None for a family that is not counted."""
    forward = forward_flops(hf_config, groups, sharing)
    if forward is None:
        return None
    backward = 2 * (forward.linear + forward.attention + forward.head)
    if vision_learns:
        backward += 2 * forward.vision + forward.pixels
    return forward.total + backward


def peak_tflops(device_name: str) -> float | None:
    """Return how many TFLOP/s a GPU does at most, dense and in bfloat16; None for one that is not in the table."""
    name = device_name.removeprefix("NVIDIA ")
    for pattern, peak in _PEAKS:
        if re.fullmatch(pattern, name) and "MIG" not in name:
            return peak
    return None


def _pairs(start: int, end: int, window: int | None) -> int:
    """Return at how many tokens those from start to end look, themselves among them: min(place + 1, window) each."""
    if window is None:
        window = end
    cut = min(max(window, start), end)  # from here on the window is what bounds them
    return (cut * (cut + 1) - start * (start + 1)) // 2 + (end - cut) * window


def head_dim(text: Any) -> int:
    """Return how many numbers a head has, from the configuration of a text model."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _active_weights(text: Any) -> int:
    """Return how many weights of the decoder's linear layers a token is multiplied with."""
    width = text.hidden_size
    attention = width * head_dim(text) * 2 * (text.num_attention_heads + text.num_key_value_heads)
    layers = int(text.num_hidden_layers)
    experts = getattr(text, "num_experts", None) or 0
    if not experts:
        return int(layers * (attention + 3 * width * text.intermediate_size))
    sparse = sum(
        layer not in (text.mlp_only_layers or ()) and (layer + 1) % text.decoder_sparse_step == 0
        for layer in range(layers)
    )
    chosen = width * experts + text.num_experts_per_tok * 3 * width * text.moe_intermediate_size
    if text.model_type == "qwen2_moe":  # has one expert for all tokens besides, and a gate for it
        chosen += 3 * width * text.shared_expert_intermediate_size + width
    return int(layers * attention + sparse * chosen + (layers - sparse) * 3 * width * text.intermediate_size)


@dataclass(frozen=True, slots=True)
class _Tower:
    """What differs between vision towers. gated: an MLP of three matrices, not two."""

    gated: bool


_TOWERS = {
    "qwen2_vl": _Tower(gated=False),
    "qwen2_5_vl": _Tower(gated=True),
    "qwen3_vl": _Tower(gated=False),
    "qwen3_vl_moe": _Tower(gated=False),
}


def _tower(model_type: str, vision: Any, grids: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return what a vision tower takes for these images: (its blocks and mergers, its first layer)."""
    if model_type == "qwen2_vl":  # calls the width of its tower embed_dim, and what comes out of it hidden_size
        width, inner, out = vision.embed_dim, int(vision.embed_dim * vision.mlp_ratio), vision.hidden_size
    else:
        width, inner, out = vision.hidden_size, vision.intermediate_size, vision.out_hidden_size
    merge = vision.spatial_merge_size
    patches = sum(time * height * width_ for time, height, width_ in grids)
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    block = 4 * width**2 + (3 if _TOWERS[model_type].gated else 2) * width * inner
    merged = width * merge**2
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    everywhere = sum(time * (height * width_) ** 2 for time, height, width_ in grids)
    full_layers = vision.depth
    within_windows = 0
    if model_type == "qwen2_5_vl":
        full_layers = len(vision.fullatt_block_indexes)
        side = vision.window_size // vision.patch_size // merge
        within_windows = sum(
            time * merge**4 * _squares(height // merge, side) * _squares(width_ // merge, side)
            for time, height, width_ in grids
        )
    pairs = full_layers * everywhere + (vision.depth - full_layers) * within_windows
    blocks = 2 * patches * vision.depth * block + 4 * pairs * width
    merging = mergers * 2 * (patches // merge**2) * (merged**2 + merged * out)
    return blocks + merging, 2 * patches * values * width


def _squares(length: int, window: int) -> int:
    """Return the sum of the squares of the lengths of the windows that a length falls into, the last maybe short."""
    return length // window * window**2 + (length % window) ** 2
