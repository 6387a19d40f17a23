"""Images as they come: the only file that opens, turns or converts one.

Knows Pillow, files and what hostile or careless data looks like. An image is measured from its header, so that it can
be refused before a pixel is decoded, and the three ways in, `image_size`, `open_image` and `encoded_image`, agree by
construction: all go through `_opened`. Refuses to know rows, prompts, tensors and the size a model wants.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from trigon.data.bad_rows import UnusableRow

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
            raise UnusableRow("image_unreadable", f"{where}: {_reason(error)}; replace or drop it") from error


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
    with _stream(source, where, image_dir) as stream:
        try:
            encoded = stream.read()
        except OSError as error:
            raise UnusableRow("image_unreadable", f"{where}: {_reason(error)}; replace or drop it") from error
    with _opened(encoded, where, image_dir, max_pixels):  # the bytes read, not the file, which may have changed
        return encoded


def image_name(source: Any) -> str:
    """Return the file name under which people know an image, or "" when it has none."""
    path = source.get("path") if isinstance(source, Mapping) else source
    return Path(path).name if isinstance(path, str | Path) else ""


@contextmanager
def _opened(source: Any, where: str, image_dir: Path | None, max_pixels: int) -> Iterator[tuple[Image.Image, int]]:
    """Yield an image whose header has been read and found acceptable, and its EXIF orientation (1 to 8)."""
    if isinstance(source, Image.Image):
        _check_header(source, where, max_pixels)
        yield source, _orientation(source)
        return
    with _stream(source, where, image_dir) as stream:
        try:
            image = Image.open(stream, formats=_FORMATS)
            orientation = _orientation(image)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise UnusableRow("image_pixels", f"{where}: beyond what Pillow decodes: {_reason(error)}") from error
        except _DECODING_ERRORS as error:
            raise UnusableRow("image_unreadable", f"{where}: {_reason(error)}; replace or drop it") from error
        with image:
            _check_header(image, where, max_pixels)
            yield image, orientation


def _stream(source: Any, where: str, image_dir: Path | None) -> io.BytesIO | io.BufferedReader:
    """Return the encoded bytes of a source as a stream that the caller closes."""
    if isinstance(source, Mapping):
        source = source["bytes"] if source.get("bytes") is not None else source.get("path")
    if isinstance(source, bytes | bytearray):
        if not source:
            raise UnusableRow("image_unreadable", f"{where}: it has zero bytes")
        return io.BytesIO(source)
    if not isinstance(source, str | Path) or not str(source):
        kind = "nothing" if source is None or source == "" else type(source).__name__
        raise UnusableRow("image_missing", f"{where}: expected an image, bytes, a path or {{bytes, path}}, got {kind}")
    path = _inside(str(source), where, image_dir)
    try:
        if not path.is_file():
            raise UnusableRow("image_missing", f"{where}: no such file: {path}")
        stream = path.open("rb")
    except (OSError, ValueError) as error:
        raise UnusableRow("image_missing", f"{where}: {path} cannot be opened: {_reason(error)}") from error
    if not stream.peek(1):
        stream.close()
        raise UnusableRow("image_unreadable", f"{where}: {path} has zero bytes")
    return stream


def _inside(reference: str, where: str, image_dir: Path | None) -> Path:
    """Return the real path of a reference, which must lie in image_dir: a dataset may not read whatever it names."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", reference):
        raise UnusableRow(
            "image_outside", f"{where}: {reference[:80]!r} is a URL; download the images and set data.image_dir"
        )
    if image_dir is None:
        raise UnusableRow("image_outside", f"{where}: the path {reference!r} needs data.image_dir to be set")
    try:
        folder = image_dir.resolve()
        path = (folder / reference).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise UnusableRow("image_missing", f"{where}: {reference[:80]!r} is not a path: {_reason(error)}") from error
    if not path.is_relative_to(folder):
        raise UnusableRow(
            "image_outside", f"{where}: {reference!r} leads to {path}, outside {folder}; set data.image_dir"
        )
    return path


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


def _reason(error: BaseException) -> str:
    """Return an error in one line, without the address of the stream that Pillow puts into it."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r" ?<_io\.\w+ .*>", " its bytes", text)
