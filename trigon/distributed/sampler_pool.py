"""The workers that only sample: copies of the model, of one or several ranks, replaced when lost.

Runs in the driver. Each copy (replica) is a worker group of its own, so that the loss of one leaves
the others as they are. Does not depend on what is sampled, and with which weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from trigon.distributed.worker_group import WorkerGroup
from trigon.errors import LostWorkerError, RolloutError, TransferError, TrigonError, WorkerError, first_line
from trigon.system.stopping import SAME_COMMAND, SameCommand
from trigon.types import Phase

Result = TypeVar("Result")

MAX_REPLACEMENTS = 3
"""How often lost replicas are replaced until completions are sampled; then the run ends."""

REPLACE = "restart rollout engine: replace lost samplers"
"""The name of the phase in which replicas are replaced, which may take as long as a start."""

LOST = (LostWorkerError, RolloutError, TransferError)
"""Errors of a replica after which another one in its place may work."""

POLL_SECONDS = 0.2
"""How often the driver looks whether the run ends while it waits for replicas."""


def _ignore(_: object) -> None:
    """Do nothing."""


@contextmanager
def _no_phase(name: str, *, total: int | None = None) -> Iterator[Callable[[int | None], None]]:
    """Show nothing. See Phase."""
    yield _ignore


class StartReplica(Protocol):
    """Starts the workers of a replica, which join their process group; or ends them."""

    def start(self, replica: int) -> WorkerGroup:
        """Start the workers of a replica in its place. Raises: WorkerError if they do not start."""
        ...

    def end(self, group: WorkerGroup) -> None:
        """Kill the workers of a replica."""
        ...


class SamplerPool:
    """The replicas of a run, by number.

    groups: the workers of each replica; None: lost, and not replaced yet.
    """

    def __init__(
        self,
        starts: StartReplica,
        groups: Sequence[WorkerGroup],
        *,
        warn: Callable[[str], object],
        same_command: SameCommand = SAME_COMMAND,
        phase: Phase | None = None,
    ) -> None:
        """Take over replicas that are started.

        starts: starts others in their places. warn: called with a message when one is replaced.
        phase: the context in which replicas are replaced, or get weights. None: shown nowhere.
        """
        self._starts = starts
        self._replica_size = len(groups[0].workers)
        self.groups: list[WorkerGroup | None] = list(groups)
        self.warn = warn
        self.phase: Phase = _no_phase if phase is None else phase
        self._same_command = same_command
        self._open: Callable[[WorkerGroup], object] | None = None
        self._num_rounds = 0  # of replacements since completions were last sampled
        self._num_replaced = 0  # replicas since the last pop_replaced
        self._losses: list[str] = []  # what was lost and is not replaced yet
        self._starting: list[WorkerGroup] = []  # in place of lost ones
        self._threads = ThreadPoolExecutor(1 + len(groups), thread_name_prefix="samplers")
        self._is_closed = False

    @property
    def size(self) -> int:
        """The number of replicas, lost ones included."""
        return len(self.groups)

    @property
    def replica_size(self) -> int:
        """The number of ranks of a replica."""
        return self._replica_size

    @property
    def is_closed(self) -> bool:
        """Whether the run ends."""
        return self._is_closed

    @property
    def alive(self) -> list[int]:
        """The numbers of the replicas that are not lost."""
        return [number for number, group in enumerate(self.groups) if group is not None]

    def group(self, replica: int) -> WorkerGroup:
        """Return the workers of a replica that is not lost."""
        group = self.groups[replica]
        assert group is not None, f"sampler {replica} is lost"
        return group

    def local_process_ids(self) -> list[int]:
        """Return the process ids of the workers on this machine."""
        return [pid for group in self.groups if group is not None for pid in group.local_process_ids()]

    def open(self, open_engines: Callable[[WorkerGroup], object]) -> None:
        """Build the engines of all replicas, now and of those that are started later."""
        self._open = open_engines
        for future in self.submit(
            {number: partial(open_engines, self.group(number)) for number in self.alive}
        ).values():
            future.result()

    def submit(self, calls: Mapping[int, Callable[[], Result]]) -> dict[int, Future[Result]]:
        """Make calls of replicas, each in a thread of its own."""
        return {number: self._threads.submit(call) for number, call in calls.items()}

    def call(self, calls: Mapping[int, Callable[[], Result]]) -> dict[int, Result]:
        """Make calls of replicas at the same time, and return the results of those not lost by it.

        Raises: the error of a call if it is none of LOST.
        """
        futures = self.submit(calls)
        self._wait_for_all(futures.values())
        return {number: future.result() for number, future in futures.items() if not self.check(number, future)}

    def submit_one(self, call: Callable[[], Result]) -> Future[Result]:
        """Make one more call, of other workers, in a thread of its own."""
        return self._threads.submit(call)

    def wait_for_any(self, futures: Iterable[Future[Any]]) -> None:
        """Wait until one of these calls has ended, or for a moment."""
        wait([future for future in futures if not future.done()], POLL_SECONDS, return_when=FIRST_COMPLETED)

    def check(self, replica: int, future: Future[Any]) -> bool:
        """Return whether a call that ended has lost its replica, and note it."""
        error = future.exception()
        if error is None:
            return False
        if not isinstance(error, LOST):
            raise error
        self.lose(replica, error)
        return True

    def lose(self, replica: int, error: BaseException) -> None:
        """Note that a replica cannot be used any more, and end its workers."""
        group, self.groups[replica] = self.groups[replica], None
        if group is None:
            return
        self._losses.append(first_line(error))
        self._starts.end(group)

    def replace_lost(self) -> None:
        """Start others in place of the replicas that are lost.

        Raises: WorkerError if that was done too often since the last completed step.
        """
        while lost := [number for number, group in enumerate(self.groups) if group is None]:
            losses, self._losses = "; ".join(self._losses), []
            if self._num_rounds >= MAX_REPLACEMENTS:
                goes_on = self._same_command.from_last("goes on from the last checkpoint")
                raise WorkerError(
                    f"{losses}\nSamplers were replaced {self._num_rounds} times since completions were last sampled, "
                    f"and have failed again. To go on: {goes_on}. docs/troubleshooting.md (The rollout engine fails) "
                    "says what to look for"
                )
            self._num_rounds += 1
            self.warn(f"{losses}. Sampler {', '.join(map(str, lost))} is replaced, and the run goes on")
            with self.phase(REPLACE) as advance:
                futures = self.submit({number: partial(self._start, number) for number in lost})
                self._wait_for_all(futures.values(), advance)
            for number, future in futures.items():
                error = future.exception()
                # Also errors of another kind: the memory of a GPU whose process has ended just now
                # may not be free yet.
                if isinstance(error, TrigonError):
                    self._losses.append(first_line(error))
                else:
                    self.groups[number] = future.result()
                    self._num_replaced += 1

    def complete_call(self) -> None:
        """Note that completions were sampled: replicas may be replaced as often again."""
        self._num_rounds = 0

    def pop_replaced(self) -> int:
        """Return how many replicas were replaced since the last call."""
        replaced, self._num_replaced = self._num_replaced, 0
        return replaced

    def require_open(self) -> None:
        """Raise WorkerError if the run ends."""
        if self._is_closed:
            raise WorkerError("sampling was given up, since the run ends")

    def close(self) -> None:
        """End the calls that wait. To be called before the workers are killed."""
        self._is_closed = True
        for group in [*filter(None, self.groups), *self._starting]:
            group.is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _wait_for_all(self, futures: Iterable[Future[Any]], advance: Callable[[None], object] = _ignore) -> None:
        """Wait until all these calls have ended. advance: called with None meanwhile."""
        pending = set(futures)
        while pending:
            self.require_open()
            advance(None)
            _, pending = wait(pending, POLL_SECONDS)

    def _start(self, replica: int) -> WorkerGroup:
        """Start the workers of a replica, with engines; close() ends it."""
        group = self._starts.start(replica)
        self._starting.append(group)
        try:
            self.require_open()
            if self._open is not None:
                self._open(group)
        except BaseException:
            self._starts.end(group)
            raise
        finally:
            self._starting.remove(group)
        return group
