"""Images as they come: the only file that opens, turns or converts one.

Knows Pillow and what hostile or careless data looks like. An image is measured from its header, so that it can
be refused before a pixel is decoded, and the three ways in, `image_size`, `open_image` and `encoded_image`, agree by
construction: all go through `_opened`. Refuses to know rows, prompts, tensors and the size a model wants.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from trigon.data.bad_rows import UnusableRow
from trigon.data.media_files import in_one_line, open_bytes, read_bytes

MAX_ASPECT_RATIO = 200
"""Sides of this ratio or above: image processors of the Qwen families refuse them."""

# Named, so that no other of Pillow's plugins is ever tried: one of them hands its input to Ghostscript.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

# What Pillow's decoders raise on broken bytes. The two bombs: its own limits, above ours or far above.
_DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    OverflowError,
    MemoryError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)

# EXIF orientation -> how to turn the stored pixels upright; 1 is upright, and 5 to 8 exchange width and height.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def image_size(source: Any, *, where: str, image_dir: Path | None, max_pixels: int) -> tuple[int, int]:
    """Return (width, height) of an image as it will be seen, upright, from its header alone.

    Args:
        source: a PIL image, encoded bytes, a {"bytes", "path"} mapping (bytes win), or a path.
        where: what to call the image in an error: "train:17/images/0".
        image_dir: the folder to which relative paths belong and which no path may leave; None: no path is allowed.
        max_pixels: refused above it.
    Raises: UnusableRow.
    """
    with _opened(source, where, image_dir, max_pixels) as (image, orientation):
        width, height = image.size
        return (height, width) if orientation >= 5 else (width, height)


def open_image(source: Any, *, where: str, image_dir: Path | None, max_pixels: int) -> Image.Image:
    """Return an image decoded, upright, 8-bit RGB, transparency laid on white, the first frame of several.

    Args and Raises: as image_size, and UnusableRow where decoding fails.
    """
    with _opened(source, where, image_dir, max_pixels) as (image, orientation):
        try:
            image.load()
            if orientation in _UPRIGHT:
                image = image.transpose(_UPRIGHT[orientation])
            return _to_rgb(image)
        except _DECODING_ERRORS as error:
            raise UnusableRow("image_unreadable", f"{where}: {in_one_line(error)}; replace or drop it") from error


def encoded_image(source: Any, *, where: str, image_dir: Path | None, max_pixels: int) -> bytes:
    """Return the file behind an image, byte for byte; its header has been accepted, its pixels not looked at.

    A PIL image becomes a PNG of what open_image makes of it. Either way the bytes open as the very image that the
    source opens as.

    Args and Raises: as image_size; for a PIL image, as open_image.
    """
    if isinstance(source, Image.Image):
        image = open_image(source, where=where, image_dir=image_dir, max_pixels=max_pixels)
        image.info = {}  # else a colour profile would be written along
        png = io.BytesIO()
        image.save(png, "PNG", compress_level=1)
        return png.getvalue()
    encoded = read_bytes(source, "image", where=where, image_dir=image_dir)
    with _opened(encoded, where, image_dir, max_pixels):  # the bytes read, not the file, which may have changed
        return encoded


@contextmanager
def _opened(source: Any, where: str, image_dir: Path | None, max_pixels: int) -> Iterator[tuple[Image.Image, int]]:
    """Yield an image whose header has been read and found acceptable, and its EXIF orientation (1 to 8)."""
    if isinstance(source, Image.Image):
        _check_header(source, where, max_pixels)
        yield source, _orientation(source)
        return
    with open_bytes(source, "image", where=where, image_dir=image_dir) as stream:
        try:
            image = Image.open(stream, formats=_FORMATS)
            orientation = _orientation(image)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise UnusableRow("image_pixels", f"{where}: beyond what Pillow decodes: {in_one_line(error)}") from error
        except _DECODING_ERRORS as error:
            raise UnusableRow("image_unreadable", f"{where}: {in_one_line(error)}; replace or drop it") from error
        with image:
            _check_header(image, where, max_pixels)
            yield image, orientation


def _check_header(image: Image.Image, where: str, max_pixels: int) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise UnusableRow("image_unreadable", f"{where}: it is {width} x {height}")
    if width * height > max_pixels:
        pixels = f"{width} x {height} = {width * height:,} pixels"
        raise UnusableRow("image_pixels", f"{where}: {pixels}, more than max_image_pixels={max_pixels:,}")
    if max(width, height) >= MAX_ASPECT_RATIO * min(width, height):
        limit = f"{MAX_ASPECT_RATIO} or more times as long as it is wide"
        raise UnusableRow("image_shape", f"{where}: {width} x {height} is {limit}; crop it or drop the row")


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image that is still to be turned, from its header.

    TIFF: Pillow turns it while loading and already reports the upright size. PNG: asking for EXIF that does not stand
    before the pixels would decode them, so only what does is honoured.
    """
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    try:
        orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except _DECODING_ERRORS:  # a damaged EXIF block says nothing about the pixels
        return 1
    return orientation if orientation in _UPRIGHT else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return a decoded image as 8-bit RGB; a new image, also when it was RGB before.

    Raises: ValueError for pixels without a defined range: floats, and integers beyond 16 bits.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose white is not defined")
    if image.mode.startswith("I"):  # 16-bit grey, in one of several layouts; Pillow would cut it at 255
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 0xFFFF:
            raise ValueError("its pixels are integers beyond 16 bits, whose white is not defined")
        return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")
