"""The images or videos of a dataset's row, and their markers in its text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from trigon.data.bad_rows import UnusableRow
from trigon.data.blank import encoded_blank_image, encoded_blank_video, open_blank_image, open_blank_video
from trigon.data.columns import column_names, has_column
from trigon.data.images import decoded_image, encoded_image, open_image
from trigon.data.messages import MARKERS, Message
from trigon.data.videos import encoded_video, open_video
from trigon.types import MediaKind

BLANK_READERS: dict[Callable[..., Any], Callable[..., Any]] = {
    open_image: open_blank_image,
    encoded_image: encoded_blank_image,
    open_video: open_blank_video,
    encoded_video: encoded_blank_video,
}
"""A function that reads an image or a video -> the one that returns a blank one of its size."""


@dataclass(frozen=True, slots=True)
class RowMedia:
    """The images or the videos of a row, as the row has them.

    names: of each, for errors and reports.
    """

    kind: MediaKind
    sources: tuple[Any, ...]
    names: tuple[str, ...]


def as_list(media: Any) -> list[Any]:
    """Return a column's images or videos as a list; the column may hold a single one, or None."""
    if media is None:
        return []
    return list(media) if isinstance(media, list | tuple) else [media]


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
        else:
            hint = ""
        raise UnusableRow("markers", f"{name}: {counts}{hint}")
    for token in media_tokens:
        if any(token in message.content for message in messages):
            hint = f"mark images with {MARKERS['image']} and videos with {MARKERS['video']}"
            raise UnusableRow("media_tokens", f"{name}: the text contains the special token {token}; {hint}")
