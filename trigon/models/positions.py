"""Where each token stands: one position for a text model, (time, height, width) for a model with multimodal rotation.

        tokens    the  [ image of 2 x 3 tokens ]  is   a       The tokens of an image start from one position, to
        time       0    1   1   1   1   1   1     4    5       which row and column are added; the text behind it goes
        height     0    1   1   1   2   2   2     4    5       on after its longer side, a completion after its prompt.
        width      0    1   2   3   1   2   3     4    5

Computed here, since transformers silently falls back to one-dimensional positions when an argument is missing.
Qwen2-VL, section 2.1 (arXiv:2409.12191); Qwen2.5-VL and Qwen3-VL place still images alike. Knows no networks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trigon.errors import ModelError
from trigon.models.families import Family
from trigon.types import Prompt


def prompt_positions(token_ids: Tensor, grid_thw: Tensor | None, family: Family, hf_config: Any) -> Tensor:
    """Return the positions of a prompt's tokens, int64 on the CPU.

    Args: token_ids: [T] with every image placeholder expanded. grid_thw: [images, 3] in patches, None without images.
    Returns: [3, T] for "mrope", [1, T] for "1d".
    Raises: ModelError if the placeholders do not match the images, or if a text model is given one.
    """
    token_count = len(token_ids)
    if family.rope == "1d":
        if grid_thw is not None:
            family.spatial_merge(hf_config)  # says that this family cannot take images
        return torch.arange(token_count)[None]
    merge = family.spatial_merge(hf_config)
    is_image = (token_ids == family.image_token_id(hf_config)).cpu()
    grids = [] if grid_thw is None else [(t, h // merge, w // merge) for t, h, w in grid_thw.tolist()]
    wanted = sum(t * h * w for t, h, w in grids)
    if int(is_image.sum()) != wanted:
        raise ModelError(
            f"A prompt has {int(is_image.sum())} image placeholder tokens, but its {len(grids)} images need {wanted}. "
            "Build the prompt and its images with the same processor and the same pixel limits."
        )
    parts: list[Tensor] = []
    token, position = 0, 0
    for t, h, w in grids:
        text_length = int(is_image[token:].int().argmax())
        parts.append(_text(position, text_length))
        position += text_length
        token += text_length
        if not bool(is_image[token : token + t * h * w].all()):
            raise ModelError(
                f"The {t * h * w} placeholder tokens of an image are interrupted. Build the prompt with the model's "
                "own processor."
            )
        parts.append(torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(w)).T + position)
        position += max(h, w)
        token += t * h * w
    parts.append(_text(position, token_count - token))
    return torch.cat(parts, 1)


def positions_of(family: Family, hf_config: Any) -> Callable[[Prompt], Tensor]:
    """Return the function that gives the positions of a Prompt of this model."""

    def positions(prompt: Prompt) -> Tensor:
        vision = prompt.pixels()
        grid_thw = None if vision is None else vision.grid_thw
        return prompt_positions(torch.tensor(prompt.token_ids), grid_thw, family, hf_config)

    return positions


def completion_positions(prompt: Tensor, length: int) -> Tensor:
    """Return the positions of `length` tokens that follow a prompt at these positions: [A, P] -> [A, length]."""
    return (int(prompt.max()) + 1 + torch.arange(length)).expand(len(prompt), -1)


def _text(start: int, length: int) -> Tensor:
    return (start + torch.arange(length)).expand(3, -1)
