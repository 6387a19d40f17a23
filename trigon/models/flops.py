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
from trigon.models.dimensions import TextDimensions, VisionDimensions, dimensions_of
from trigon.types import Completion, Prompt, TrainSequence, pixels_of

Counting = Literal["shared", "repeated"]

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

    grids: (time, height, width) of each image or video of the prompt, in patches.
    observed: how many tokens of the completions together were observed, and have no logits.
    observed_grids: of each image of the completions.
    """

    prompt: int
    completions: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...] = ()
    observed: int = 0
    observed_grids: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, prompt: Prompt, completions: Sequence[Completion | TrainSequence]) -> GroupLengths:
        """Return the lengths of a group. completions: of this prompt."""
        lengths = tuple(len(completion.token_ids) for completion in completions)
        num_sampled = sum(end - start for completion in completions for start, end in completion.sampled)
        return cls(
            prompt=len(prompt.token_ids),
            completions=lengths,
            grids=_grids(prompt),
            observed=sum(lengths) - num_sampled,
            observed_grids=tuple(grid for completion in completions for grid in _grids(completion)),
        )


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


def forward_flops(
    hf_config: Any, groups: Sequence[GroupLengths], counting: Counting, *, outputs: int | None = None
) -> Flops | None:
    """Return the operations of a forward over groups; None for a family that is not counted.

    Args:
        hf_config: the Hugging Face config of the model.
        groups: the lengths of each group.
        counting: how often prompts and images count, see the module.
        outputs: of the head; None: the vocabulary.
    """
    dimensions = dimensions_of(hf_config)
    if dimensions is None:
        return None
    text, vision = dimensions.text, dimensions.vision
    tokens = pairs = logits = blocks = patch_embedding = 0
    windows = sliding_windows(hf_config.get_text_config())
    for group in groups:
        prompt, lengths = group.prompt, group.completions
        if counting == "shared":
            spans = [(0, prompt), *((prompt, prompt + length) for length in lengths)]
            logits += sum(lengths) - group.observed
            repeats = 1
        else:
            spans = [(0, prompt + length) for length in lengths]
            logits += sum(end for _, end in spans)
            repeats = len(lengths)
        tokens += sum(end - start for start, end in spans)
        pairs += sum(_attended_pairs(start, end, window) for window in windows for start, end in spans)
        for grids, times in ((group.grids, repeats), (group.observed_grids, 1)):
            if grids:
                assert vision is not None, "a text model has no images"
                of_blocks, of_patch_embedding = _vision_flops(vision, hf_config.vision_config, grids)
                blocks += times * of_blocks
                patch_embedding += times * of_patch_embedding
    return Flops(
        linear=2 * tokens * _active_weights(text),
        attention=4 * pairs * text.heads * text.head_dim,
        head=2 * logits * text.width * (text.vocabulary if outputs is None else outputs),
        vision=blocks,
        patch_embedding=patch_embedding,
    )


def update_flops(
    hf_config: Any,
    groups: Sequence[GroupLengths],
    counting: Counting,
    *,
    trains_vision: bool = True,
    outputs: int | None = None,
) -> int | None:
    """Return the operations of an update over groups; None for a family that is not counted.

    An update is a forward and a backward.

    Args: as in forward_flops. trains_vision: False for a frozen vision tower.
    """
    forward = forward_flops(hf_config, groups, counting, outputs=outputs)
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


def _grids(part: Prompt | Completion | TrainSequence) -> tuple[tuple[int, int, int], ...]:
    pixels = pixels_of(part)
    return () if pixels is None else tuple((time, rows, columns) for time, rows, columns in pixels.grid_thw.tolist())


def _attended_pairs(start: int, end: int, window: int | None) -> int:
    """Return the number of (query, key) pairs of queries at positions start to end.

    A query attends to min(position + 1, window) keys.
    """
    if window is None:
        window = end
    limited = min(max(window, start), end)  # the first position that the window limits
    return (limited * (limited + 1) - start * (start + 1)) // 2 + (end - limited) * window


def _active_weights(text: TextDimensions) -> int:
    """Return the number of weights in linear layers that each token is multiplied with."""
    moe = text.width * text.experts + text.experts_per_token * 3 * text.width * text.expert_mlp
    if text.shared_mlp:  # has a gate as well
        moe += 3 * text.width * text.shared_mlp + text.width
    dense = 3 * text.width * text.mlp
    return text.layers * text.attention_weights + text.moe_layers * moe + (text.layers - text.moe_layers) * dense


def _vision_flops(
    vision: VisionDimensions, vision_config: Any, grids: Sequence[tuple[int, int, int]]
) -> tuple[int, int]:
    """Return the operations of a vision tower for these images.

    Returns: (those of its blocks and mergers, those of its first layer).
    """
    merge, width = vision.merge, vision.width
    patches = sum(time * height * columns for time, height, columns in grids)
    merged = width * merge**2
    full_pairs = sum(time * (height * columns) ** 2 for time, height, columns in grids)
    full_layers = vision.layers
    window_pairs = 0
    if hasattr(vision_config, "fullatt_block_indexes"):  # Qwen2.5-VL
        full_layers = len(vision_config.fullatt_block_indexes)
        side = vision_config.window_size // vision_config.patch_size // merge
        window_pairs = sum(
            time * merge**4 * _sum_of_squares(height // merge, side) * _sum_of_squares(columns // merge, side)
            for time, height, columns in grids
        )
    pairs = full_layers * full_pairs + (vision.layers - full_layers) * window_pairs
    blocks = 2 * patches * vision.layers * vision.block_weights + 4 * pairs * width
    merging = vision.mergers * 2 * (patches // merge**2) * (merged**2 + merged * vision.out)
    return blocks + merging, 2 * patches * vision.values_per_patch * width


def _sum_of_squares(length: int, window: int) -> int:
    """Return the sum of the squared lengths of the windows of a length; the last may be shorter."""
    return length // window * window**2 + (length % window) ** 2
