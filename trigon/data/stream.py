"""The endless, seeded, resumable order in which training draws prompts, and the threads that build them ahead of time.

Knows epochs, positions and what is being built. Refuses to know rows, images and tokens.

The order is a function of (seed, epoch) alone: the first `n // batch_size * batch_size` of the n prompts that an epoch
draws, permuted (orders.py). What an epoch leaves over replaces prompts that turn out unusable.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from trigon.data.bad_rows import Reason, UnusableRow
from trigon.data.dataset import Draw, Prompts, check_bad_fraction
from trigon.data.orders import permuted
from trigon.errors import CheckpointError, DataError
from trigon.metrics import Max, Metric
from trigon.types import Prompt


@dataclass(frozen=True, slots=True)
class _Position:
    """Where the stream stands. offset: entries of the epoch's order passed. taken: prompts that came of them."""

    epoch: int
    offset: int
    taken: int


def drawn_again(prompt: Prompt, time: int) -> Prompt:
    """Return a prompt as it is called when it is drawn for the time-th time: "train:17#2".

    To those who seed by its name it is another prompt, lest it be answered alike.
    """
    return replace(prompt, prompt_id=f"{_first_name(prompt.prompt_id)}#{time}")


def _first_name(prompt_id: str) -> str:
    """Return what a prompt was called when it was first drawn. A dataset's own name may hold a #."""
    dataset, _, row = prompt_id.rpartition(":")
    return f"{dataset}:{row.partition('#')[0]}"


class PromptStream:
    """Draws prompts for ever, in an order that can be saved and continued. Not to be shared between threads."""

    def __init__(
        self,
        prompts: Prompts,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        prefetch: bool,
        num_workers: int,
    ) -> None:
        """Start at the beginning of epoch 0, building nothing yet.

        Args:
            batch_size: prompts of one training step; an epoch has whole batches only.
            shuffle: a new order for each epoch; False: the dataset's own, always.
            prefetch: build as many prompts again while those taken are in use, which holds two batches in memory.
            num_workers: threads that build.
        Raises: DataError if an epoch has fewer prompts than batch_size.
        """
        if prompts.prompts_per_epoch < batch_size:
            raise DataError(
                f"the dataset has {prompts.prompts_per_epoch} usable prompts, fewer than the {batch_size} of one "
                "batch; lower data.rollout_batch_size or add rows"
            )
        self._prompts = prompts
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._prefetch = prefetch
        self._position = _Position(epoch=0, offset=0, taken=0)
        self._set_aside: dict[int, Reason] = {}
        self._ahead: dict[tuple[int, int], Future[Prompt]] = {}  # by (epoch, offset)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="prompts")
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    @property
    def prompts_per_epoch(self) -> int:
        """How many prompts are taken in an epoch: whole batches only."""
        return self._prompts.prompts_per_epoch // self._batch_size * self._batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the last prompt taken, from 0."""
        return self._position.epoch

    @property
    def set_aside(self) -> Mapping[Reason, int]:
        """How many prompts have become unusable since the dataset was opened, by reason."""
        return Counter(self._set_aside.values())

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts, at once when they are already built.

        A prompt that has become unusable is set aside, counted, and the next one is taken; it is not tried again.
        Raises: DataError if too many have become so; and what else building raises. The stream has then not moved.
        """
        position, set_aside = self._position, dict(self._set_aside)
        prompts: list[Prompt] = []
        self._build_ahead(position, num_prompts, set_aside)
        while len(prompts) < num_prompts:
            (index, time), position = self._next(position, set_aside)
            try:
                prompt = self._ahead.pop((position.epoch, position.offset)).result()
                prompts.append(prompt if time == 1 else drawn_again(prompt, time))
                position = replace(position, offset=position.offset + 1, taken=position.taken + 1)
            except UnusableRow as problem:
                set_aside[index] = problem.reason
                self._check_set_aside(set_aside, str(problem))
                self._build_ahead(position, num_prompts - len(prompts), set_aside)
        self._position, self._set_aside = position, set_aside
        if self._prefetch:
            self._build_ahead(position, num_prompts, set_aside)
        return prompts

    def rebuilt(self, prompt_id: str) -> Prompt:
        """Return a prompt that was taken before. Raises: CheckpointError if there is none of that name."""
        index = self._prompts.index_of(_first_name(prompt_id))
        if index is None:
            raise CheckpointError(
                f"the saved run kept answers to {prompt_id}, which is not among the training prompts; restore the "
                "dataset of the saved run, or start a new one"
            )
        return replace(self._prompts[index], prompt_id=prompt_id)

    def metrics(self) -> dict[str, Metric]:
        """Return how far the data have been used, and how many prompts were lost on the way, since the run began."""
        return {
            "data/epoch": Max(self._position.epoch + self._position.taken / self.prompts_per_epoch),
            "data/num_set_aside": Max(float(len(self._set_aside))),
        }

    def state(self) -> dict[str, Any]:
        """Return where the stream stands, behind the last prompt taken, as JSON can hold it."""
        return {
            "epoch": self._position.epoch,
            "offset": self._position.offset,
            "taken": self._position.taken,
            "set_aside": [[index, reason] for index, reason in self._set_aside.items()],
            **self._identity(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream stood: with the very prompts that it would have taken next.

        Raises: CheckpointError if that stream drew from other prompts or in another order.
        """
        for key, here in self._identity().items():
            if state[key] != here:
                raise CheckpointError(
                    f"the saved position belongs to other training data: its {key} is {state[key]!r}, here it is "
                    f"{here!r}; restore the dataset and the data.* settings of the saved run, or start a new one"
                )
        self._forget_ahead()
        self._position = _Position(state["epoch"], state["offset"], state["taken"])
        self._set_aside = dict(state["set_aside"])

    def close(self) -> None:
        """Stop building and wait for the threads. The stream cannot be used afterwards."""
        self._forget_ahead()
        self._pool.shutdown()

    def _next(self, position: _Position, set_aside: Mapping[int, Reason]) -> tuple[Draw, _Position]:
        """Return the prompt to draw from a position on, and where exactly it stands."""
        while True:
            order = self._order(position.epoch)
            if position.taken >= self.prompts_per_epoch or position.offset >= len(order):
                position = _Position(position.epoch + 1, 0, 0)
            elif order[position.offset].number in set_aside:
                position = replace(position, offset=position.offset + 1)
            else:
                return order[position.offset], position

    def _build_ahead(self, position: _Position, num_prompts: int, set_aside: Mapping[int, Reason]) -> None:
        """See to it that the next prompts from a position on are being built, if none of them turns out unusable."""
        for _ in range(num_prompts):
            (index, _), position = self._next(position, set_aside)
            key = position.epoch, position.offset
            if key not in self._ahead:
                self._ahead[key] = self._pool.submit(self._prompts.__getitem__, index)
            position = replace(position, offset=position.offset + 1, taken=position.taken + 1)

    def _forget_ahead(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def _check_set_aside(self, set_aside: Mapping[int, Reason], latest: str) -> None:
        report, num_rows = self._prompts.report, self._prompts.num_rows
        num_bad = sum(count for reason, count in report.items() if reason != "overlong") + len(set_aside)
        check_bad_fraction(num_bad, num_rows, self._prompts.max_bad_row_fraction, [latest])
        if len(set_aside) == len(self._prompts):
            raise DataError(f"no row of the dataset can be used any more; the last one: {latest}")

    def _identity(self) -> dict[str, Any]:
        """What the order depends on, besides the position. Not the batch size: a run may go on with another."""
        return {
            "num_prompts": len(self._prompts),
            "fingerprint": self._prompts.fingerprint,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _draw_order(self, epoch: int) -> list[Draw]:
        draws = self._prompts.of_epoch(epoch, seed=self._seed, shuffle=self._shuffle)
        if not self._shuffle:
            return draws
        return [draws[number] for number in permuted(len(draws), f"{self._seed}:{epoch}")]
