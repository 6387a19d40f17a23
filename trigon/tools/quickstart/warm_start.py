"""A short supervised warm start, after which completions are sometimes correct.

Used by `trigon tiny` before a run, and by no run itself. For models that act in turns, episodes are
played by a script: the tokens are the same as in a run, with the script's texts in place of what a
model samples. The programs of examples/ use these.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trigon.config.names import LearningRateSchedule
from trigon.config.schema import DataConfig, OptimConfig
from trigon.data.media_processing import MediaProcessor
from trigon.data.packing import pack_train, tokens_of
from trigon.data.prompts import PromptBuilder
from trigon.data.turns import TurnTemplate
from trigon.data.vision import image_processor_of
from trigon.environments.conversion import to_observation, to_png, to_step
from trigon.environments.protocol import Environment
from trigon.errors import DataError
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.models.weight_files import save_weights
from trigon.system.image_formats import LazyImages
from trigon.training.optim import Schedule, make_optimizer
from trigon.types import EncodedMedia, MicroBatch, TrainGroup, TrainSequence, Vision

ACCURACY_WINDOW = 8
"""Number of updates over which the accuracy is averaged."""

_MAX_IMAGE_PIXELS = 1 << 24
Script = Callable[[int], tuple[str, bool]]
"""Returns what is written in a turn, of which it gets the number, from 0, and whether that is
learned. It may look into the environment for what to write."""


def warm_start_folder(
    folder: Path,
    processors: Processors,
    make_example: Callable[[int], TrainGroup],
    *,
    num_examples: int,
    max_updates: int,
    target_accuracy: float,
    batch_size: int,
    schedule: Schedule,
    seed: int,
    on_progress: Callable[[float], None] | None = None,
) -> float:
    """Train the model of a folder in place up to target_accuracy, and return its accuracy.

    The loss is the mean negative log-probability of the target tokens. The accuracy is the mean
    probability of sampling a target completion at temperature 1, or of sampling a turn if
    completions have several turns. It is measured before each update, on examples not trained on
    before (while there are any), and averaged over the last ACCURACY_WINDOW updates. It rises
    suddenly, after a number of updates that depends on the seed, so a number of updates would be no
    good criterion.

    Args: make_example: makes the example of an index below num_examples when it is drawn: a prompt
    with target completions from as_target, end-of-sequence tokens included.
    batch_size: examples per update. seed: the seed of their order. on_progress: called with the
    accuracy before each update.
    Raises: DataError if no turn of a batch is learned, see as_target: it has no loss.
    """
    policy = Policy(
        load_model(str(folder), dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=1.0,
        banned_token_ids=processors.banned_token_ids,
    )
    positions = positions_of(processors.family, processors.hf_config)
    optimizer = make_optimizer(
        policy.parameters(), schedule.optim.model_copy(update={"betas": (0.9, 0.99), "weight_decay": 0.0})
    )
    rng = random.Random(seed)
    order: list[int] = []

    def draw() -> list[TrainGroup]:
        if len(order) < batch_size:
            order[:] = rng.sample(range(num_examples), num_examples)
        return [make_example(order.pop()) for _ in range(batch_size)]

    recent: deque[float] = deque(maxlen=ACCURACY_WINDOW)
    with ThreadPoolExecutor(1, thread_name_prefix="examples") as thread:
        upcoming = thread.submit(draw)
        for update in range(1, max_updates + 1):
            groups, upcoming = upcoming.result(), thread.submit(draw)
            [batch] = pack_train(groups, max_tokens=sum(tokens_of(group) for group in groups), positions=positions)
            if not batch.trainable.any():
                raise DataError(
                    f"no turn of the {batch_size} examples of update {update} is learned: let more turns be learned, "
                    "or make batches larger"
                )
            logprobs = policy(batch.packed).logprobs
            recent.append(_accuracy(batch, logprobs.detach()))
            accuracy = sum(recent) / ACCURACY_WINDOW  # too low until the window is full
            if on_progress is not None:
                on_progress(accuracy)
            if accuracy >= target_accuracy:
                break
            loss = -logprobs[batch.trainable].mean()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate(update)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    save_weights({name: weight.contiguous() for name, weight in policy.named_weights()}, folder / "model.safetensors")
    return accuracy


def as_target(
    token_ids: tuple[int, ...],
    *,
    sampled: Sequence[tuple[int, int]] = (),
    learned: Sequence[bool] = (),
    vision: Vision | EncodedMedia | None = None,
) -> TrainSequence:
    """Return a target completion. The other fields are as in TrainSequence.

    learned: whether each range of sampled is learned; otherwise it is context, as what was observed
    is. If none are given, all are.
    """
    ranges = tuple(sampled) or ((0, len(token_ids)),)
    loss_mask = torch.cat(
        [
            torch.full((end - start,), float(is_learned))
            for (start, end), is_learned in zip(ranges, learned or [True] * len(ranges), strict=True)
        ]
    )
    return TrainSequence(
        token_ids=token_ids,
        loss_mask=loss_mask,
        advantages=torch.ones(len(loss_mask)),
        sampling_logprobs=torch.zeros(len(loss_mask)),
        old_logprobs=None,
        ref_logprobs=None,
        sampled=ranges,
        vision=vision,
    )


def _accuracy(batch: MicroBatch, logprobs: Tensor) -> float:
    """Return the mean probability of a turn that is learned. logprobs: [S], without gradient."""
    lengths = [end - start for group in batch.packed.spans for completion in group.sampled for start, end in completion]
    turn_index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    turn_logprobs = torch.zeros(len(lengths)).index_add(0, turn_index, logprobs)
    is_learned = torch.zeros(len(lengths), dtype=torch.bool)
    is_learned[turn_index[batch.trainable]] = True
    return float(turn_logprobs[is_learned].exp().mean())


# -- demonstrations -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode to play: a row of the dataset, its environment, and a script.

    images: the images of the row, as PIL images.
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
    tools: Sequence[Mapping[str, Any]] = (),
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> float:
    """Train the model of a folder on demonstrations, in place, and return its accuracy.

    The rows have the columns problem, answer and, where there are images, images.

    Args:
        demonstrate: returns the episode of a number from 0; each is played once, in a thread.
        num_updates: most updates; fewer if target_accuracy is reached. target_accuracy, batch_size,
            learning_rate: see warm_start_folder. The accuracy is the accuracy of turns.
        scheduler: schedule of the learning rate, after ten updates in which it rises.
        seed: the seed of the order of the episodes.
        max_turns: turns after which an episode ends if its environment does not end it.
        opens: whether the environment has a first observation, which follows the prompt.
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
            target = play(demonstration, processors, template, opens=opens, max_turns=max_turns)
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
    max_turns: int,
) -> TrainSequence:
    """Play an episode, and return its tokens as a target, with images as encoded files.

    The environment's close() is called at the end, if it has one, also if something raises.
    Args: as in learn_demonstrations. template: template of the conversation, as a run has it.
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
            seen = to_observation(returned, role="user", max_image_pixels=_MAX_IMAGE_PIXELS)
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
