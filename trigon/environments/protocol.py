"""The protocol of environments: what users write, and what the rollout engine's side exchanges.

Images are PNG files here, so that neither side needs Pillow to pass them on.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trigon.config.names import ObservationRole

IMAGE_MARKER = "<image>"
"""Stands for one image in the text of a message."""

MAX_IMAGES = 32
"""Maximum number of images of an observation."""

MAX_TEXT_CHARACTERS = 200_000
"""Maximum length of the text of an observation: more than any context takes."""

MAX_ASPECT_RATIO = 200
"""Image processors of the Qwen families raise an error for this aspect ratio or above."""

_PNG = b"\x89PNG\r\n\x1a\n"


class Environment(Protocol):
    """What a user writes: a class whose instances run one episode each.

    It is constructed with worker.rollout.environment_kwargs, in a process of its own. `close()`, if
    there is one, is called when the episode is over.
    """

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Start an episode, and return its first observation.

        row: the columns of the dataset's row; row["images"] is a sequence of the prompt's
            images, as PIL images as the model sees them but for their size
            (system/image_formats.py).
        Returns: a str, a PIL image, {"text": ..., "images": [...]}, an Observation, or None if the
        prompt says all.
        """
        ...

    def step(self, action: str) -> tuple[Any, float | None, bool]:
        """Carry out an action, the text that the model wrote in this turn.

        Returns: the observation (as of reset), the reward of the turn or None, and whether the
        episode is over. A tuple of two is (observation, done).
        """
        ...


@dataclass(frozen=True, slots=True)
class Message:
    """One message of an observation.

    text: with one IMAGE_MARKER for each image. images: PNG files, in the order of their markers.
    """

    role: ObservationRole
    text: str
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model sees between two of its turns."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of EnvironmentPool.start or step.

    observation: None if there is nothing to see. reward: of the turn; None from reset, or if the
    environment gave none. error: why the episode failed, in one line; "" if it did not. A failed
    episode is done.
    """

    episode: int
    observation: Observation | None
    reward: float | None
    done: bool
    error: str = ""


def check_observation(observation: Observation, *, max_image_pixels: int) -> None:
    """Raise ValueError, whose text continues "the observation", if it is not within the limits.

    max_image_pixels: maximum width * height of an image.
    """
    num_characters = sum(len(message.text) for message in observation.messages)
    if num_characters > MAX_TEXT_CHARACTERS:
        raise ValueError(f"has {num_characters:,} characters; at most {MAX_TEXT_CHARACTERS:,} are possible")
    num_images = sum(len(message.images) for message in observation.messages)
    if num_images > MAX_IMAGES:
        raise ValueError(f"has {num_images} images; at most {MAX_IMAGES} are possible")
    for message in observation.messages:
        if message.role not in ("user", "tool"):
            raise ValueError(f"has a message of the role {message.role!r}; it must be 'user' or 'tool'")
        if (num_markers := message.text.count(IMAGE_MARKER)) != len(message.images):
            raise ValueError(f"has {num_markers} {IMAGE_MARKER} markers for {len(message.images)} images")
        for image in message.images:
            check_size(*png_size(image), max_image_pixels=max_image_pixels)


def check_size(width: int, height: int, *, max_image_pixels: int) -> None:
    """Raise ValueError, as check_observation does, if an image of this size is not possible."""
    if width * height > max_image_pixels:
        raise ValueError(
            f"has an image of {width} x {height} pixels; data.max_image_pixels allows {max_image_pixels:,}"
        )
    if max(width, height) >= MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(
            f"has an image of {width} x {height} pixels; its longer side must be less than {MAX_ASPECT_RATIO} "
            "times the shorter one"
        )


def png_size(png: bytes) -> tuple[int, int]:
    """Return (width, height) of a PNG file, from its header. Raises: ValueError."""
    if png[:8] != _PNG or png[12:16] != b"IHDR" or len(png) < 24:
        raise ValueError("has an image that is not a PNG file")
    width, height = struct.unpack(">II", png[16:24])
    if not width or not height:
        raise ValueError(f"has an image of {width} x {height} pixels")
    return width, height


def escape_markers(text: str) -> str:
    """Return a text in which "<image>" no longer stands for an image: it becomes "< image>"."""
    return text.replace(IMAGE_MARKER, f"< {IMAGE_MARKER[1:]}")
