"""Opens the images of a dataset, with its checks, and bounds the memory of decoding them.

The size of an image is read from its header, so that a too large or malformed one is rejected
before a pixel is decoded. `image_size`, `open_image` and `encoded_image` all use `_opened`, so they
accept the same images. A file of some KB may decode to GBs: what decoding takes is known from the
header too, and is shared out to the threads that decode images and video frames. Pixels are turned
and converted in system/image_formats.py, and resized for a model in vision.py.
"""

from __future__ import annotations

import io
import sys
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from PIL import Image

from trigon.data.media_files import MediaSource, in_one_line, open_bytes, read_bytes, what_bytes_are
from trigon.data.rows import UnusableRow
from trigon.system.image_formats import DECODING_ERRORS, FORMATS, orientation_of, upright_rgb

MAX_ASPECT_RATIO = 200
"""Image processors of the Qwen families raise an error for this aspect ratio or above."""

_DISPLAYED = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "GIF": ".gif"}
"""The formats that browsers and loggers show, with their suffixes."""

_TILE_WIDTH, _TILE_LENGTH = 322, 323  # tags of TIFF

BYTES_PER_PIXEL = 12
"""Times data.max_image_pixels, the bytes that decoding one image may take."""

BUDGET_BYTES = 2**30
"""What all threads of a process may take together. An image that takes more is decoded alone."""

# Bytes per pixel while an image of each format is decoded and made RGB, its 4 bytes per pixel as
# RGB included: the maxima over modes as tests/unit/test_data_images.py measures them.
# JPEG: all coefficients of a progressive file, also in a camera's file of several pictures
# (MPO); WebP, AVIF and JPEG 2000: the decoders' own copies.
_FORMAT_BYTES = {"JPEG": 12, "MPO": 12, "WEBP": 20, "AVIF": 16, "JPEG2000": 26}
_OTHER_BYTES = 10

VIDEO_BYTES_PER_PIXEL = 56
"""Of a frame, while a video is decoded: the frames that its codec refers to, and a pair as RGB."""


def image_size(source: MediaSource) -> tuple[int, int]:
    """Return (width, height) of an image when upright, from its header. Raises: UnusableRow."""
    with _opened(source) as (image, orientation):
        width, height = image.size
        return (height, width) if orientation >= 5 else (width, height)


def open_image(source: MediaSource) -> Image.Image:
    """Return an image decoded and upright, as 8-bit RGB with transparency on white.

    Only the first frame of several is decoded.
    Raises: as image_size, and UnusableRow where decoding fails.
    """
    with decoded_image(source) as image:
        return image


@contextmanager
def decoded_image(source: MediaSource) -> Iterator[Image.Image]:
    """Yield what open_image returns, within the memory that all threads share for decoded images.

    The context waits for this memory, and should be left, and the image dropped, before the thread
    decodes the next one.
    Raises: as open_image.
    """
    with _opened(source) as (image, orientation), _reserved(image):
        yield _decoded(image, orientation, source.where, owned=image is not source.content)


def decoded_images(sources: Iterable[MediaSource], sizes: list[Any]) -> Generator[Image.Image]:
    """Yield each of several images, to be dropped before the next one is taken; see decoded_image.

    The generator holds memory in the meantime, and should be closed.
    sizes: gets the (width, height) of each image.
    """
    for source in sources:
        with decoded_image(source) as image:
            sizes.append(image.size)
            yield image
            del image


def encoded_image(source: MediaSource) -> bytes:
    """Return the encoded file of an image, byte for byte, after checking its header.

    A PIL image becomes a PNG of the image that open_image returns; no pixel of a file is decoded.
    In both cases the bytes decode to the same image as the source.
    Raises: as image_size; for a PIL image, as open_image.
    """
    if isinstance(source.content, Image.Image):
        with decoded_image(source) as image:
            png = io.BytesIO()
            image.save(png, "PNG", compress_level=1)
            return png.getvalue()
    encoded = read_bytes(source, "image")
    with _opened(replace(source, content=encoded)):  # not the file, which may have changed since
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

    Its content is the decoded image's content, so that rows are equal before and after something,
    such as a notebook that shows the image, has decoded it.
    """


def image_content(image: Image.Image | OpenedFile) -> bytes:
    """Return bytes that are equal for images of equal content: what open_image depends on.

    The bytes of a file that cannot be decoded are its content: the scan reports its row.
    """
    if isinstance(image, OpenedFile):
        try:
            with Image.open(io.BytesIO(image["bytes"]), formats=FORMATS) as opened, _reserved(opened):
                opened.load()
                return image_content(opened)
        except DECODING_ERRORS:
            return bytes(image["bytes"])
    palette = image.getpalette("RGBA") if image.mode == "P" else None
    header = (image.mode, image.size, palette, image.info.get("transparency"), orientation_of(image))
    return repr(header).encode() + image.tobytes()


def file_for_display(encoded: bytes, *, max_bytes: int, max_side: int, where: str) -> tuple[bytes, str]:
    """Return an image as a file that browsers show, and its suffix, such as ".png".

    A file of at most max_bytes is returned unchanged if its format is one of these. Others are
    decoded, reduced to at most max_side pixels in width and height, and encoded as JPEG; the file
    itself is returned if that is not smaller.

    Args: encoded: a file that encoded_image has returned. where: its name in errors.
    Raises: UnusableRow where decoding fails.
    """
    with _opened(MediaSource(encoded, where, max_pixels=sys.maxsize)) as (image, orientation):
        suffix = _DISPLAYED.get(str(image.format))
        if suffix is not None and len(encoded) <= max_bytes:
            return encoded, suffix
        image.draft("RGB", (max_side, max_side))  # decodes a large JPEG at a fraction of its size
        with _reserved(image):
            decoded = _decoded(image, orientation, where, owned=True)
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
def _opened(source: MediaSource) -> Iterator[tuple[Image.Image, int]]:
    """Yield an image with a checked header, not decoded, and its EXIF orientation (1 to 8)."""
    where, content = source.where, source.content
    if isinstance(content, Image.Image):
        _check_header(content, where, source.max_pixels)
        yield content, orientation_of(content)
        return
    with open_bytes(source, "image") as stream:
        try:
            image = Image.open(stream, formats=FORMATS)
            orientation = orientation_of(image)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise UnusableRow("image_pixels", f"{where}: above the limit of Pillow: {in_one_line(error)}") from error
        except DECODING_ERRORS as error:
            known = what_bytes_are(stream)
            cause = f"it is {known}" if known else f"{in_one_line(error)}; replace or drop it"
            raise UnusableRow("image_unreadable", f"{where}: {cause}") from error
        with image:
            _check_header(image, where, source.max_pixels)
            yield image, orientation


def _reserved(image: Image.Image) -> AbstractContextManager[None]:
    """Return a context that holds the memory for decoding an opened image."""
    return DECODING.reserve(decoding_bytes(*image.size, image.format))


def _decoded(image: Image.Image, orientation: int, where: str, *, owned: bool) -> Image.Image:
    """Return an opened image decoded, upright and as RGB. Raises: UnusableRow.

    owned: whether its stored pixels are not needed afterwards.
    """
    try:
        return upright_rgb(image, orientation, owned=owned)
    except DECODING_ERRORS as error:
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


def decoding_bytes(width: int, height: int, image_format: str | None) -> int:
    """Return the bytes that decoding an image takes.

    image_format: Pillow's name of it; None: the image is decoded already.
    """
    return width * height * _FORMAT_BYTES.get(image_format or "", _OTHER_BYTES)


class ByteBudget:
    """Bytes that threads share; a thread waits until enough of them are free, in order of arrival.

    A thread that has some gets more at once, so that no two wait for each other.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free = num_bytes
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._holders = threading.local()

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Hold bytes of the budget in the context; all of it for more than it has."""
        if getattr(self._holders, "holds", False):
            yield
            return
        taken = min(num_bytes, self._num_bytes)
        with self._changed:
            ticket = object()
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is ticket and self._free >= taken)
                self._free -= taken
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        self._holders.holds = True
        try:
            yield
        finally:
            self._holders.holds = False
            with self._changed:
                self._free += taken
                self._changed.notify_all()


DECODING = ByteBudget(BUDGET_BYTES)
"""The budget of this process."""


def reserve_frames(width: int, height: int) -> AbstractContextManager[None]:
    """Return a context in which the frames of a video may be decoded, one after the other."""
    return DECODING.reserve(VIDEO_BYTES_PER_PIXEL * width * height)
