"""Plays episodes by a script, for the supervised warm start of a tiny model that acts in turns.

The tokens are those of a run: the prompt, what the chat template writes between turns, and the
script's texts in place of what a model samples. Used by the programs of examples/, by no run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trigon.config.names import LearningRateSchedule, ObservationRole
from trigon.config.schema import DataConfig, OptimConfig
from trigon.data.media_processing import MediaProcessor
from trigon.data.prompts import PromptBuilder
from trigon.data.turns import TurnTemplate
from trigon.data.vision import image_processor_of
from trigon.environments.conversion import to_observation, to_png, to_step
from trigon.environments.protocol import Environment
from trigon.models.load import Processors, load_processors
from trigon.system.image_formats import LazyImages
from trigon.tools.quickstart.warm_start import as_target, warm_start_folder
from trigon.training.optim import Schedule
from trigon.types import EncodedMedia, TrainGroup, TrainSequence

_MAX_IMAGE_PIXELS = 1 << 24

Script = Callable[[int], tuple[str, bool]]
"""Returns what is written in a turn, of which it gets the number, from 0, and whether that is
learned. It may look into the environment for what to write."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode to play: a row of the dataset, its environment, and a script.

    images: of the row, as PIL images.
    shows_tools: whether the prompt describes the tools, if there are any.
    """

    row: Mapping[str, Any]
    environment: Environment
    script: Script
    images: Sequence[Any] = ()
    shows_tools: bool = True


def learn_demonstrations(
    folder: Path,
    demonstrate: Callable[[int], Demonstration],
    *,
    num_updates: int,
    target_accuracy: float,
    batch_size: int,
    learning_rate: float,
    scheduler: LearningRateSchedule = "constant",
    seed: int,
    max_turns: int = 8,
    opens: bool = True,
    role: ObservationRole = "user",
    tools: Sequence[Mapping[str, Any]] = (),
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> float:
    """Train the model of a folder on demonstrations, in place, and return its accuracy.

    The rows have the columns problem, answer and, where there are images, images.

    Args:
        demonstrate: returns the episode of a number from 0; each is played once, in a thread.
        num_updates: at most; fewer if target_accuracy is reached. target_accuracy, batch_size,
            learning_rate: see warm_start_folder. The accuracy is that of turns.
        scheduler: of the learning rate, after ten updates in which it rises.
        seed: of the order of the episodes.
        max_turns: turns after which an episode ends if its environment does not end it.
        opens: whether the environment has a first observation, which follows the prompt.
        role: of observations that are not messages of tools.
        tools: the schemas that the prompt has, in a run with tools.
        min_pixels, max_pixels: data.min_pixels and data.max_pixels of the run.
        on_progress: called with the accuracy before each update.
    """
    processors = load_processors(str(folder), min_pixels=min_pixels, max_pixels=max_pixels)
    builders = {
        shows_tools: PromptBuilder(
            processors,
            DataConfig(prompt_key="problem", max_prompt_length=4096, max_image_pixels=_MAX_IMAGE_PIXELS),
            process_images=False,
            tools=tools if shows_tools else (),
            generation_prompt=not opens,
        )
        for shows_tools in (True, False)
    }
    template = TurnTemplate(processors, tools=tools, max_image_pixels=_MAX_IMAGE_PIXELS)
    image_processor = image_processor_of(processors)
    assert image_processor is not None, "a tiny model that takes images"
    # The maker of examples uses it in a thread, which ends before warm_start_folder does.
    with closing(
        MediaProcessor(image_processor, max_image_pixels=_MAX_IMAGE_PIXELS, num_workers=1, max_bytes=1 << 28)
    ) as media:

        def make_example(index: int) -> TrainGroup:
            demonstration = demonstrate(index)
            builder = builders[demonstration.shows_tools]
            prompt = builder.build(dict(demonstration.row), f"demonstration:{index}")
            target = play(demonstration, processors, template, opens=opens, role=role, max_turns=max_turns)
            media.start_step()
            [group] = media.process_groups([TrainGroup(prompt, (target,))])
            return group

        accuracy = warm_start_folder(
            folder,
            processors,
            make_example,
            num_examples=num_updates * batch_size,
            max_updates=num_updates,
            target_accuracy=target_accuracy,
            batch_size=batch_size,
            schedule=Schedule(OptimConfig(lr=learning_rate, lr_scheduler_type=scheduler), 10, num_updates),
            seed=seed,
            on_progress=on_progress,
        )
    return accuracy


def play(
    demonstration: Demonstration,
    processors: Processors,
    template: TurnTemplate,
    *,
    opens: bool,
    role: ObservationRole,
    max_turns: int,
) -> TrainSequence:
    """Play an episode, and return its tokens as a target, with images as encoded files.

    The environment's close() is called at the end, if it has one, also if something raises.
    Args: as of learn_demonstrations. template: of the conversation, as a run has it.
    """
    end_token_id = processors.stop_token_ids[0]
    token_ids: list[int] = []
    sampled: list[tuple[int, int]] = []
    learned: list[bool] = []
    files: list[bytes] = []
    hashes: list[str] = []
    environment = demonstration.environment
    with ExitStack() as stack:
        if callable(close := getattr(environment, "close", None)):
            stack.callback(close)
        images = LazyImages([to_png(image) for image in demonstration.images])
        returned: object = environment.reset({**demonstration.row, "images": images})
        for turn in range(max_turns):
            seen = to_observation(returned, role=role, max_image_pixels=_MAX_IMAGE_PIXELS)
            observed = None
            if turn > 0:
                if seen is None:
                    break
                observed = template.reply(seen, last_token_id=end_token_id)
            elif opens:
                observed = template.opening(seen)
            if observed is not None:
                token_ids += observed.token_ids
                if observed.media is not None:
                    files += observed.media.encoded
                    hashes += observed.media.hashes
            text, is_learned = demonstration.script(turn)
            start = len(token_ids)
            token_ids += [*processors.tokenizer.encode(text), end_token_id]
            sampled.append((start, len(token_ids)))
            learned.append(is_learned)
            returned, _, is_over = to_step(environment.step(text))
            if is_over:
                break
    media = EncodedMedia(tuple(files), tuple(hashes)) if files else None
    return as_target(tuple(token_ids), sampled=tuple(sampled), learned=learned, vision=media)
