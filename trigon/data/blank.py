"""Images and videos of one colour in place of those of a row, with the same size and duration.

A model that answers as well with them does not need the images. They are not left out, since the
prompt would then have other tokens. The functions have the arguments and errors of those in
images.py and videos.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trigon.data.images import encoded_image, image_size
from trigon.data.videos import FrameSampling, Pixels, VideoLayout, open_video
from trigon.errors import DataError

GREY = 235
"""The colour, that of the blank images that `trigon tiny` makes."""


def open_blank_image(source: Any, *, where: str, image_dir: Path | None, max_pixels: int) -> Image.Image:
    """Return a blank image of the size of an image, of which only the header is read."""
    size = image_size(source, where=where, image_dir=image_dir, max_pixels=max_pixels)
    return Image.new("RGB", size, (GREY, GREY, GREY))


def encoded_blank_image(source: Any, *, where: str, image_dir: Path | None, max_pixels: int) -> bytes:
    """Return open_blank_image's image as a PNG file."""
    blank = open_blank_image(source, where=where, image_dir=image_dir, max_pixels=max_pixels)
    return encoded_image(blank, where=where, image_dir=image_dir, max_pixels=max_pixels)


def open_blank_video(
    source: Any, *, where: str, image_dir: Path | None, max_pixels: int, sampling: FrameSampling
) -> tuple[VideoLayout, Iterator[Pixels]]:
    """Return the layout of a video, and an iterator over blank frames."""
    layout, frames = open_video(source, where=where, image_dir=image_dir, max_pixels=max_pixels, sampling=sampling)
    return layout, (np.full_like(frame, GREY) for frame in frames)


def encoded_blank_video(
    source: Any, *, where: str, image_dir: Path | None, max_pixels: int, sampling: FrameSampling
) -> bytes:
    """Raise DataError: videos are sent to workers as files, and none is encoded here."""
    raise DataError(
        f"{where}: blank videos are made by a single worker only; set trainer.nnodes=1 trainer.n_gpus_per_node=1, or "
        "evaluate without --blind"
    )
