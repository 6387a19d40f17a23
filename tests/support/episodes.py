"""Environments in this process, and a chat template, for tests of episodes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from PIL import Image

from trigon.data.vision import image_processor_of
from trigon.errors import DataError
from trigon.models.load import Processors
from trigon.rollout.episode_settings import EpisodeSettings
from trigon.types import Completion, EncodedMedia, ImageSizes, Prompt, Vision

Part = TypeVar("Part", Prompt, Completion)


@dataclass(frozen=True)
class Shown:
    """One message, as TurnTemplate takes it."""

    role: str
    text: str
    images: tuple[bytes, ...]


@dataclass(frozen=True)
class Observed:
    """An observation: images, then text. As TurnTemplate takes it, one message of the user."""

    text: str
    images: tuple[bytes, ...] = ()

    @property
    def messages(self) -> tuple[Shown, ...]:
        return (Shown("user", "<image>" * len(self.images) + self.text, self.images),)


@dataclass(frozen=True)
class Answer:
    episode: int
    observation: Observed | None = None
    reward: float | None = None
    done: bool = False
    error: str = ""


class LocalEnvironments:
    """Environments that answer in this process.

    answer: (row, actions so far) -> the answer. delay: (row, number of actions) -> how many polls
    an answer takes; None: all answer at the next poll.
    """

    def __init__(
        self,
        answer: Callable[[Mapping[str, Any], Sequence[str]], Answer],
        delay: Callable[[Mapping[str, Any], int], int] | None = None,
    ) -> None:
        self.answer = answer
        self.delay = delay
        self.running: dict[int, tuple[Mapping[str, Any], list[str]]] = {}
        self.images: list[tuple[bytes, ...]] = []
        self.most = 0  # running at a time
        self.num_started = 0
        self.num_polls_waiting = 0  # with a timeout
        self._answers: list[tuple[int, Answer]] = []  # (polls left, answer)

    def start(self, episode: int, row: Mapping[str, Any], images: tuple[bytes, ...]) -> None:
        assert episode not in self.running
        self.running[episode] = (row, [])
        self.num_started += 1
        self.images.append(images)
        self.most = max(self.most, len(self.running))
        self._ask(episode)

    def step(self, episode: int, action: str) -> None:
        self.running[episode][1].append(action)
        self._ask(episode)

    def poll(self, timeout_seconds: float) -> list[Answer]:
        self.num_polls_waiting += timeout_seconds > 0
        self._answers = [(left - 1, answer) for left, answer in self._answers]
        due = [answer for left, answer in self._answers if left <= 0]
        self._answers = [(left, answer) for left, answer in self._answers if left > 0]
        return due

    @property
    def owing(self) -> list[int]:
        """The episodes whose answer has not been polled."""
        return [answer.episode for _, answer in self._answers]

    def answer_all(self) -> None:
        """Let the next poll return all answers."""
        self._answers = [(0, answer) for _, answer in self._answers]

    def stop(self, episode: int) -> None:
        del self.running[episode]
        self._answers = [(left, answer) for left, answer in self._answers if answer.episode != episode]

    def _ask(self, episode: int) -> None:
        row, actions = self.running[episode]
        made = self.answer(row, actions)
        left = 0 if self.delay is None else self.delay(row, len(actions))
        self._answers.append((left, Answer(episode, made.observation, made.reward, made.done, made.error)))


@dataclass(frozen=True)
class Tokens:
    token_ids: tuple[int, ...]
    text: str
    media: EncodedMedia | None
    image_sizes: ImageSizes = ()


@dataclass
class PlainTemplate:
    """Observations as messages of the user in ChatML, with images before their text.

    For the fake engine: real ones are tested with TurnTemplate.
    """

    processors: Processors
    calls: list[int | None] = field(default_factory=list)

    def opening(self, observation: Observed | None) -> Tokens:
        self.calls.append(None)
        return self._tokens(observation, "")

    def reply(self, observation: Observed, *, last_token_id: int) -> Tokens:
        self.calls.append(last_token_id)
        return self._tokens(observation, "\n")

    def _tokens(self, observation: Observed | None, before: str) -> Tokens:
        [message] = [Shown("user", "", ())] if observation is None else observation.messages
        text = message.text.removeprefix("<image>" * len(message.images))
        if "impossible" in text:
            raise DataError("an observation\nthat cannot be shown")
        images = message.images
        tokenizer = self.processors.tokenizer
        ids = tokenizer.encode(f"{before}<|im_start|>user\n", add_special_tokens=False)
        sizes = []
        for image in images:
            sizes.append(image_processor_of(self.processors).processed_size(*Image.open(io.BytesIO(image)).size))
            start, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
            count = image_processor_of(self.processors).tokens_of(load_pixels(self.processors, image))[0]
            ids += [start, *[self.processors.family.image_token_id(self.processors.hf_config)] * count, end]
        ids += tokenizer.encode(f"{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        media = EncodedMedia(images, tuple(hashlib.sha256(image).hexdigest() for image in images)) if images else None
        return Tokens(tuple(ids), "<image>" * len(images) + text, media, tuple(sizes))


def load_pixels(processors: Processors, *files: bytes) -> Vision:
    """Return the pixel values of PNG files."""
    return image_processor_of(processors).process([Image.open(io.BytesIO(file)).convert("RGB") for file in files])


def with_pixels(processors: Processors, part: Part) -> Part:
    """Return a prompt or completion with the pixel values of its images, if it has their files."""
    encoded = part.vision
    return (
        replace(part, vision=load_pixels(processors, *encoded.encoded)) if isinstance(encoded, EncodedMedia) else part
    )


def make_settings(environments: Any, processors: Processors, **changes: Any) -> EpisodeSettings:
    """Return settings with these fields changed: a first observation, and up to four turns."""
    defaults: dict[str, Any] = {
        "environments": environments,
        "template": PlainTemplate(processors),
        "opens": True,
        "max_turns": 4,
        "load_pixels": lambda media: load_pixels(processors, *media.encoded),
        "load_prompts": lambda prompts: [with_pixels(processors, prompt) for prompt in prompts],
    }
    return EpisodeSettings(**(defaults | changes))


def drawing(colour: int, width: int = 84, height: int = 84) -> bytes:
    """Return a PNG file of a gradient."""
    image = Image.new("RGB", (width, height), (colour % 256, 80, 200))
    image.paste((10, colour % 256, 30), (width // 4, height // 4, width // 2, height // 2))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
