"""Plays episodes by a script, for the supervised warm start of a tiny model that acts in turns.

The tokens are those of a run: the prompt, what the chat template writes between turns, and the
script's texts in place of what a model samples. Used by the programs of examples/, by no run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trigon.data.media_processing import MediaProcessor
from trigon.data.prompts import PromptBuilder
from trigon.data.turns import TurnTemplate
from trigon.data.vision import image_processor_of
from trigon.environments.conversion import to_observation, to_step
from trigon.environments.protocol import Environment, Observation
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.models.weight_files import save_weights
from trigon.names import ObservationRole
from trigon.tiny.warm_start import as_target, warm_start
from trigon.training.optim import Schedule
from trigon.types import EncodedMedia, TrainGroup

_MAX_IMAGE_PIXELS = 1 << 24

Script = Callable[[int], tuple[str, bool]]
"""Returns what is written in a turn, of which it gets the number, from 0, and whether it is learned.
It may look into the environment for what to write."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode to play: a row of the dataset, its environment, and a script.

    images: of the row, as the environment gets them.
    """

    row: Mapping[str, Any]
    environment: Environment
    script: Script
    images: Sequence[Any] = ()


def learn_demonstrations(
    folder: Path,
    demonstrate: Callable[[int], Demonstration],
    *,
    num_updates: int,
    target_accuracy: float,
    batch_size: int,
    learning_rate: float,
    seed: int,
    max_turns: int = 8,
    opens: bool = True,
    role: ObservationRole = "user",
    tools: Sequence[Mapping[str, Any]] = (),
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> None:
    """Train the model of a folder on demonstrations, in place.

    Args:
        demonstrate: returns the episode of a number from 0; each is played once.
        num_updates: at most; fewer if target_accuracy is reached. target_accuracy, batch_size,
            learning_rate: see warm_start.
        opens: whether the environment has a first observation, which follows the prompt.
        role: of observations that are no messages of tools.
        tools: the schemas that the prompt has, in a run with tools.
        min_pixels, max_pixels: data.min_pixels and data.max_pixels of the run.
        on_progress: called with the mean probability of the recent demonstrations before each
            update.
    """
    processors = load_processors(str(folder), min_pixels=min_pixels, max_pixels=max_pixels)
    builder = PromptBuilder(
        processors,
        prompt_key="problem",
        answer_key="answer",
        image_key="images",
        image_dir=None,
        format_prompt=None,
        system_prompt=None,
        max_prompt_length=4096,
        max_image_pixels=_MAX_IMAGE_PIXELS,
        limit_images=0,
        process_images=False,
        tools=tools,
        generation_prompt=not opens,
    )
    template = TurnTemplate(processors, tools=tools, max_image_pixels=_MAX_IMAGE_PIXELS)
    image_processor = image_processor_of(processors)
    assert image_processor is not None  # tiny models with pictures
    media = MediaProcessor(image_processor, max_image_pixels=_MAX_IMAGE_PIXELS, num_workers=1, max_bytes=1 << 28)

    def play(index: int) -> TrainGroup:
        demonstration = demonstrate(index)
        prompt = builder.build(dict(demonstration.row), f"demonstration:{index}")
        episode = _Episode(template, processors.tokenizer, processors.stop_token_ids[0], role)
        episode.play(demonstration, opens=opens, max_turns=max_turns)
        media.start_step()
        [group] = media.process_groups([TrainGroup(prompt, (episode.as_target(),))])
        return group

    policy = Policy(
        load_model(str(folder), dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=1.0,
        banned_token_ids=processors.banned_token_ids,
    )
    warm_start(
        policy,
        play,
        num_examples=num_updates * batch_size,
        max_updates=num_updates,
        target_accuracy=target_accuracy,
        batch_size=batch_size,
        schedule=Schedule(learning_rate, "constant", 10, num_updates, 0.0),
        positions=positions_of(processors.family, processors.hf_config),
        seed=seed,
        on_progress=on_progress,
    )
    save_weights({name: weight.contiguous() for name, weight in policy.named_weights()}, folder / "model.safetensors")


class _Episode:
    """The tokens of one episode, which grow turn by turn."""

    def __init__(self, template: TurnTemplate, tokenizer: Any, end_token_id: int, role: ObservationRole) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._end_token_id = end_token_id
        self._role: ObservationRole = role
        self._token_ids: list[int] = []
        self._sampled: list[tuple[int, int]] = []
        self._learned: list[bool] = []
        self._files: list[bytes] = []
        self._hashes: list[str] = []

    def play(self, demonstration: Demonstration, *, opens: bool, max_turns: int) -> None:
        environment = demonstration.environment
        seen = self._observation(environment.reset({**demonstration.row, "images": list(demonstration.images)}))
        if opens:
            self._append(self._template.opening(seen))
        for turn in range(max_turns):
            text, is_learned = demonstration.script(turn)
            self._learned.append(is_learned)
            start = len(self._token_ids)
            self._token_ids += [*self._tokenizer.encode(text), self._end_token_id]
            self._sampled.append((start, len(self._token_ids)))
            returned, _, is_over = to_step(environment.step(text))
            seen = self._observation(returned)
            if is_over or seen is None or turn == max_turns - 1:
                return
            self._append(self._template.reply(seen, last_token_id=self._end_token_id))

    def as_target(self) -> Any:
        media = EncodedMedia(tuple(self._files), tuple(self._hashes)) if self._files else None
        return as_target(tuple(self._token_ids), sampled=tuple(self._sampled), learned=self._learned, vision=media)

    def _observation(self, returned: object) -> Observation | None:
        return to_observation(returned, role=self._role, max_image_pixels=_MAX_IMAGE_PIXELS)

    def _append(self, tokens: Any) -> None:
        self._token_ids += tokens.token_ids
        if tokens.media is not None:
            self._files += tokens.media.encoded
            self._hashes += tokens.media.hashes
