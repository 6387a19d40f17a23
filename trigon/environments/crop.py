"""The built-in tool `crop`: a region of an image, enlarged."""

from __future__ import annotations

import math

from PIL import Image

MIN_CROP_PIXELS = 1 << 18
"""Area to which smaller regions are enlarged: 256 tokens of Qwen3-VL, 334 of Qwen2.5-VL."""

MAX_SCALE = 1000
"""Boxes are relative: from 0 to 1000 in each direction, as Qwen3-VL is trained."""


def crop(bbox_2d: list[float], images: list[Image.Image], img_idx: int = 0) -> Image.Image:
    """Zoom in on a region of an image, and see it enlarged.

    Args:
        bbox_2d: The region as [x1, y1, x2, y2], relative to the image: from 0 to 1000, where [0, 0] is the top left corner and [1000, 1000] the bottom right one
        img_idx: The number of the image in the conversation, starting from 0 (the results of earlier calls count)
    """  # noqa: E501, W505 - a model reads it: each line break would be one more token
    if not images:
        raise ValueError("the conversation has no image")
    if isinstance(img_idx, bool) or not isinstance(img_idx, int) or not 0 <= img_idx < len(images):
        raise ValueError(f"img_idx is {img_idx!r}; it must be from 0 to {len(images) - 1}")
    is_box = isinstance(bbox_2d, list | tuple) and len(bbox_2d) == 4
    if not is_box or not all(isinstance(each, int | float) and abs(each) < math.inf for each in bbox_2d):
        raise ValueError("bbox_2d must have four numbers: [x1, y1, x2, y2]")
    x1, y1, x2, y2 = (min(max(each, 0), MAX_SCALE) for each in bbox_2d)
    if x1 >= x2 or y1 >= y2:
        raise ValueError("the region of bbox_2d is empty: x1 < x2 and y1 < y2 must hold, from 0 to 1000")
    image = images[img_idx]
    left, right = _pixels(x1, x2, image.width)
    top, bottom = _pixels(y1, y2, image.height)
    return _enlarged(image.crop((left, top, right, bottom)))


def _pixels(start: float, end: float, side: int) -> tuple[int, int]:
    """Return the pixels that a range of 0 to 1000 touches: at least one."""
    first = min(math.floor(start * side / MAX_SCALE), side - 1)
    return first, max(math.ceil(end * side / MAX_SCALE), first + 1)


def _enlarged(image: Image.Image) -> Image.Image:
    scale = math.sqrt(MIN_CROP_PIXELS / (image.width * image.height))
    if scale <= 1:
        return image
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.BICUBIC)
