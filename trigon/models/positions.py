"""Where each token stands: one position for a text model, (time, height, width) for a model with multimodal rotation.

        tokens    the  [ image of 2 x 3 tokens ]  is   a       The tokens of an image start from one position, to
        time       0    1   1   1   1   1   1     4    5       which row and column are added; the text behind it goes
        height     0    1   1   1   2   2   2     4    5       on after its longer side, a completion after its prompt.
        width      0    1   2   3   1   2   3     4    5

        tokens    the  [ video of 3 x (1 x 2) tokens ]  is     In a video, time is added as well: a position for each
        time       0    1    1    3    3    5    5      6      temporal patch, or as here (Qwen2.5-VL) as many as its
        height     0    1    1    1    1    1    1      6      seconds are worth. The text behind it goes on after the
        width      0    1    2    1    2    1    2      6      largest of them all.

Where a prompt tells times as text (Qwen3-VL), each temporal patch is a block of its own, placed like an image.

Computed here, since transformers silently falls back to one-dimensional positions when an argument is missing.
Qwen2-VL, section 2.1 (arXiv:2409.12191); Qwen2.5-VL, section 2.1.2 (arXiv:2502.13923). Where a video lasts longer than
its sides are long, transformers 5 lets the text behind it go on after the longer side, at positions that the video
holds already; the papers and vLLM do not, and no more do we. Knows no networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trigon.errors import ModelError
from trigon.models.families import Family
from trigon.types import Prompt


class _Block(NamedTuple):
    """Placeholder tokens that stand together, counted in time, height and width. step: positions between two times."""

    time: int
    height: int
    width: int
    step: float

    @property
    def num_tokens(self) -> int:
        return self.time * self.height * self.width


def prompt_positions(
    token_ids: Tensor,
    grid_thw: Tensor | None,
    family: Family,
    hf_config: Any,
    *,
    temporal_patch_seconds: Sequence[float] = (),
) -> Tensor:
    """Return the positions of a prompt's tokens, int64 on the CPU.

    Args:
        token_ids: [T] with every image or video placeholder expanded.
        grid_thw: [images or videos, 3] in patches, None without any.
        temporal_patch_seconds: of each video, as in Vision; none for images.
    Returns: [3, T] for "mrope", [1, T] for "1d".
    Raises: ModelError if the placeholders do not match the images or videos, or if a text model is given any.
    """
    token_count = len(token_ids)
    if family.rope == "1d":
        if grid_thw is not None:
            family.spatial_merge(hf_config)  # says that this family cannot take images
        return torch.arange(token_count)[None]
    blocks = [] if grid_thw is None else _blocks(grid_thw, family, hf_config, temporal_patch_seconds)
    # In numpy from here: an operation of torch on a few numbers takes ten times as long, and every prompt takes many.
    is_media = np.isin(token_ids.cpu().numpy(), family.placeholder_token_ids(hf_config))
    wanted = sum(block.num_tokens for block in blocks)
    if int(is_media.sum()) != wanted:
        what = "videos" if temporal_patch_seconds else "images"
        raise ModelError(
            f"A prompt has {int(is_media.sum())} placeholder tokens, but its "
            f"{0 if grid_thw is None else len(grid_thw)} {what} need {wanted}. "
            f"Build the prompt and its {what} with the same processor and the same pixel limits."
        )
    positions = np.empty((3, token_count), np.int64)
    token, position = 0, 0
    for block in blocks:
        text_length = int(is_media[token:].argmax())
        positions[:, token : token + text_length] = np.arange(position, position + text_length)
        position += text_length
        token += text_length
        if not is_media[token : token + block.num_tokens].all():
            raise ModelError(
                f"The {block.num_tokens} placeholder tokens of an image or video are interrupted. Build the prompt "
                "with the model's own processor."
            )
        # In float64, as vLLM has it, so that both cut the same fractions off.
        times = (np.arange(block.time, dtype=np.float64) * block.step).astype(np.int64)
        places = np.meshgrid(times, np.arange(block.height), np.arange(block.width), indexing="ij")
        positions[:, token : token + block.num_tokens] = np.reshape(places, (3, -1)) + position
        position += max(int(times[-1]) + 1, block.height, block.width)
        token += block.num_tokens
    positions[:, token:] = np.arange(position, position + token_count - token)
    return torch.from_numpy(positions)


def positions_of(family: Family, hf_config: Any) -> Callable[[Prompt], Tensor]:
    """Return the function that gives the positions of a Prompt of this model."""

    def positions(prompt: Prompt) -> Tensor:
        vision = prompt.pixels()
        return prompt_positions(
            torch.tensor(prompt.token_ids),
            None if vision is None else vision.grid_thw,
            family,
            hf_config,
            temporal_patch_seconds=() if vision is None else vision.temporal_patch_seconds,
        )

    return positions


def completion_positions(prompt: Tensor, length: int) -> Tensor:
    """Return the positions of `length` tokens that follow a prompt at these positions: [A, P] -> [A, length]."""
    return (int(prompt.max()) + 1 + torch.arange(length)).expand(len(prompt), -1)


def _blocks(grid_thw: Tensor, family: Family, hf_config: Any, seconds: Sequence[float]) -> list[_Block]:
    merge = family.spatial_merge(hf_config)
    steps = [1.0] * len(grid_thw)
    if family.video == "seconds" and seconds:
        steps = [each * hf_config.vision_config.tokens_per_second for each in seconds]
    blocks = []
    for (time, height, width), step in zip(grid_thw.tolist(), steps, strict=True):
        if family.video == "timestamps":
            blocks += [_Block(1, height // merge, width // merge, step)] * time
        else:
            blocks.append(_Block(time, height // merge, width // merge, step))
    return blocks
