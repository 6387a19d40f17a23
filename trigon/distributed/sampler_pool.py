"""The workers that only sample: copies of the model, of one or several ranks, replaced when lost.

Runs in the driver. Each copy (replica) is a worker group of its own, so that the loss of one leaves
the others as they are. Does not depend on what is sampled, and with which weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from trigon.distributed.worker import Worker
from trigon.distributed.worker_group import POLL_SECONDS, Call, WorkerGroup
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
    ) -> None:
        """Take over replicas that are started.

        starts: starts others in their places. warn: called with a message when one is replaced.
        """
        self._starts = starts
        self._replica_size = len(groups[0].workers)
        self.groups: list[WorkerGroup | None] = list(groups)
        self.warn = warn
        self._same_command = same_command
        self._open: Callable[[WorkerGroup], Call[Any]] | None = None
        self._num_rounds = 0  # of replacements since completions were last sampled
        self._num_replaced = 0  # replicas since the last pop_replaced
        self._losses: list[str] = []  # what was lost and is not replaced yet
        self._starting: list[WorkerGroup] = []  # in place of lost ones
        self._threads = ThreadPoolExecutor(len(groups), thread_name_prefix="samplers")  # that start replicas
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

    def open(self, open_engines: Callable[[WorkerGroup], Call[Any]]) -> None:
        """Build the engines of all replicas, now and of those that are started later."""
        self._open = open_engines
        for call in [open_engines(self.group(number)) for number in self.alive]:
            call.result()

    def call(self, method: Callable[[Worker], Result], *, phase: str) -> list[Result]:
        """Call a method of all workers, and return the results of the replicas not lost by it.

        Raises: the error of a call if it is none of LOST.
        """
        results = []
        for number, call in [(number, self.group(number).call(method, phase=phase)) for number in self.alive]:
            call.wait()
            results += [] if self.is_lost(number, call) else call.result()
        return results

    def is_lost(self, replica: int, call: Call[Any]) -> bool:
        """Return whether a call that ended has lost its replica, and note it. Raises: as call."""
        if call.error is None:
            return False
        if not isinstance(call.error, LOST):
            raise call.error
        self.lose(replica, call.error)
        return True

    def lose(self, replica: int, error: BaseException) -> None:
        """Note that a replica cannot be used any more, and end its workers."""
        group, self.groups[replica] = self.groups[replica], None
        if group is None:
            return
        self._losses.append(first_line(error))
        self._starts.end(group)

    def replace_lost(self, phase: Phase) -> None:
        """Start others in place of the replicas that are lost, in a phase of the run.

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
            with phase(REPLACE) as advance:
                futures = {number: self._threads.submit(self._start, number) for number in lost}
                pending = set(futures.values())
                while pending:
                    self.require_open()
                    advance(None)
                    _, pending = wait(pending, POLL_SECONDS)
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

    def _start(self, replica: int) -> WorkerGroup:
        """Start the workers of a replica, with engines; close() ends it."""
        group = self._starts.start(replica)
        self._starting.append(group)
        try:
            self.require_open()
            if self._open is not None:
                self._open(group).result()
        except BaseException:
            self._starts.end(group)
            raise
        finally:
            self._starting.remove(group)
        return group
