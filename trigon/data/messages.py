"""The chat messages of a dataset row, with a marker in the text for each image or video.

A row's prompt is a text, or a list of chat messages whose contents are texts or content parts. All
of them are read as messages with text contents, in which `<image>` and `<video>` mark the positions
of images and videos.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trigon.data.bad_rows import UnusableRow
from trigon.types import MediaKind

IMAGE_MARKER = "<image>"
"""Marks the position of an image in a row's text, once per image."""

VIDEO_MARKER = "<video>"
"""The same for a video."""

MARKERS: dict[MediaKind, str] = {"image": IMAGE_MARKER, "video": VIDEO_MARKER}

_KINDS: dict[str, MediaKind] = {marker: kind for kind, marker in MARKERS.items()}
_ANY_MARKER = re.compile("(<image>|<video>)")


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; its content has a marker for each image or video."""

    role: str
    content: str


def read_messages(value: Any, where: str) -> list[Message]:
    """Return the messages in a prompt column, of which the last is the user's.

    where: the row and column, for errors. Raises: UnusableRow.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise UnusableRow("prompt", f"{where} holds {_describe(value)}, not a text or a list of chat messages")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or message.get("role") not in ("system", "user", "assistant"):
            role = message.get("role") if isinstance(message, Mapping) else None
            raise UnusableRow("prompt", f"{where}: message {number} has role {role!r}, not system, user or assistant")
        content = message.get("content")
        if isinstance(content, list):
            content = _join_parts(content)
        if not isinstance(content, str):
            raise UnusableRow("prompt", f"{where}: message {number} has {_describe(content)} for content, not a text")
        messages.append(Message(message["role"], content))
    if messages[-1].role != "user" or not messages[-1].content.strip():
        raise UnusableRow("prompt", f"{where}: the last message must be the user's, and not empty")
    return messages


def content_parts(content: str) -> str | list[dict[str, str]]:
    """Return a content for a vision model's chat template: a text, or parts if it has markers."""
    if not _ANY_MARKER.search(content):
        return content
    return [
        {"type": _KINDS[piece]} if piece in _KINDS else {"type": "text", "text": piece}
        for piece in _ANY_MARKER.split(content)
        if piece
    ]


def messages_as_text(messages: Sequence[Message]) -> str:
    """Return the content of a single message, or several messages, each after its role."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def media_in_messages(value: Any, kind: MediaKind) -> list[Any]:
    """Return the images, or the videos, that the content parts of chat messages hold themselves.

    value: as of read_messages. Each is what the part has under "image", "image_url" or the like.
    """
    if not isinstance(value, list):
        return []
    contents = [message.get("content") for message in value if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [held for part in parts if _part_kind(part) == kind and (held := _held(part, kind)) is not None]


def _join_parts(parts: Sequence[Any]) -> str | None:
    """Return content parts as a text with markers; None if one is not text, image or video."""
    pieces = []
    for part in parts:
        kind = _part_kind(part)
        if kind is None:
            return None
        pieces.append(part["text"] if kind == "text" else MARKERS[kind])
    return "".join(pieces)


def _part_kind(part: Any) -> MediaKind | Literal["text"] | None:
    """Return what a content part is, by its type or, without one, by its only other key."""
    match part:
        case {"type": "text" | "input_text", "text": str()}:
            return "text"
        case {"type": "image" | "image_url" | "input_image"}:
            return "image"
        case {"type": "video" | "video_url"}:
            return "video"
        case {"type": str()}:
            return None
        case {"text": str()}:
            return "text"
        case Mapping():
            kinds: tuple[MediaKind, ...] = ("image", "video")
            return next((kind for kind in kinds if _held(part, kind) is not None), None)
        case _:
            return None


def _held(part: Mapping[str, Any], kind: MediaKind) -> Any:
    """Return the image or video that a content part holds; None if no key of it has any."""
    return next((part[key] for key in (kind, f"{kind}_url", "url", "path") if part.get(key) is not None), None)


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"an empty {type(value).__name__}" if value == [] else f"a value of type {type(value).__name__}"
