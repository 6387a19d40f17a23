"""Reads what the process of an episode sends, which may be forged: the user's code runs in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trigon.environments.protocol import (
    MAX_IMAGES,
    MAX_TEXT_CHARACTERS,
    Message,
    Observation,
    Outcome,
    check_observation,
)
from trigon.errors import RewardError
from trigon.rewards.contract import read_scores
from trigon.system.frames import Frame
from trigon.system.secrets import scrub

_MAX_ERROR_CHARACTERS = 1000
_MAX_TRACEBACK_CHARACTERS = 10_000


def max_reply_bytes(max_image_pixels: int) -> int:
    """Return the maximum size of a reply: escaped text, and images that do not compress."""
    return 12 * MAX_TEXT_CHARACTERS + MAX_IMAGES * (4 * max_image_pixels + (1 << 16))


def read_reply(episode: int, frame: Frame, *, max_image_pixels: int) -> tuple[Outcome, str]:
    """Return the outcome that a reply reports, and the traceback of its error.

    Raises: ValueError if it is not a reply.
    """
    content = frame.content
    if error := content.get("error"):
        line = " ".join(scrub(str(error)).split())[:_MAX_ERROR_CHARACTERS]
        trace = scrub(str(content.get("traceback", "")))[-_MAX_TRACEBACK_CHARACTERS:]
        return Outcome(episode, None, None, True, line), trace
    try:
        observation = _read_observation(content["messages"], frame.files)
        reward, done = content["reward"], content["done"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an invalid reply: {type(error).__name__}: {error}") from None
    if observation is not None:
        check_observation(observation, max_image_pixels=max_image_pixels)
    if not isinstance(done, bool):
        raise ValueError("an invalid reply: done is not true or false")
    return Outcome(episode, observation, None if reward is None else read_reward(reward), done), ""


def read_reward(value: object) -> float:
    """Return a reward as a float, bounded as those of reward functions.

    Raises: ValueError, whose text continues "step".
    """
    if isinstance(value, Mapping):
        raise ValueError("returned a dict as the reward, expected a number or None")
    try:
        return read_scores({"overall": value})["overall"]
    except RewardError as error:
        raise ValueError(str(error).replace("'overall'", "the reward")) from None


def _read_observation(messages: Any, files: tuple[bytes, ...]) -> Observation | None:
    if messages is None:
        return None
    read: list[Message] = []
    start = 0
    for message in messages:
        end = start + message["num_images"]
        if not isinstance(message["text"], str) or not start <= end <= len(files):
            raise ValueError("an invalid reply: a message without its text or its images")
        read.append(Message(message["role"], message["text"], files[start:end]))
        start = end
    return Observation(tuple(read))
