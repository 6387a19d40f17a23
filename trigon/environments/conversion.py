"""Converts what environments and tools return to observations, with Pillow, in their processes.

None                                   no observation
"text"                                 a message; "<image>" in it becomes "< image>"
a PIL image, or a list of them         a message of images
{"text": "...", "images": [...]}       a message; "image" for one. Its text may have an
                                       "<image>" for each image; without, images come first
Observation                            as it is
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from PIL import Image

from trigon.config.names import ObservationRole
from trigon.environments.protocol import (
    IMAGE_MARKER,
    Message,
    Observation,
    check_observation,
    check_size,
    escape_markers,
    read_reward,
)
from trigon.rewards.contract import short_repr
from trigon.system.image_formats import orientation_of, upright_rgb

_KEYS = ("text", "image", "images")
_UNDEFINED_WHITE = ("F", "I")
"""Modes in which code may store any range of numbers."""


def to_observation(value: object, *, role: ObservationRole, max_image_pixels: int) -> Observation | None:
    """Return what an environment returned as an observation; role: the role of its messages.

    Raises: ValueError, whose text continues "reset" or "step": what it returned, and what to
    return.
    """
    if value is None:
        return None
    if not isinstance(value, Observation):
        message = to_message(value, role=role, max_image_pixels=max_image_pixels)
        observation = Observation((message,))
    else:
        observation = value
    try:
        check_observation(observation, max_image_pixels=max_image_pixels)
        if observation is value:
            _check_files(observation)
    except ValueError as error:
        raise ValueError(f"returned an observation that {error}") from None
    except (AttributeError, TypeError) as error:
        raise ValueError(f"returned an Observation that is not made of Messages: {error}") from None
    return observation


def to_message(value: object, *, role: ObservationRole, max_image_pixels: int) -> Message:
    """Return what a tool or an environment returned as one message. Raises: as to_observation."""
    match value:
        case str():
            return Message(role, escape_markers(without_surrogates(value)))
        case Image.Image():
            return _with_images("", [value], role, max_image_pixels)
        case list() if are_images(value):
            return _with_images("", value, role, max_image_pixels)
        case Mapping():
            return _from_dict(value, role, max_image_pixels)
        case _:
            hint = "; Image.fromarray(array) of Pillow makes an image of it" if hasattr(value, "__array__") else ""
            raise ValueError(
                f"returned {short_repr(value)} as observation; return a str, a PIL image, "
                f'{{"text": ..., "images": [...]}}, or None{hint}'
            )


def are_images(value: object) -> bool:
    """Return whether a tool or an environment returned a list of images."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, Image.Image) for each in value)


def to_step(value: object) -> tuple[object, float | None, bool]:
    """Return what step returned as (observation, reward, done). Raises: as to_observation."""
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        is_gymnasium = isinstance(value, tuple) and len(value) == 5
        hint = ", such as (observation, reward, terminated or truncated)" if is_gymnasium else ""
        raise ValueError(
            f"returned {short_repr(value)}; return (observation, reward, done), or (observation, done){hint}"
        )
    observation, *rest = value
    done = _plain(rest[-1])
    if not isinstance(done, bool):
        raise ValueError(f"returned {short_repr(rest[-1])} as done, the last of the tuple; it must be True or False")
    if len(rest) == 1 or rest[0] is None:
        return observation, None, done
    try:
        return observation, read_reward(rest[0]), done
    except ValueError as error:
        raise ValueError(f"{error}; its tuple is (observation, reward, done)") from None


def to_png(image: Image.Image) -> bytes:
    """Return an image as an RGB PNG, upright and on white (images.py). Raises: ValueError."""
    if image.mode in _UNDEFINED_WHITE:
        raise ValueError(f"has an image of Pillow's mode {image.mode!r}; convert it to 'RGB'")
    file = io.BytesIO()
    upright_rgb(image, orientation_of(image), owned=False).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _check_files(observation: Observation) -> None:
    """Raise ValueError, as check_observation does, if one of the user's PNG files is damaged."""
    for message in observation.messages:
        for image in message.images:
            try:
                Image.open(io.BytesIO(image), formats=("PNG",)).load()
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise ValueError(f"has a PNG file that cannot be decoded ({error})") from None


def _from_dict(value: Mapping[Any, Any], role: ObservationRole, max_image_pixels: int) -> Message:
    unknown = [key for key in value if key not in _KEYS]
    if unknown or not value or {"image", "images"} <= value.keys():
        raise ValueError(
            f"returned a dict with {', '.join(repr(key) for key in value) or 'no keys'} as observation; its keys are "
            "'text' and 'images', or 'image' for a single one"
        )
    text = value.get("text") or ""
    images = [value["image"]] if value.get("image") is not None else list(value.get("images") or ())
    if not isinstance(text, str):
        raise ValueError(f"returned {short_repr(text)} as 'text' of the observation; it must be a str")
    for image in images:
        if not isinstance(image, Image.Image):
            raise ValueError(f"returned {short_repr(image)} among the images of the observation; they are PIL images")
    return _with_images(without_surrogates(text), images, role, max_image_pixels)


def _with_images(text: str, images: list[Image.Image], role: ObservationRole, max_image_pixels: int) -> Message:
    num_markers = text.count(IMAGE_MARKER)
    if not images:
        text = escape_markers(text)
    elif num_markers == 0:
        text = IMAGE_MARKER * len(images) + text
    elif num_markers != len(images):
        raise ValueError(
            f"returned a text with {num_markers} {IMAGE_MARKER} markers for {len(images)} images; write one for each "
            "image, or none"
        )
    files = []
    for image in images:
        try:
            check_size(*image.size, max_image_pixels=max_image_pixels)
            files.append(to_png(image))
        except ValueError as error:
            raise ValueError(f"returned an observation that {error}") from None
    return Message(role, text, tuple(files))


def without_surrogates(text: str) -> str:
    """Return a text that can be encoded: parts of characters become "\N{REPLACEMENT CHARACTER}"."""
    return text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")


def _plain(value: object) -> object:
    """Return a numpy scalar as what it is in Python."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
