"""Opens, rotates and converts images with Pillow; no other module does.

The size of an image is read from its header, so that a too large or malformed one is rejected
before a pixel is decoded. `image_size`, `open_image` and `encoded_image` all use `_opened`, so they
accept the same images. Resizing for a model is in vision.py.
"""

from __future__ import annotations

import io
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from trigon.data.bad_rows import UnusableRow
from trigon.data.decoding import BYTES_PER_PIXEL, DECODING, decoding_bytes
from trigon.data.media_files import in_one_line, open_bytes, read_bytes

MAX_ASPECT_RATIO = 200
"""Image processors of the Qwen families raise an error for this aspect ratio or above."""

# Listed, so that no other plugin of Pillow is tried: one of them runs Ghostscript on its input.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

_DISPLAYED = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "GIF": ".gif"}
"""The formats that browsers and loggers show, with their suffixes."""

_TILE_WIDTH, _TILE_LENGTH = 322, 323  # tags of TIFF

_STRIP_PIXELS = 2**18
"""Pixels of the strips in which images are converted."""

# The errors of Pillow's decoders for damaged bytes. The decompression bombs are its own size
# limits.
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

# EXIF orientation -> how to rotate the stored pixels upright; 1 is upright, and 5 to 8 exchange
# width and height.
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
    """Return (width, height) of an image when upright, from its header alone.

    Args:
        source: a PIL image, encoded bytes, a {"bytes", "path"} mapping (bytes win), or a path.
        where: the name of the image in errors: "train:17/images/0".
        image_dir: the folder that relative paths start from and that contains all paths; None: no
            path is allowed.
        max_pixels: the largest allowed width * height.
    Raises: UnusableRow.
    """
    with _opened(source, where, image_dir, max_pixels) as (image, orientation):
        width, height = image.size
        return (height, width) if orientation >= 5 else (width, height)


def open_image(source: Any, *, where: str, image_dir: Path | None, max_pixels: int) -> Image.Image:
    """Return an image decoded and upright, as 8-bit RGB with transparency on white.

    Only the first frame of several is decoded.

    Args and Raises: as image_size, and UnusableRow where decoding fails.
    """
    with decoded_image(source, where=where, image_dir=image_dir, max_pixels=max_pixels) as image:
        return image


@contextmanager
def decoded_image(source: Any, *, where: str, image_dir: Path | None, max_pixels: int) -> Iterator[Image.Image]:
    """Yield what open_image returns, within the memory that all threads share for decoded images.

    The context waits for this memory, and should be left, and the image dropped, before the thread
    decodes the next one.

    Args and Raises: as open_image.
    """
    with _opened(source, where, image_dir, max_pixels) as (image, orientation), _reserved(image):
        yield _decoded(image, orientation, where, owned=image is not source)


def encoded_image(source: Any, *, where: str, image_dir: Path | None, max_pixels: int) -> bytes:
    """Return the encoded file of an image, byte for byte, after checking its header.

    A PIL image becomes a PNG of the image that open_image returns; of a file, no pixel is decoded.
    In both cases the bytes decode to the same image as the source.

    Args and Raises: as image_size; for a PIL image, as open_image.
    """
    if isinstance(source, Image.Image):
        with decoded_image(source, where=where, image_dir=image_dir, max_pixels=max_pixels) as image:
            image.info = {}  # otherwise the PNG would contain its colour profile
            png = io.BytesIO()
            image.save(png, "PNG", compress_level=1)
            return png.getvalue()
    encoded = read_bytes(source, "image", where=where, image_dir=image_dir)
    with _opened(encoded, where, image_dir, max_pixels):  # not the file, which may have changed since
        return encoded


def undecoded_file(image: Image.Image) -> bytes | None:
    """Return the encoded file of an image that was opened, and not decoded or changed since.

    None for any other image.
    """
    stream = getattr(image, "fp", None)
    if not getattr(image, "tile", None) or stream is None or image.tell() != 0:
        return None
    position = stream.tell()
    stream.seek(0)
    try:
        encoded: bytes = stream.read()
    finally:
        stream.seek(position)
    return encoded


class OpenedFile(dict[str, Any]):
    """The file of an image that a program has opened, as rows have them: {"bytes", "path"}.

    Its content is that of the decoded image, so that rows are equal before and after something,
    such as a notebook that shows the image, has decoded it.
    """


def image_content(image: Image.Image | OpenedFile) -> bytes:
    """Return bytes that are equal for images of equal content: what open_image depends on.

    The bytes of a file that cannot be decoded are its content: the scan reports its row.
    """
    if isinstance(image, OpenedFile):
        try:
            with Image.open(io.BytesIO(image["bytes"])) as opened, _reserved(opened):
                opened.load()
                return image_content(opened)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return bytes(image["bytes"])
    palette = image.getpalette("RGBA") if image.mode == "P" else None
    header = (image.mode, image.size, palette, image.info.get("transparency"), _orientation(image))
    return repr(header).encode() + image.tobytes()


def file_for_display(encoded: bytes, *, max_bytes: int, max_side: int, where: str) -> tuple[bytes, str]:
    """Return an image as a file that browsers show, and its suffix, such as ".png".

    A file of at most max_bytes is returned unchanged if its format is one of these. Others are
    decoded, reduced to at most max_side pixels in width and height, and encoded as JPEG; the file
    itself is returned if that is not smaller.

    Args: encoded: a file that encoded_image has returned. where: as in image_size.
    Raises: UnusableRow where decoding fails.
    """
    with _opened(encoded, where, None, sys.maxsize) as (image, orientation):
        suffix = _DISPLAYED.get(str(image.format))
        if suffix is not None and len(encoded) <= max_bytes:
            return encoded, suffix
        image.draft("RGB", (max_side, max_side))  # decodes a large JPEG at a fraction of its size
        with _reserved(image):
            decoded = _decoded(image, orientation, where, owned=True)
            decoded.info = {}
            decoded.thumbnail((max_side, max_side))
    file = io.BytesIO()
    decoded.save(file, "JPEG", quality=85)
    reduced = file.getvalue()
    return (encoded, suffix) if suffix is not None and len(encoded) <= len(reduced) else (reduced, ".jpg")


def ignore_pillow_warnings() -> None:
    """Do not print Pillow's warnings about large images and damaged EXIF data in this process.

    Both are checked here, and a user cannot act on the warnings.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


@contextmanager
def _opened(source: Any, where: str, image_dir: Path | None, max_pixels: int) -> Iterator[tuple[Image.Image, int]]:
    """Yield an image with a checked header, not decoded, and its EXIF orientation (1 to 8)."""
    if isinstance(source, Image.Image):
        _check_header(source, where, max_pixels)
        yield source, _orientation(source)
        return
    with open_bytes(source, "image", where=where, image_dir=image_dir) as stream:
        try:
            image = Image.open(stream, formats=_FORMATS)
            orientation = _orientation(image)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise UnusableRow("image_pixels", f"{where}: above the limit of Pillow: {in_one_line(error)}") from error
        except _DECODING_ERRORS as error:
            raise UnusableRow("image_unreadable", f"{where}: {in_one_line(error)}; replace or drop it") from error
        with image:
            _check_header(image, where, max_pixels)
            yield image, orientation


def _reserved(image: Image.Image) -> AbstractContextManager[None]:
    """Return a context that holds the memory for decoding an opened image."""
    return DECODING.reserve(decoding_bytes(*image.size, image.format))


def _decoded(image: Image.Image, orientation: int, where: str, *, owned: bool) -> Image.Image:
    """Return an opened image decoded, upright and as RGB. Raises: UnusableRow.

    owned: whether its stored pixels are not needed afterwards.
    """
    try:
        image.load()
        if orientation in _UPRIGHT:
            stored, image = image, image.transpose(_UPRIGHT[orientation])
            if owned:
                stored.close()  # frees its pixels before there is a third copy
        return _to_rgb(image)
    except _DECODING_ERRORS as error:
        raise UnusableRow("image_unreadable", f"{where}: {in_one_line(error)}; replace or drop it") from error


def _check_header(image: Image.Image, where: str, max_pixels: int) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise UnusableRow("image_unreadable", f"{where}: its size is {width} x {height}; replace or drop it")
    if width * height > max_pixels:
        pixels = f"{width} x {height} = {width * height:,} pixels"
        raise UnusableRow("image_pixels", f"{where}: {pixels}, more than max_image_pixels={max_pixels:,}")
    tile = [_tile_side(image, tag) for tag in (_TILE_WIDTH, _TILE_LENGTH)]
    if tile[0] * tile[1] > max(max_pixels, 2**20):
        raise UnusableRow(
            "image_pixels", f"{where}: a tile of {tile[0]} x {tile[1]}, more than max_image_pixels={max_pixels:,}"
        )
    num_bytes, allowed = decoding_bytes(width, height, image.format), BYTES_PER_PIXEL * max_pixels
    if num_bytes > allowed:
        pixels = f"decoding {width} x {height} pixels of {image.format} takes {num_bytes:,} bytes"
        limit = f"{allowed:,}, which are {BYTES_PER_PIXEL} for each of max_image_pixels={max_pixels:,}"
        raise UnusableRow("image_pixels", f"{where}: {pixels}, more than {limit}")
    if max(width, height) >= MAX_ASPECT_RATIO * min(width, height):
        limit = f"{MAX_ASPECT_RATIO} or more times as long as it is wide"
        raise UnusableRow("image_shape", f"{where}: {width} x {height} is {limit}; crop it or drop the row")


def _tile_side(image: Image.Image, tag: int) -> int:
    """Return the width or the height of the tiles of a TIFF; 0 without tiles.

    Its decoder allocates a tile, which may be far larger than the image.
    """
    side = getattr(image, "tag_v2", {}).get(tag, 0)
    return side if isinstance(side, int) else 0


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image that is not upright yet, from its header.

    TIFF: Pillow rotates it while loading and reports the upright size. PNG: reading EXIF data that
    comes after the pixels would decode them, so only EXIF data before the pixels counts.
    """
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    try:
        orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except _DECODING_ERRORS:  # damaged EXIF data; the pixels may be intact
        return 1
    return orientation if orientation in _UPRIGHT else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return a decoded image as a new 8-bit RGB image.

    Images that need several copies until they are RGB are converted in strips.
    Raises: ValueError for pixels without a defined range: floats, and integers beyond 16 bits.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose white value is not defined")
    if image.mode.startswith("I"):  # 16-bit grey, in one of several layouts; Pillow would clip it at 255
        return _in_strips(image, _grey_to_rgb)
    if image.has_transparency_data:
        return _in_strips(image, _on_white)
    return image.convert("RGB")


def _in_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Return the result of converting an image, each pixel by itself, some rows at a time."""
    width, height = image.size
    converted = Image.new("RGB", image.size)
    num_rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, num_rows):
        strip = image.crop((0, top, width, min(top + num_rows, height)))
        converted.paste(convert(strip), (0, top))
    return converted


def _grey_to_rgb(image: Image.Image) -> Image.Image:
    grey = np.asarray(image).astype(np.int64)
    if grey.min() < 0 or grey.max() > 0xFFFF:
        raise ValueError("its pixels are integers beyond 16 bits, whose white value is not defined")
    return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    coloured = image.convert("RGBA")
    white = Image.new("RGBA", coloured.size, "white")
    return Image.alpha_composite(white, coloured).convert("RGB")
