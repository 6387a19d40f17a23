"""How the file of an image becomes pixels: the same for models, rewards, environments and tools.

An image is turned upright by its EXIF or XMP orientation, its transparent pixels are put on white,
and it becomes 8-bit RGB. No other module opens an image to use its pixels. Checks of a dataset's
images, and the memory that decoding takes, are in data/images.py.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, overload

from PIL import ExifTags, Image

# Listed, so that no other plugin of Pillow is tried: one of them runs Ghostscript on its input.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

# The errors of Pillow's decoders for damaged bytes. The decompression bombs are its own size
# limits.
DECODING_ERRORS = (
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

_STRIP_PIXELS = 2**18
"""Pixels of the strips in which images are converted."""


class LazyImages(Sequence[Image.Image]):
    """Images as PIL images, each of which is opened as read_image does whenever it is indexed.

    files: the encoded files, or their paths.
    """

    def __init__(self, files: Sequence[bytes | str]) -> None:
        self.files = tuple(files)

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> Image.Image: ...

    @overload
    def __getitem__(self, index: slice) -> list[Image.Image]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return read_image(self.files[index])

    def __repr__(self) -> str:
        return f"LazyImages of {len(self)} files"


def read_image(file: bytes | str) -> Image.Image:
    """Return the image in a file upright, as 8-bit RGB with transparency on white.

    file: its bytes, or its path. The first of several frames is returned.
    Raises: one of DECODING_ERRORS if it cannot be decoded.
    """
    encoded = file if isinstance(file, bytes) else Path(file).read_bytes()
    image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    return upright_rgb(image, orientation_of(image), owned=True)


@cache
def image_suffixes() -> tuple[str, ...]:
    """Return the suffixes of files in one of FORMATS, in lower case, such as ".png"."""
    return tuple(suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS)


def orientation_of(image: Image.Image) -> int:
    """Return the orientation (1 to 8) of an image that is not upright yet, from its header.

    TIFF: Pillow rotates it while loading and reports the upright size. PNG: reading EXIF data that
    comes after the pixels would decode them, so only EXIF data before the pixels counts.
    """
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    try:
        orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except DECODING_ERRORS:  # damaged EXIF data; the pixels may be intact
        return 1
    return orientation if orientation in _UPRIGHT else 1


def upright_rgb(image: Image.Image, orientation: int, *, owned: bool) -> Image.Image:
    """Return an opened image decoded, upright and as a new 8-bit RGB image.

    Args:
        orientation: as orientation_of returns it.
        owned: whether its stored pixels are not needed afterwards.
    Raises: one of DECODING_ERRORS: ValueError for pixels without a defined range, which are floats
    and integers beyond 16 bits.
    """
    image.load()
    if orientation in _UPRIGHT:
        stored, image = image, image.transpose(_UPRIGHT[orientation])
        if owned:
            stored.close()  # frees its pixels before there is a third copy
    converted = _to_rgb(image)
    converted.info = {}  # otherwise it would be turned again, and its PNG have its colour profile
    return converted


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return a decoded image as a new 8-bit RGB image.

    Images that need several copies until they are RGB are converted in strips.
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
    import numpy as np  # here: processes of rewards and tools start without it

    grey = np.asarray(image).astype(np.int64)
    if grey.min() < 0 or grey.max() > 0xFFFF:
        raise ValueError("its pixels are integers beyond 16 bits, whose white value is not defined")
    return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    coloured = image.convert("RGBA")
    white = Image.new("RGBA", coloured.size, "white")
    return Image.alpha_composite(white, coloured).convert("RGB")
