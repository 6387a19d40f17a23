"""Draws training prompts in an endless, seeded, resumable order, and builds them in advance.

The order is a function of (seed, epoch) alone: the first `n // batch_size * batch_size` of the n
prompts that an epoch draws, permuted (orders.py). The remaining ones replace prompts that turn out
unusable. This module depends on neither rows nor images nor tokens.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from trigon.config.compared import is_accepted
from trigon.data.bad_rows import Reason, UnusableRow
from trigon.data.content import DatasetContent
from trigon.data.dataset import DrawnPrompt, Prompts, check_bad_fraction
from trigon.data.orders import permutation
from trigon.errors import CheckpointError, DataError
from trigon.metrics import Max, Metric
from trigon.types import Prompt

_DATA = frozenset({"data.train_files", "data.train_weights"})
"""Options whose change makes positions in the data meaningless."""


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
        accepted_changes: Collection[str] = (),
    ) -> None:
        """Start at the beginning of epoch 0; no prompt is built yet.

        Args:
            batch_size: prompts of one training step; an epoch has complete batches only.
            shuffle: a new order for each epoch; False: the dataset's order, always.
            prefetch: build as many prompts as the last take returned in advance, so that two
                batches are in memory.
            num_workers: threads that build prompts.
            accepted_changes: as trainer.accept_changes.
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
        self._accepted_changes = accepted_changes
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

    @property
    def num_skipped(self) -> Mapping[Reason, int]:
        """How many prompts have become unusable since the dataset was opened, by reason."""
        return Counter(self._skipped.values())

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
        """Return the images of a prompt that was taken, as encoded files; none with videos.

        May be called from any thread. Raises: as Prompts.image_files.
        """
        index = self._prompts.index_of(_original_id(prompt_id))
        assert index is not None, f"{prompt_id} is no training prompt"
        return self._prompts.image_files(index)

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
            "set_aside": [[index, reason] for index, reason in self._skipped.items()],
            "datasets": [asdict(content) for content in self._prompts.contents],
            **self._identity(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, with the prompts that followed it in the saved stream.

        With other data, where that is accepted, begin with it; with another seed or shuffle, go on
        at the same place of the new order. Raises: as check_state.
        """
        self.check_state(state)
        self._cancel_futures()
        self._position, self._skipped = _Position(0, 0, 0), {}
        if self.continues(state):
            self._position = _Position(state["epoch"], state["offset"], state["taken"])
            self._skipped = dict(state["set_aside"])

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Return whether the prompts are those of a saved stream, perhaps in another order."""
        return _DATA.isdisjoint(self.changes(state))

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a saved stream drew from other prompts or in another order.

        Not for what accepted_changes names.
        """
        for name, change in self.changes(state).items():
            if not is_accepted(name, self._accepted_changes):
                raise CheckpointError(
                    f"the checkpoint was saved with other training data or another order: {name} {change}; restore "
                    "it, or start a new run with another trainer.experiment_name"
                )

    def changes(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Return what differs from a saved stream in prompts and order, by option."""
        identity, found = self._identity(), {}
        saved = [DatasetContent(**content) for content in state.get("datasets", ())]
        same_rows = len(saved) != len(self._prompts.contents) or all(
            now.has_rows_of(then) for now, then in zip(self._prompts.contents, saved, strict=True)
        )
        if any(state[key] != identity[key] for key in ("fingerprint", "num_prompts")) or not same_rows:
            name, change = _changed_content(saved, self._prompts.contents, state["num_prompts"], len(self._prompts))
            found[name] = change
        for key in ("shuffle", "seed"):
            if state[key] != identity[key]:
                found[f"data.{key}"] = f"was {_yaml(state[key])}, and is now {_yaml(identity[key])}"
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
        num_bad = len(skipped) + sum(
            count for reason, count in self._prompts.num_skipped.items() if reason != "overlong"
        )
        check_bad_fraction(num_bad, self._prompts.num_rows, self._prompts.max_bad_row_fraction, [latest])
        if len(skipped) == len(self._prompts):
            raise DataError(f"no row of the dataset can be used any more; the last one: {latest}")

    def _identity(self) -> dict[str, Any]:
        """Return what the order depends on.

        Not the batch size: a run may be resumed with another one.
        """
        return {
            "num_prompts": len(self._prompts),
            "fingerprint": self._prompts.fingerprint,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _order_of_epoch(self, epoch: int) -> list[DrawnPrompt]:
        drawn = self._prompts.draw_epoch(epoch, seed=self._seed, shuffle=self._shuffle)
        if not self._shuffle:
            return drawn
        return [drawn[number] for number in permutation(len(drawn), f"{self._seed}:{epoch}")]


def _changed_content(
    saved: Sequence[DatasetContent], present: Sequence[DatasetContent], num_saved: int, num_present: int
) -> tuple[str, str]:
    """Return in which files, rows or weights a saved run and this one differ: an option, and how.

    saved: empty in checkpoints of earlier versions. num_saved, num_present: usable rows in all.
    """
    files, weights = "data.train_files", "data.train_weights"
    present_specs = ", ".join(content.spec for content in present)
    if not saved:
        return files, f"had {num_saved} usable rows then, and has {num_present} now in {present_specs}"
    if len(saved) == len(present):
        pairs = list(zip(saved, present, strict=True))
        if all(new.has_rows_of(old) for old, new in pairs):
            then, now = ([content.weight for content in contents] for contents in (saved, present))
            return weights, f"was {then}, and is now {now}"
        if all(old.spec == new.spec for old, new in pairs if not new.has_rows_of(old)):
            return files, "; ".join(new.change_since(old) for old, new in pairs if not new.has_rows_of(old))
    return files, f"was {', '.join(content.spec for content in saved)}, and is now {present_specs}"


def _yaml(value: bool | int) -> str:
    return str(value).lower()
