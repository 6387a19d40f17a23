"""Draws training prompts from one or several datasets in an endless, seeded, resumable order.

An epoch draws round(w * n) prompts of a dataset with n prompts and weight w. They are taken from an
endless sequence of passes through the dataset, each in an order of its own, so that weight 2 gives
two full passes, and weight 0.5 one half and then the other:

    n = 6, w = 0.5    | 4 0 3   5 1 2 | 1 5 0   3 4 2 | ...
                        epoch 0 epoch 1 epoch 2 epoch 3

The order of an epoch is a function of (seed, epoch) alone: the first `n // batch_size * batch_size`
of the n prompts that it draws, permuted. The remaining ones replace prompts that turn out unusable.
Prompts are built in advance, in threads. Rows, images and tokens are in other modules.
"""

from __future__ import annotations

import functools
import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from trigon.data.dataset import DatasetContent, PromptSet, check_bad_fraction, find_changed_rows
from trigon.data.rows import Reason, UnusableRow
from trigon.errors import CheckpointError, DataError
from trigon.metrics import Max, Metric
from trigon.types import Prompt

_DATA = frozenset({"data.train_files", "data.train_weights"})
"""Options whose change makes positions in the data meaningless."""


class DrawnPrompt(NamedTuple):
    """One entry of an epoch's order.

    prompt_index: the index of the prompt. occurrence: how often the epoch has drawn it so far, from
    1.
    """

    prompt_index: int
    occurrence: int


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """The usable prompts of one or several datasets, numbered from 0. See mix."""

    parts: tuple[PromptSet, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> Prompt:
        """Build a prompt. Raises: as PromptSet's."""
        part, index = self._find(index)
        return part[index]

    def index_of(self, prompt_id: str) -> int | None:
        """Return the index of the prompt with this id, or None if no usable prompt has it."""
        found = ((start, part.index_of(prompt_id)) for start, part in zip(self._starts(), self.parts, strict=True))
        return next((start + index for start, index in found if index is not None), None)

    def image_files(self, prompt_id: str) -> list[bytes]:
        """Return the images of the prompt with this id as encoded files; none with videos.

        May be called from any thread. Raises: as building it.
        """
        index = self.index_of(prompt_id)
        assert index is not None, f"{prompt_id} is no prompt"
        part, index = self._find(index)
        return part.image_files(index)

    @property
    def shows_videos(self) -> bool:
        """Whether any prompt may have videos."""
        return any(part.shows_videos for part in self.parts)

    @property
    def lost(self) -> dict[int, Reason]:
        """Why prompts cannot be used that a saved run could use, by index."""
        parts = zip(self.parts, self._starts(), strict=True)
        return {start + index: reason for part, start in parts for index, reason in part.lost.items()}

    @property
    def num_rows(self) -> int:
        """Rows of all datasets, usable or not."""
        return sum(part.num_rows for part in self.parts)

    @property
    def num_skipped(self) -> Counter[Reason]:
        """How many rows were skipped when the datasets were opened, by reason."""
        return sum((Counter(part.num_skipped) for part in self.parts), Counter())

    @property
    def contents(self) -> tuple[DatasetContent, ...]:
        """The content and the weight of each dataset."""
        return tuple(part.content for part in self.parts)

    @property
    def prompts_per_epoch(self) -> int:
        """How many prompts an epoch draws, counting repeated ones each time."""
        return sum(map(_draws_per_epoch, self.parts))

    def draw_epoch(self, epoch: int, *, seed: int, shuffle: bool) -> list[DrawnPrompt]:
        """Return the prompts of an epoch, by dataset and pass, in the order of each dataset.

        shuffle: where an epoch draws only some of the prompts, whether they are chosen at random.
        """
        drawn = []
        for number, (part, start) in enumerate(zip(self.parts, self._starts(), strict=True)):
            count = _draws_per_epoch(part)
            first, last = epoch * count, (epoch + 1) * count
            occurrences: Counter[int] = Counter()
            for pass_number in range(first // len(part), -(-last // len(part))):
                offset = pass_number * len(part)
                begin, end = max(first - offset, 0), min(last - offset, len(part))
                order: Sequence[int] = range(len(part))
                if shuffle and end - begin < len(part):
                    order = _permutation(len(part), f"{seed}:dataset {number}:pass {pass_number}")
                for index in sorted(order[begin:end]):
                    occurrences[index] += 1
                    drawn.append(DrawnPrompt(start + index, occurrences[index]))
        return drawn

    def numbered_as(self, state: Mapping[str, Any]) -> Prompts:
        """Return the prompts with the numbers and ids of a saved stream (PromptStream.state).

        Of other data, the same prompts.
        """
        saved = load_contents(state["datasets"])
        if _changes_of_data(saved, self.contents):
            return self
        each = zip(self.parts, saved, state["names"], strict=True)
        return Prompts(tuple(part.numbered_as(content, name) for part, content, name in each))

    def changed_usability(self, saved: Sequence[DatasetContent]) -> list[str]:
        """Return sentences with the rows that can be used only now, or no longer.

        saved: what a saved run recorded of the same datasets.
        """
        return [
            text for part, content in zip(self.parts, saved, strict=True) for text in part.changed_usability(content)
        ]

    def with_blank_media(self) -> Prompts:
        """Return the same prompts with images and videos of one colour and the same size."""
        return Prompts(tuple(replace(part, builder=part.builder.with_blank_media()) for part in self.parts))

    def _starts(self) -> list[int]:
        """Return the index of each dataset's first prompt."""
        return list(accumulate((len(part) for part in self.parts[:-1]), initial=0))

    def _find(self, index: int) -> tuple[PromptSet, int]:
        """Return the dataset of a prompt, and the prompt's index in it."""
        starts = self._starts()
        number = bisect_right(starts, index) - 1
        return self.parts[number], index - starts[number]


def mix(parts: Sequence[PromptSet], weights: Sequence[float] = ()) -> Prompts:
    """Return several datasets as one.

    weights: for each dataset, how many passes through it make an epoch; empty: one each. Datasets
    of the same name get numbers in prompt ids: "train:17", "train~2:17".
    Raises: DataError if a dataset is so small that its weight gives no prompt of it.
    """
    mixed: list[PromptSet] = []
    original_names = {part.name for part in parts}
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        name, number, used_names = part.name, 1, {other.name for other in mixed}
        while name in used_names or (number > 1 and name in original_names):
            number += 1
            name = f"{part.name}~{number}"
        mixed.append(replace(part, name=name, content=replace(part.content, weight=float(weight))))
        if _draws_per_epoch(mixed[-1]) == 0:
            raise DataError(
                f"data.train_weights: {weight:g} of the {len(part)} prompts of {name!r} is not even one an epoch; "
                "raise the weight, or leave the dataset out"
            )
    return Prompts(tuple(mixed))


def _draws_per_epoch(part: PromptSet) -> int:
    return int(len(part) * part.content.weight + 0.5)


def _permutation(length: int, name: str) -> list[int]:
    """Return the numbers from 0 to length - 1 in a random order that name determines.

    It is the same on every machine and in every version: NumPy guarantees that the streams of
    RandomState never change (NEP 19).
    """
    # Hashed, so that the orders of consecutive seeds and epochs are independent.
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype="<u4")
    order: list[int] = np.random.RandomState(words).permutation(length).tolist()
    return order


@dataclass(frozen=True, slots=True)
class _Position:
    """The position of the stream.

    offset: entries of the epoch's order consumed. taken: prompts returned; less than offset if some
    were skipped.
    """

    epoch: int
    offset: int
    taken: int


def with_repeat_id(prompt: Prompt, occurrence: int) -> Prompt:
    """Return a prompt under the id of its n-th occurrence in an epoch, "train:17#2".

    Sampling seeds depend on the id, so that each occurrence gets other completions.
    """
    return replace(prompt, prompt_id=f"{_original_id(prompt.prompt_id)}#{occurrence}")


def _original_id(prompt_id: str) -> str:
    """Return the id of a prompt's first occurrence.

    The name of a dataset may contain a "#" itself.
    """
    dataset, _, row = prompt_id.rpartition(":")
    return f"{dataset}:{row.partition('#')[0]}"


class PromptStream:
    """Draws prompts endlessly, in an order that can be saved and resumed. Not thread-safe."""

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
        """Start at the beginning of epoch 0; no prompt is built yet.

        Args:
            batch_size: prompts of one training step; an epoch has complete batches only.
            shuffle: a new order for each epoch; False: the dataset's order, always.
            prefetch: build as many prompts as the last take returned in advance, so that two
                batches are in memory.
            num_workers: threads that build prompts.
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
        self._skipped: dict[int, Reason] = {}  # by prompt index
        self._futures: dict[tuple[int, int], Future[Prompt]] = {}  # by (epoch, offset)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="prompts")
        self._order = functools.lru_cache(maxsize=2)(self._order_of_epoch)

    @property
    def prompts_per_epoch(self) -> int:
        """How many prompts are taken in an epoch: complete batches only."""
        return self._prompts.prompts_per_epoch // self._batch_size * self._batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the last prompt taken, from 0."""
        return self._position.epoch

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts, without waiting if they were built in advance.

        A prompt that has become unusable is skipped and counted, and the next one is taken instead;
        it is skipped in later epochs too.
        Raises: DataError if too many prompts have become unusable, and other errors of building a
        prompt. The position of the stream is then unchanged.
        """
        position, skipped = self._position, dict(self._skipped)
        prompts: list[Prompt] = []
        self._build_ahead(position, num_prompts, skipped)
        while len(prompts) < num_prompts:
            (index, occurrence), position = self._next(position, skipped)
            try:
                prompt = self._futures.pop((position.epoch, position.offset)).result()
                prompts.append(prompt if occurrence == 1 else with_repeat_id(prompt, occurrence))
                position = replace(position, offset=position.offset + 1, taken=position.taken + 1)
            except UnusableRow as problem:
                skipped[index] = problem.reason
                self._check_skipped(skipped, str(problem))
                self._build_ahead(position, num_prompts - len(prompts), skipped)
        self._position, self._skipped = position, skipped
        if self._prefetch:
            self._build_ahead(position, num_prompts, skipped)
        return prompts

    def rebuild(self, prompt_id: str) -> Prompt:
        """Return a prompt that was taken before.

        Raises: CheckpointError if no prompt has this id.
        """
        index = self._prompts.index_of(_original_id(prompt_id))
        if index is None:
            raise CheckpointError(
                f"the saved run kept completions of {prompt_id}, which is not among the training prompts; restore the "
                "dataset of the saved run, or start a new one"
            )
        return replace(self._prompts[index], prompt_id=prompt_id)

    def image_files(self, prompt_id: str) -> list[bytes]:
        """Return the images of a prompt that was taken, see Prompts.image_files."""
        return self._prompts.image_files(_original_id(prompt_id))

    def metrics(self) -> dict[str, Metric]:
        """Return the position in epochs, and how many prompts were skipped since the run began."""
        return {
            "data/epoch": Max(self._position.epoch + self._position.taken / self.prompts_per_epoch),
            "data/num_skipped": Max(float(len(self._skipped))),
        }

    def state(self) -> dict[str, Any]:
        """Return the position after the last prompt taken, as a dict that JSON can hold."""
        return {
            "epoch": self._position.epoch,
            "offset": self._position.offset,
            "taken": self._position.taken,
            "skipped": [[index, reason] for index, reason in self._skipped.items()],
            "datasets": [asdict(content) for content in self._prompts.contents],
            "names": [part.name for part in self._prompts.parts],
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, with the prompts that followed it in the saved stream.

        The stream has the prompts that numbered_as returned. Changes have been accepted (see
        changes): with other data, start at their beginning; with another seed or shuffle, continue
        at the same place of the new order.
        Raises: DataError if no prompt can be used any more.
        """
        self._cancel_futures()
        self._position, self._skipped = _Position(0, 0, 0), {}
        if self.continues(state):
            assert [content["skipped"] for content in state["datasets"]] == [
                content.skipped for content in self._prompts.contents
            ], "prompts have the numbers of the saved stream"
            self._position = _Position(state["epoch"], state["offset"], state["taken"])
            self._skipped = self._prompts.lost | dict(state["skipped"])
            if len(self._skipped) == len(self._prompts):
                raise DataError("none of the rows that the saved run drew from can be used any more")

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Return whether a saved stream drew from the same prompts, perhaps in another order."""
        return _DATA.isdisjoint(self.changes(state))

    def changes(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Return what differs from a saved stream in prompts and order, by option."""
        found = _changes_of_data(load_contents(state["datasets"]), self._prompts.contents)
        for key, value in (("shuffle", self._shuffle), ("seed", self._seed)):
            if state[key] != value:
                found[f"data.{key}"] = f"was {json.dumps(state[key])}, and is now {json.dumps(value)}"
        return found

    def close(self) -> None:
        """Stop building and wait for the threads. The stream cannot be used afterwards."""
        self._cancel_futures()
        self._pool.shutdown()

    def _next(self, position: _Position, skipped: Mapping[int, Reason]) -> tuple[DrawnPrompt, _Position]:
        """Return the first usable prompt at or after a position, and its position."""
        while True:
            order = self._order(position.epoch)
            if position.taken >= self.prompts_per_epoch or position.offset >= len(order):
                position = _Position(position.epoch + 1, 0, 0)
            elif order[position.offset].prompt_index in skipped:
                position = replace(position, offset=position.offset + 1)
            else:
                return order[position.offset], position

    def _build_ahead(self, position: _Position, num_prompts: int, skipped: Mapping[int, Reason]) -> None:
        """Start building the next prompts after a position, as if all of them were usable."""
        for _ in range(num_prompts):
            (index, _), position = self._next(position, skipped)
            key = position.epoch, position.offset
            if key not in self._futures:
                self._futures[key] = self._pool.submit(self._prompts.__getitem__, index)
            position = replace(position, offset=position.offset + 1, taken=position.taken + 1)

    def _cancel_futures(self) -> None:
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()

    def _check_skipped(self, skipped: Mapping[int, Reason], latest: str) -> None:
        """Raise DataError if too many prompts are unusable. latest: the message of the last one."""
        before = self._prompts.num_skipped
        num_bad = sum(reason != "overlong" for reason in (*skipped.values(), *before.elements()))
        allowed = self._prompts.parts[0].builder.data.max_bad_row_fraction
        check_bad_fraction(num_bad, self._prompts.num_rows, allowed, [latest])
        if len(skipped) == len(self._prompts):
            raise DataError(f"no row of the dataset can be used any more; the last one: {latest}")

    def _order_of_epoch(self, epoch: int) -> list[DrawnPrompt]:
        drawn = self._prompts.draw_epoch(epoch, seed=self._seed, shuffle=self._shuffle)
        if not self._shuffle:
            return drawn
        return [drawn[number] for number in _permutation(len(drawn), f"{self._seed}:{epoch}")]


def load_contents(saved: Sequence[Mapping[str, Any]]) -> list[DatasetContent]:
    """Return what a checkpoint has of datasets."""
    return [DatasetContent(**content) for content in saved]


def _changes_of_data(saved: Sequence[DatasetContent], present: Sequence[DatasetContent]) -> dict[str, str]:
    """Return how datasets and their weights differ from a saved stream's, by option."""
    changed = find_changed_rows(saved, present)
    then, now = ([content.weight for content in contents] for contents in (saved, present))
    return changed if changed or then == now else {"data.train_weights": f"was {then}, and is now {now}"}
