"""Draws pictures whose detail is lost at data.max_pixels: four patterns, one framed in red.

The question is which pattern is in the red frame. The lines of the patterns are four pixels wide.
At 56 x 56 pixels, an eighth of each side, all patterns are the same grey, while the frames are
still red and blue: where to look closer can be seen, and what is there cannot.
"""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageDraw

PATTERNS = ("rows", "columns", "checks", "plain")
"""The answers, equally frequent."""

SIDE = 448
"""Pixels of each side of a picture."""

_LINE, _FRAME, _INSIDE = 4, 24, SIDE // 4  # pixels
_RED, _BLUE = (210, 30, 30), (40, 60, 210)
_GREY, _CONTRAST = 125, 100


def draw(rng: random.Random, *, region: int, pattern: str) -> Image.Image:
    """Draw a picture with the red frame in a region, around a pattern.

    region: 0 to 3: top left, top right, bottom left, bottom right. The others have random patterns.
    """
    paper = tuple(rng.randint(215, 255) for _ in range(3))
    image = Image.new("RGB", (SIDE, SIDE), paper)
    pen = ImageDraw.Draw(image)
    for index in range(4):
        left, top, right, bottom = (coordinate * SIDE // 1000 for coordinate in box_of(index))
        outer = (left - _FRAME, top - _FRAME, right + _FRAME - 1, bottom + _FRAME - 1)
        pen.rectangle(outer, fill=_RED if index == region else _BLUE)
        shown = pattern if index == region else rng.choice(PATTERNS)
        image.paste(_lines(shown, contrast=rng.choice((-_CONTRAST, _CONTRAST))), (left, top))
    return image


def _lines(pattern: str, *, contrast: int) -> Image.Image:
    """Draw a pattern, whose mean is the same grey everywhere.

    It fades towards its edges: an edge would be seen in the smaller picture, and with it the
    direction of the lines.
    """
    sign = 1 - 2 * (np.arange(_INSIDE) // _LINE % 2)
    fade = np.sin(np.pi * (np.arange(_INSIDE) + 0.5) / _INSIDE) ** 2
    rows, columns = np.broadcast_arrays(sign[:, None], sign[None, :])
    lines = {"rows": rows, "columns": columns, "checks": rows * columns, "plain": np.zeros_like(rows)}[pattern]
    grey = _GREY + contrast * lines * fade[:, None] * fade[None, :]
    return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")


def box_of(region: int) -> list[int]:
    """Return the inside of a region's frame as the tool `crop` takes it, from 0 to 1000."""
    left, top = region % 2 * 500 + 125, region // 2 * 500 + 125
    return [left, top, left + 250, top + 250]
