"""Position ids: one for each token of a text model, or three for multimodal rotary embeddings.

    tokens    the  [ image of 2 x 3 tokens ]  is   a       The tokens of an image count from one
    time       0    1   1   1   1   1   1     4    5       position, to which row and column are
    height     0    1   1   1   2   2   2     4    5       added. The text after it continues
    width      0    1   2   3   1   2   3     4    5       after its longer side.

    tokens    the  [ video of 3 x (1 x 2) tokens ]  is     In a video time is added as well: one
    time       0    1    1    3    3    5    5      6      position per temporal patch or (here,
    height     0    1    1    1    1    1    1      6      Qwen2.5-VL) in proportion to seconds.
    width      0    1    2    1    2    1    2      6      The text continues after the largest.

A completion continues after the largest position of its prompt, and images that it observes count
in the same way. Where timestamps are written into
the prompt (Qwen3-VL), each temporal patch is a separate block with positions as in an image.

Positions are computed here because transformers falls back to one-dimensional positions, without a
warning, when an argument is missing. Qwen2-VL, section 2.1 (arXiv:2409.12191); Qwen2.5-VL, section
2.1.2 (arXiv:2502.13923). For a video that lasts longer than its sides are long, transformers 5
continues the text after the longer side, at positions that the video occupies already; the papers,
vLLM and this module continue after the largest position. This module does not depend on networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trigon.errors import ModelError
from trigon.models.families import ModelFamily
from trigon.types import Completion, Prompt, TrainSequence, pixels_of


class _Block(NamedTuple):
    """Consecutive placeholder tokens of an image, a video, or a temporal patch.

    time, height, width: sizes in tokens. step: positions between two times.
    """

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
    family: ModelFamily,
    hf_config: Any,
    *,
    temporal_patch_seconds: Sequence[float] = (),
) -> Tensor:
    """Return the position ids of a prompt.

    Args:
        token_ids: [T], with one placeholder for each image or video token.
        grid_thw: [images or videos, 3], (time, height, width) in patches; None without any.
        temporal_patch_seconds: a value for each video, as in Vision; empty for images.
    Returns: [3, T] if family.rope is "mrope", [1, T] if it is "1d"; int64 on the CPU.
    Raises: ModelError if the placeholders do not match the images or videos, or if a text model
    gets any.
    """
    token_count = len(token_ids)
    if family.rope == "1d":
        if grid_thw is not None:
            family.spatial_merge(hf_config)  # raises for a text family
        return torch.arange(token_count)[None]
    blocks = [] if grid_thw is None else _blocks(grid_thw, family, hf_config, temporal_patch_seconds)
    # numpy from here: on a few numbers an operation of torch takes ten times as long.
    is_media = np.isin(token_ids.cpu().numpy(), family.placeholder_token_ids(hf_config))
    expected = sum(block.num_tokens for block in blocks)
    if int(is_media.sum()) != expected:
        kind = "videos" if temporal_patch_seconds else "images"
        raise ModelError(
            f"A prompt has {int(is_media.sum())} placeholder tokens, but its "
            f"{0 if grid_thw is None else len(grid_thw)} {kind} need {expected}. "
            f"Build the prompt and its {kind} with the same processor and the same pixel limits."
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
                f"The {block.num_tokens} placeholder tokens of an image or video are not consecutive. Build the prompt "
                "with the model's own processor."
            )
        # float64, as in vLLM, so that both truncate the same fractions.
        times = (np.arange(block.time, dtype=np.float64) * block.step).astype(np.int64)
        grid = np.meshgrid(times, np.arange(block.height), np.arange(block.width), indexing="ij")
        positions[:, token : token + block.num_tokens] = np.reshape(grid, (3, -1)) + position
        position += max(int(times[-1]) + 1, block.height, block.width)
        token += block.num_tokens
    positions[:, token:] = np.arange(position, position + token_count - token)
    return torch.from_numpy(positions)


def positions_of(family: ModelFamily, hf_config: Any) -> Callable[[Prompt | Completion | TrainSequence], Tensor]:
    """Return a function that computes the position ids of a Prompt; see prompt_positions.

    The positions of a completion count from 0, as if no prompt preceded it.
    """

    def positions(tokens: Prompt | Completion | TrainSequence) -> Tensor:
        vision = pixels_of(tokens)
        return prompt_positions(
            torch.tensor(tokens.token_ids),
            None if vision is None else vision.grid_thw,
            family,
            hf_config,
            temporal_patch_seconds=() if vision is None else vision.temporal_patch_seconds,
        )

    return positions


def completion_positions(prompt: Tensor, length: int, own: Tensor | None = None) -> Tensor:
    """Return the position ids of a completion of `length` tokens: [A, length].

    Args:
        prompt: [A, P], the positions of its prompt, with A = 3 for "mrope" and 1 for "1d".
        own: [A, length], the positions of the completion counted from 0, if it observed images;
            None for tokens of text.
    """
    relative = torch.arange(length).expand(len(prompt), -1) if own is None else own
    return int(prompt.max()) + 1 + relative


def _blocks(grid_thw: Tensor, family: ModelFamily, hf_config: Any, seconds: Sequence[float]) -> list[_Block]:
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
