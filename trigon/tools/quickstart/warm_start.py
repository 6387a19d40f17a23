"""A short supervised warm start, after which completions are sometimes correct.

Used by `trigon tiny` before a run, and by no run itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from trigon.data.packing import pack_train, tokens_of
from trigon.errors import DataError
from trigon.models.load import Processors, load_model
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.models.weight_files import save_weights
from trigon.training.optim import Schedule, make_optimizer
from trigon.types import EncodedMedia, MicroBatch, Prompt, TrainGroup, TrainSequence, Vision

Example = tuple[Prompt, tuple[int, ...]] | TrainGroup
"""A prompt, and the token ids of its target completion, end-of-sequence token included; or a prompt
with targets from `as_target`, which may have several turns."""

ACCURACY_WINDOW = 8
"""Number of updates over which the accuracy is averaged."""


def warm_start_folder(
    folder: Path,
    processors: Processors,
    make_example: Callable[[int], Example],
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
    probability of a target completion, that of sampling at temperature 1; of completions with
    several turns, that of a turn. It is measured before each update, on examples not trained on
    before (while there are any), and averaged over the last ACCURACY_WINDOW updates. It rises
    suddenly, after a number of updates that depends on the seed, so a number of updates would be no
    good criterion.

    Args: make_example: makes the example of an index below num_examples, when it is drawn.
    batch_size: examples per update. seed: of their order. on_progress: called with the accuracy
    before each update.
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
        return [_as_group(make_example(order.pop())) for _ in range(batch_size)]

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
    """Return a target completion. The other fields are those of TrainSequence.

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


def _as_group(example: Example) -> TrainGroup:
    if isinstance(example, TrainGroup):
        return example
    prompt, token_ids = example
    return TrainGroup(prompt=prompt, sequences=(as_target(token_ids),))


def _accuracy(batch: MicroBatch, logprobs: Tensor) -> float:
    """Return the mean probability of a turn that is learned. logprobs: [S], without gradient."""
    lengths = [end - start for group in batch.packed.spans for completion in group.sampled for start, end in completion]
    turn_index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    turn_logprobs = torch.zeros(len(lengths)).index_add(0, turn_index, logprobs)
    is_learned = torch.zeros(len(lengths), dtype=torch.bool)
    is_learned[turn_index[batch.trainable]] = True
    return float(turn_logprobs[is_learned].exp().mean())
