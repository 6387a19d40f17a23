"""LLaVA-OneVision: an image is one tile that shows all of it, and tiles whose padding is removed.

The image is resized to fit one of several shapes, padded, and cut into tiles. After the vision
tower the features of the tiles are put together again. Features of padding are left out,
features of more than nine tiles are reduced, and each row ends with a learned feature (n). An image
that is half as high as wide, in a shape of 2 x 2 tiles of 2 x 2 patches each:

    all of it   a a     its tiles   0 0 | 0 0     features   t t t t n
                a a                 t t | t t                t t t t n
                                    ---------
                                    t t | t t
                                    0 0 | 0 0
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
import transformers  # its classes are imported on first use
from torch import Tensor, nn

from trigon.models.families.family import TileAssembly, llava_family
from trigon.models.families.tiny import TILE_PATCH_SIZE, TILE_SIZE, TILE_VISION, TinyModel, media_tokens, text_options
from trigon.types import ImageSizes

_MAX_TILES = 9
"""Larger images are reduced to about the features of nine tiles: "anyres_max_9" in the config."""


def image_tokens(config: Any, num_tiles: int, size: tuple[int, int]) -> int:
    """Return the number of features of an image of this (width, height)."""
    side = _side(config)
    if num_tiles == 1:
        return side**2 + 1
    _, *unpadded = _unpadded(torch.empty(1, *_shape(config, size), device="meta"), size).shape
    rows, columns = _reduced(unpadded, side)
    return side**2 + rows * (columns + 1)


def image_features(model: Any, tiles: Tensor, counts: Sequence[int], sizes: ImageSizes) -> Tensor:
    """Return the features of images, [tokens, D]; see TileAssembly.

    As LlavaOnevisionModel.get_image_features of transformers (5.19), which finds the number of
    tiles by the sizes, and cannot be given one tile.
    """
    config, inner = model.config, model.model
    states = inner.vision_tower(tiles, output_hidden_states=True).hidden_states[config.vision_feature_layer]
    parts = torch.split(inner.multi_modal_projector(states), list(counts))
    return torch.cat([_assembled(config, inner.image_newline, *each) for each in zip(parts, sizes, strict=True)])


def _assembled(config: Any, newline: Tensor, tiles: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the features of one image, given the features of its tiles, [tiles, tokens, D]."""
    whole, newline = tiles[0], newline.to(tiles)
    if len(tiles) == 1:
        return torch.cat([whole, newline[None]])
    side = _side(config)
    height, width = _shape(config, size)
    split = tiles[1:].reshape(height // side, width // side, side, side, -1)
    features = _unpadded(split.permute(4, 0, 2, 1, 3).reshape(-1, height, width), size)  # [D, rows, columns]
    rows, columns = _reduced(features.shape[1:], side)
    if (rows, columns) != features.shape[1:]:
        features = nn.functional.interpolate(features[None], (rows, columns), mode="bilinear")[0]
    with_ends = torch.cat([features, newline[:, None, None].expand(-1, rows, 1)], dim=2)
    return torch.cat([whole, with_ends.flatten(1).T])


def _side(config: Any) -> int:
    """Return the number of features along each side of a tile."""
    return int(config.vision_config.image_size // config.vision_config.patch_size)


def _shape(config: Any, size: tuple[int, int]) -> tuple[int, int]:
    """Return (rows, columns) in features of the shape to which an image is padded."""
    from transformers.image_processing_utils import select_best_resolution

    width, height = size
    rows, columns = select_best_resolution((height, width), config.image_grid_pinpoints)
    tile, side = config.vision_config.image_size, _side(config)
    return rows // tile * side, columns // tile * side


def _unpadded(features: Tensor, size: tuple[int, int]) -> Tensor:
    """Return features without the features of padding. Args: features: [D, rows, columns]."""
    from transformers.models.llava_onevision.modeling_llava_onevision import unpad_image

    width, height = size
    cropped: Tensor = unpad_image(features, (height, width))
    return cropped


def _reduced(shape: Sequence[int], side: int) -> tuple[int, int]:
    """Return the rows and columns to which the features of an image are reduced, if it is large."""
    rows, columns = shape
    ratio = sqrt(rows * columns / (_MAX_TILES * side**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)


_SHAPES = [[rows * TILE_SIZE, columns * TILE_SIZE] for rows in range(1, 5) for columns in range(1, 5)]


def _config(tokenizer: Any) -> Any:
    return transformers.LlavaOnevisionConfig(
        text_config=transformers.Qwen2Config(**text_options(tokenizer)).to_dict(),
        vision_config={**TILE_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=media_tokens(tokenizer)["image_token_id"],
        video_token_index=media_tokens(tokenizer)["video_token_id"],
        image_grid_pinpoints=_SHAPES,
    )


def _processor(tokenizer: Any) -> Any:
    tile = {"height": TILE_SIZE, "width": TILE_SIZE}
    return transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(size=tile, image_grid_pinpoints=_SHAPES),
        tokenizer=tokenizer,
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=tile),
        num_image_tokens=(TILE_SIZE // TILE_PATCH_SIZE) ** 2,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )


FAMILIES = (
    llava_family(
        model_type="llava_onevision",
        # transformers 5.19 writes the names of SigLIP's weights without their former prefix.
        tiny=TinyModel(
            _config,
            _processor,
            special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
            image_text="<|image_pad|>",
            saves_published_names=False,
        ),
        tower_type="siglip_vision_model",
        language_types=("qwen2",),
        tile_assembly=TileAssembly(image_tokens, image_features),
        image_parameters=("model.image_newline",),
    ),
)
