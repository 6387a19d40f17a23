"""The protocol of environments: what users write, and what the rollout engine's side exchanges.

Images are PNG files here, so that neither side needs Pillow to pass them on. action_text and
find_action are for environments: they find the action that a model names in a turn. What models
write around a name is accepted; a name is never guessed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trigon.config.names import ObservationRole
from trigon.errors import RewardError
from trigon.rewards.contract import read_scores

IMAGE_MARKER = "<image>"
"""Stands for one image in the text of a message."""

MAX_IMAGES = 32
"""Maximum number of images of an observation."""

MAX_TEXT_CHARACTERS = 200_000
"""Maximum length of the text of an observation: more than any context takes."""

MAX_ASPECT_RATIO = 200
"""Image processors of the Qwen families raise an error for this aspect ratio or above."""

_PNG = b"\x89PNG\r\n\x1a\n"
_THOUGHTS = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)
_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_SEPARATORS = re.compile(r"[\s_-]+")


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

    text: the text with one IMAGE_MARKER for each image. images: PNG files, in the order of their
    markers.
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

    observation: None if there is nothing to see. reward: the reward of the turn; None from reset,
    or if the environment gave none. error: why the episode failed, in one line; "" if it did not. A
    failed episode is done.
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


def read_reward(value: object) -> float:
    """Return a reward as a float, bounded as the rewards of reward functions are.

    Raises: ValueError, whose text continues "step".
    """
    if isinstance(value, Mapping):
        raise ValueError("returned a dict as the reward, expected a number or None")
    try:
        return read_scores({"overall": value})["overall"]
    except RewardError as error:
        raise ValueError(str(error).replace("'overall'", "the reward")) from None


def action_text(completion: str) -> str:
    """Return the part of a turn's text that says what to do, without white space around it.

    Thoughts are left out: everything up to the last `</think>`, and after a `<think>` that is not
    closed. The content of the last `<action> ... </action>` in the rest counts, or all of the rest
    if there is none.
    """
    said = _THOUGHTS.sub("", completion).rpartition("</think>")[2]
    tagged = _TAGGED.findall(said)
    return (tagged[-1] if tagged else said).strip()


def find_action(completion: str, names: Mapping[str, str]) -> str | None:
    """Return the name that a turn's text contains, or None if it contains none, or several.

    Case, underscores and hyphens do not matter ("Turn_Left" is "turn left"). A name counts where it
    stands as words of its own: "right" is not in "bright", and of "turn left" and "left" the longer
    one counts where both would. So "I go left." is the action left, and "left or right" is none.

    Args: completion: text of the turn, of which `action_text` counts. names: names that
        `as_names` returned.
    """
    text = _plain(action_text(completion))
    longest_first = sorted(names, key=len, reverse=True)
    found = re.findall("|".join(rf"(?<!\w){re.escape(plain)}(?!\w)" for plain in longest_first), text)
    return names[found[0]] if len(set(found)) == 1 else None


def as_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name by the form in which it is searched.

    Raises: ValueError if there is no name, an empty one, or two that differ in case, underscores or
    hyphens only.
    """
    searched: dict[str, str] = {}
    for name in names:
        plain = _plain(name)
        if not plain:
            raise ValueError(f"an action has the name {name!r}, which no text can contain; give it a name of letters")
        if plain in searched:
            raise ValueError(
                f"the actions {searched[plain]!r} and {name!r} have the same name, since case, underscores and "
                f"hyphens do not count; rename one of them"
            )
        searched[plain] = name
    if not searched:
        raise ValueError("there are no actions; name at least one")
    return searched


def _plain(text: str) -> str:
    return _SEPARATORS.sub(" ", text.casefold()).strip()
