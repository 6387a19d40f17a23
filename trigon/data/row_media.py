"""The images or videos of a dataset's row, and their markers in its text."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from PIL import Image

from trigon.data.bad_rows import UnusableRow
from trigon.data.blank import encoded_blank_image, encoded_blank_video, open_blank_image, open_blank_video
from trigon.data.columns import column_names, column_value, has_column
from trigon.data.images import decoded_image, encoded_image, open_image
from trigon.data.media_files import REASONS, is_url
from trigon.data.messages import MARKERS, Message, media_in_messages
from trigon.data.videos import encoded_video, open_video
from trigon.types import MediaKind

BLANK_READERS: dict[Callable[..., Any], Callable[..., Any]] = {
    open_image: open_blank_image,
    encoded_image: encoded_blank_image,
    open_video: open_blank_video,
    encoded_video: encoded_blank_video,
}
"""A function that reads an image or a video -> the one that returns a blank one of its size."""

_MAX_NESTED = 3
_MAX_PATH = 4096  # characters, of Linux
_MIN_BASE64 = 64
_FILE_BEGINS = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF|BM|II\*\0|MM\0\*|\x1aE\xdf\xa3|....ftyp", re.DOTALL)
"""The first bytes of images and videos, by which base64 is told from paths."""


@dataclass(frozen=True, slots=True)
class RowMedia:
    """The images or the videos of a row, as the row has them.

    names: of each, for errors and reports.
    """

    kind: MediaKind
    sources: tuple[Any, ...]
    names: tuple[str, ...]


def media_of(row: Mapping[str, Any], kind: MediaKind, *, key: str, prompt_key: str) -> tuple[list[Any], str]:
    """Return the images, or the videos, of a row, and the column that they are from.

    key: a column that holds a list or a single one. If it is empty, those in the content parts of
    the chat messages in prompt_key count.
    """
    media = column_value(row, key)
    found = [] if media is None else list(media) if isinstance(media, list | tuple) else [media]
    if not found and (held := media_in_messages(column_value(row, prompt_key), kind)):
        return held, prompt_key
    return found, key


def plain_source(source: Any, kind: MediaKind, where: str) -> Any:
    """Return an image or a video as a PIL image, bytes, {"bytes", "path"}, a path or a URL.

    Datasets also write {"image": ...}, {"url": ...}, {"image_url": {"url": ...}}, data: and file:
    URLs, and base64 without a URL. A source of no known shape is returned as it is.
    where: the name of the source in errors. Raises: UnusableRow for damaged base64.
    """
    for _ in range(_MAX_NESTED):
        if not isinstance(source, Mapping) or source.get("bytes") is not None or source.get("path") is not None:
            break
        keys = (kind, f"{kind}_url", "url", "base64")
        source = next((source[key] for key in keys if source.get(key) is not None), source)
    if isinstance(source, Mapping):
        text = source.get("path") if source.get("bytes") is None else source["bytes"]
        return plain_source(text, kind, where) if isinstance(text, str) else source
    if not isinstance(source, str):
        return source
    if source[:5].lower() == "data:":
        return _data_of_url(source, kind, where)
    if source[:7].lower() == "file://":
        return unquote(urlsplit(source).path)
    if len(source) >= _MIN_BASE64 and _FILE_BEGINS.match(_decoded_base64(source[:32]) or b""):
        return _decoded_base64(source) or _damaged(source, kind, where)
    if len(source) > _MAX_PATH and not is_url(source):
        raise UnusableRow(
            REASONS[kind].missing,
            f"{where}: a text of {len(source):,} characters ({source[:20]!r} ...), which is neither a path nor a file "
            "in base64 that can be read",
        )
    return source


def _data_of_url(url: str, kind: MediaKind, where: str) -> bytes:
    """Return the bytes in a data: URL (RFC 2397)."""
    header, _, payload = url.partition(",")
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(payload)
    return _decoded_base64(payload) or _damaged(url, kind, where)


def _damaged(text: str, kind: MediaKind, where: str) -> NoReturn:
    raise UnusableRow(
        REASONS[kind].unreadable,
        f"{where}: {text[:20]!r} ... has {len(text):,} characters of base64, which are damaged or cut; replace or drop "
        "it",
    )


def _decoded_base64(text: str) -> bytes | None:
    """Return the bytes of base64 text with or without line breaks; None if it is no such text."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        return None


def decoded_images(
    media: RowMedia, sizes: list[Any], *, image_dir: Path | None, max_pixels: int, blank: bool
) -> Generator[Image.Image]:
    """Yield each image of a row decoded, to be dropped before the next one is taken.

    See images.decoded_image, which holds memory in the meantime; so the generator is to be closed.
    Args: sizes: gets the (width, height) of each. blank: yield blank images of their sizes.
    """
    for source, name in zip(media.sources, media.names, strict=True):
        shown = source
        if blank:
            shown = open_blank_image(source, where=name, image_dir=image_dir, max_pixels=max_pixels)
        with decoded_image(shown, where=name, image_dir=image_dir, max_pixels=max_pixels) as image:
            sizes.append(image.size)
            yield image
            del image


def check_count(images: Sequence[Any], name: str, *, limit_images: int) -> None:
    """Raise UnusableRow for more images than allowed. limit_images: 0: any number."""
    if 0 < limit_images < len(images):
        raise UnusableRow("image_count", f"{name}: {len(images)} images, more than limit_images={limit_images}")


def check_markers(
    row: Mapping[str, Any],
    messages: Sequence[Message],
    media: RowMedia,
    name: str,
    *,
    keys: Mapping[MediaKind, str],
    takes_media: bool,
    media_tokens: Sequence[str],
) -> None:
    """Raise UnusableRow unless each image or video has a marker, and none a special token.

    For a text model, `<video>` is ordinary text.

    Args:
        name: of the row, for errors.
        keys: the columns of the images and of the videos.
        takes_media: whether the model takes images.
        media_tokens: the special tokens that stand for images and videos.
    """
    for kind, key in keys.items():
        marker = MARKERS[kind]
        num_media = len(media.sources) if media.kind == kind else 0
        num_markers = sum(message.content.count(marker) for message in messages)
        if num_markers == num_media or (kind == "video" and not takes_media):
            continue
        counts = f"{marker} markers in the text: {num_markers}, {kind}s: {num_media}"
        if num_markers == 0:
            hint = f"; put {marker} into the text where each belongs"
        elif not has_column(row, key):
            hint = f"; there is no column {key!r}, only {', '.join(sorted(column_names(row)))}: set data.{kind}_key"
        elif num_markers == 2 * num_media:
            hint = f"; a content part of type {kind!r} is a marker too: mark each {kind} once, as a part or in the text"
        else:
            hint = ""
        raise UnusableRow("markers", f"{name}: {counts}{hint}")
    for token in media_tokens:
        if any(token in message.content for message in messages):
            hint = f"mark images with {MARKERS['image']} and videos with {MARKERS['video']}"
            raise UnusableRow("media_tokens", f"{name}: the text contains the special token {token}; {hint}")
