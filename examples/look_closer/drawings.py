"""Draws pictures whose detail is lost at data.max_pixels: four patterns, one of them framed in red.

The question is which pattern is in the red frame. The lines of the patterns are two pixels wide,
and data.max_pixels makes one pixel of each four by four: then all patterns are the same grey, to
the last bit, while the frames are still red and blue. Where to look closer can be seen, and what is
there cannot.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

PATTERNS = ("rows", "columns", "checks", "plain")
"""The answers, equally frequent."""

PROBLEM = "<image>What is in the red frame?"

SIDE = 256
"""Pixels of each side of a picture."""

MAX_PIXELS = 64 * 64
"""data.min_pixels and data.max_pixels: four image tokens of Qwen3-VL, one for each region."""

REGIONS = ((125, 125), (625, 125), (125, 625), (625, 625))
"""Left and top of the inside of each frame, from 0 to 1000, as the tool `crop` takes them."""

EXTENT = 250
"""Width and height of the inside of each frame, from 0 to 1000."""

_LINE, _FRAME, _MARGIN = 2, 12, 8  # pixels
_INSIDE = EXTENT * SIDE // 1000
_RED, _BLUE = (210, 30, 30), (40, 60, 210)
_PAPERS = ((240, 200, 80), (110, 200, 80), (240, 200, 230), (110, 200, 230))
"""Of the quarters: yellow, green, pink and light blue, more or less. The tiny model finds a place
by the colour around it: more red is left, more blue is below."""
_VARIATION = 12
_GREY, _CONTRAST = 125, 100


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """A picture with four patterns. red: the region with the red frame, an index of REGIONS."""

    image: Image.Image
    patterns: tuple[str, ...]
    red: int

    @property
    def row(self) -> dict[str, Any]:
        """The row of the dataset."""
        file = io.BytesIO()
        self.image.save(file, "PNG", compress_level=1)
        images = [{"bytes": file.getvalue(), "path": None}]
        return {"problem": PROBLEM, "answer": self.patterns[self.red], "images": images}


def draw(rng: random.Random, index: int) -> Drawing:
    """Draw the picture of an index: each fourth has the same pattern in its red frame."""
    red = rng.randrange(len(REGIONS))
    patterns = [rng.choice(PATTERNS) for _ in REGIONS]
    patterns[red] = PATTERNS[index % len(PATTERNS)]
    image = Image.new("RGB", (SIDE, SIDE))
    pen = ImageDraw.Draw(image)
    for region, corner in enumerate(REGIONS):
        x, y = (coordinate // 500 * SIDE // 2 for coordinate in corner)
        paper = tuple(channel + rng.randint(-_VARIATION, _VARIATION) for channel in _PAPERS[region])
        pen.rectangle((x, y, x + SIDE // 2 - 1, y + SIDE // 2 - 1), fill=paper)
        left, top = (coordinate * SIDE // 1000 for coordinate in corner)
        outer = (left - _FRAME, top - _FRAME, left + _INSIDE + _FRAME - 1, top + _INSIDE + _FRAME - 1)
        pen.rectangle(outer, fill=_RED if region == red else _BLUE)
        image.paste(_lines(patterns[region]), (left, top))
    return Drawing(image, tuple(patterns), red)


def _lines(pattern: str) -> Image.Image:
    """Draw a pattern around the same grey.

    It fades towards its edges, with a margin: an edge would remain in the smaller picture, and with
    it the direction of the lines.
    """
    place = np.arange(_INSIDE)
    sign = 1 - 2 * (place // _LINE % 2)
    faded = np.sin(np.pi * (place + 0.5 - _MARGIN) / (_INSIDE - 2 * _MARGIN)) ** 2
    fade = np.where((place >= _MARGIN) & (place < _INSIDE - _MARGIN), faded, 0.0)
    rows, columns = np.broadcast_arrays(sign[:, None], sign[None, :])
    lines = {"rows": rows, "columns": columns, "checks": rows * columns, "plain": np.zeros_like(rows)}[pattern]
    grey = _GREY + _CONTRAST * lines * fade[:, None] * fade[None, :]
    return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
