"""Little images as PNG files."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def png(width: int = 56, height: int = 56, seed: int = 0) -> bytes:
    """Return a PNG file of seeded noise."""
    noise = np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, "PNG")
    return stream.getvalue()
