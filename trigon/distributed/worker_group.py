"""Calls of all workers at once, with deadlines and error reports.

Runs in the driver, and counts the bytes that go through it. One thread can wait for the calls of
several groups. Does not depend on what is computed.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, TypeVarTuple, overload

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from trigon.distributed.cluster import WorkerHandle
from trigon.distributed.messages import Message, StoredFiles, unpack
from trigon.distributed.worker import Heartbeat, Worker
from trigon.errors import LostWorkerError, PeerError, TrigonError, WorkerError
from trigon.metrics import Metrics, Sum
from trigon.system.hangs import dump_stacks, register_stacks
from trigon.system.processes import descendants
from trigon.system.stopping import SAME_COMMAND, SameCommand
from trigon.system.terminal import format_bytes
from trigon.types import Completion, EncodedMedia, Prompt, RolloutGroup, TrainGroup, TrainSequence, parts_of

Part = Prompt | Completion | TrainSequence

W = TypeVar("W", bound=Worker)
First = TypeVar("First")
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

DISK_SECONDS = 3600.0
"""Minimum deadline of calls that load models, or write or read a checkpoint."""

POLL_SECONDS = 0.2
"""How often the driver looks for other things while it waits for calls of several groups."""

_HEARTBEAT_SECONDS = 1.0
"""Interval at which busy workers are asked for a heartbeat."""

_GRACE_SECONDS = 5.0
"""How long to wait for further failures after the first one.

The root cause is often reported last: a rank that lost its peer may fail before Ray notices that
the peer died.
"""


class HeartbeatListener(Protocol):
    """Requests and receives the heartbeats of the workers while they execute a call."""

    def request(self) -> tuple[int, int]:
        """Return the arguments of the next Worker.heartbeat."""
        ...

    def receive(self, heartbeat: Heartbeat) -> bool:
        """Process a heartbeat, and return whether the call has made progress since the last one.

        Called by the thread that waits for the call.
        """
        ...


class ProcessedMedia:
    """The ranks that have processed the media of each prompt and completion since the weight sync.

    The driver sends a group to a worker that has its pixels where it can. What they have is
    forgotten at each weight sync, so that what a step computes does not depend on the steps before
    it: a run that is resumed has not seen them.
    """

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, ...], set[int]] = {}  # by the hashes of a part's files

    def ranks_of(self, group: RolloutGroup | TrainGroup) -> Collection[int]:
        """Return the ranks that have all pixels of a group; none for a group without media."""
        media = [part.vision.hashes for part in parts_of(group) if isinstance(part.vision, EncodedMedia)]
        return set.intersection(*(self._ranks.get(hashes, set()) for hashes in media)) if media else ()

    def add(self, parts: Iterable[Part], ranks: Iterable[int]) -> None:
        """Record that these ranks have these prompts or completions, whose media they process."""
        ranks = tuple(ranks)
        for part in parts:
            if isinstance(part.vision, EncodedMedia):
                self._ranks.setdefault(part.vision.hashes, set()).update(ranks)

    def forget(self) -> None:
        """Forget everything."""
        self._ranks.clear()


class Traffic:
    """The bytes sent and received through the driver, also by phase, since the last pop_metrics."""

    def __init__(self) -> None:
        self._moved: Counter[str] = Counter()

    def count(self, phase: str, *, sent: int = 0, received: int = 0) -> None:
        """Add bytes that were moved in a phase."""
        self._moved.update({"sent": sent, "received": received, phase: sent + received})

    def pop_metrics(self) -> Metrics:
        """Return the counts as metrics, and reset them."""
        moved, self._moved = self._moved, Counter()
        return {f"moved/{name}_bytes": Sum(float(moved[name])) for name in ("sent", "received", *moved)}


@dataclass(slots=True)
class WorkerGroup:
    """The workers of a run, in the order of their ranks.

    device: the kind of device that each worker has. deadline_seconds: time limit of one call.
    stacks_file: where the stacks of all processes on this machine are written if a call hangs.
    same_command: the command that continues the run when a worker has died.
    role: what its workers are in messages, where a run has several groups. is_closed: set from
    another thread, ends a call that waits.
    files: the media files that messages to the workers refer to.
    processed: which workers have the pixels of which prompts; updated where groups are sent.
    last_heartbeats: the last one of each rank.
    """

    workers: Sequence[WorkerHandle]
    device: Literal["cpu", "cuda"]
    deadline_seconds: float
    stacks_file: Path | None = None
    same_command: SameCommand = SAME_COMMAND
    role: str = ""
    is_closed: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    files: StoredFiles = field(default_factory=StoredFiles)
    processed: ProcessedMedia = field(default_factory=ProcessedMedia)
    last_heartbeats: dict[int, Heartbeat] = field(default_factory=dict)

    @overload
    def call(
        self,
        method: Callable[[W, *Arguments], Result],
        *arguments: *Arguments,
        phase: str,
        min_deadline_seconds: float = 0.0,
        max_deadline_seconds: float = math.inf,
    ) -> Call[Result]: ...

    @overload
    def call(
        self,
        method: Callable[[W, First, *Arguments], Result],
        *arguments: *Arguments,
        per_rank: Sequence[First],
        phase: str,
        listener: HeartbeatListener | None = None,
        min_deadline_seconds: float = 0.0,
        max_deadline_seconds: float = math.inf,
    ) -> Call[Result]: ...

    def call(
        self,
        method: Callable[..., Any],
        *arguments: *Arguments,
        per_rank: Sequence[Any] | None = None,
        phase: str,
        listener: HeartbeatListener | None = None,
        min_deadline_seconds: float = 0.0,
        max_deadline_seconds: float = math.inf,
    ) -> Call[Any]:
        """Call a method of Worker on all ranks at once, and return the call at once.

            worker_group.call(Worker.wake, version, phase="weights").result()
            worker_group.call(Worker.step, per_rank=payloads, phase="update").result()

        It runs after the calls that are running. A call whose result is not waited for, such as a
        cleanup, neither delays nor replaces an error; Ray logs its errors.

        Args:
            method: looked up on the Ray actors by its name.
            arguments: the same for all ranks; after the value of per_rank, if there is one.
            per_rank: the method's first argument, one value for each rank. Ray replaces a reference
                from put() by its message.
            phase: the name of the call in metrics and errors.
            listener: requests and receives heartbeats during the call. Heartbeats that have not
                been received when the call ends are dropped. The deadline is relative to the last
                one that has shown progress: a call that samples all the time takes several steps.
            min_deadline_seconds: the deadline, if deadline_seconds is smaller.
            max_deadline_seconds: the deadline, if deadline_seconds is larger.
        """
        assert per_rank is None or len(per_rank) == len(self.workers), f"{per_rank} for {len(self.workers)} workers"
        pending = {}
        for index, worker in enumerate(self.workers):
            first = () if per_rank is None else (per_rank[index],)
            pending[getattr(worker.actor, method.__name__).remote(*first, *arguments)] = worker
        deadline = min(max(self.deadline_seconds, min_deadline_seconds), max_deadline_seconds)
        now = time.monotonic()
        return Call(self, pending, phase, deadline, listener, now, now)

    def part(self, first: int, end: int) -> WorkerGroup:
        """Return the group of some consecutive workers, whose messages count as of this group."""
        return replace(self, workers=self.workers[first:end])

    def local_process_ids(self) -> list[int]:
        """Return the process ids of the workers on this machine."""
        return [worker.pid for worker in self.workers if worker.is_local]

    def put(self, message: Message, *, phase: str) -> Any:
        """Put a message into Ray's object store, and count its bytes.

        Returns: Ray's reference; a method called with it receives the message.
        """
        stored, num_bytes = self.files.store(message)
        self.traffic.count(phase, sent=num_bytes)
        return ray.put(stored)

    def receive(self, message: Message, *, phase: str) -> Any:
        """Count the bytes of a message that a worker has returned, and return its value."""
        self.traffic.count(phase, received=message.num_bytes)
        return unpack(message)


@dataclass(eq=False)
class Call(Generic[Result]):
    """A method that runs on all workers of a group; see WorkerGroup.call.

    error: why it has failed; None: it has not. That is the worker's own TrigonError with its rank
    prepended; WorkerError for any other error, for a process that died, and for a deadline that
    passed.
    """

    _group: WorkerGroup
    _pending: dict[Any, WorkerHandle]  # by Ray's reference of the method's call
    _phase: str
    _deadline_seconds: float
    _listener: HeartbeatListener | None
    _waits_since: float  # for the end of the call, or its next progress
    _asked_at: float  # when heartbeats were last asked for
    error: TrigonError | None = None
    _results: dict[int, Result] = field(default_factory=dict)
    _failures: list[tuple[WorkerHandle, Exception]] = field(default_factory=list)  # as the driver saw them
    _failed_at: float = math.inf
    _has_progress: bool = False
    _heartbeats: dict[Any, WorkerHandle] = field(default_factory=dict)  # not received yet, by Ray's reference

    def wait(self) -> None:
        """Wait until the call has ended."""
        while not self.poll():
            ray.wait(list(self._pending), num_returns=len(self._pending), timeout=_HEARTBEAT_SECONDS)

    def result(self) -> list[Result]:
        """Wait until the call has ended, and return the results by rank. Raises: its error."""
        self.wait()
        if self.error is not None:
            raise self.error
        return [self._results[worker.rank] for worker in self._group.workers]

    def poll(self) -> bool:
        """Process what has arrived, and return whether the call has ended.

        To be called about once a second until it has.
        """
        if self.error is not None or not self._pending:
            return True
        now = time.monotonic()
        self._collect()
        if self._failures:
            self._failed_at = min(self._failed_at, now)
            has_cause = any(isinstance(error, RayActorError) for _, error in self._failures)
            if has_cause or not self._pending or now > self._failed_at + _GRACE_SECONDS:
                self.error = self._root_cause()
        elif self._pending and self._group.is_closed:
            self.error = WorkerError(f"{self._phase} was given up, since the run ends")
        elif self._pending and now > self._waits_since + self._deadline_seconds:
            self.error = self._deadline_error()
        elif self._pending and now >= self._asked_at + _HEARTBEAT_SECONDS:
            self._asked_at = now
            self._exchange_heartbeats()
        return self.error is not None or not self._pending

    def _collect(self) -> None:
        """Move calls of workers that have ended to the results or to the failures."""
        done, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for reference in done:
            worker = self._pending.pop(reference)
            try:
                self._results[worker.rank] = ray.get(reference)
            except (RayActorError, RayTaskError, OutOfMemoryError) as error:
                self._failures.append((worker, error))

    def _exchange_heartbeats(self) -> None:
        """Receive the heartbeats that have arrived, and request one of each worker that is busy."""
        heartbeats, listener = self._heartbeats, self._listener
        arrived, _ = ray.wait(list(heartbeats), num_returns=len(heartbeats), timeout=0) if heartbeats else ([], [])
        for reference in arrived:
            rank = heartbeats.pop(reference).rank
            try:
                heartbeat = self._group.last_heartbeats[rank] = ray.get(reference)
            except (RayActorError, RayTaskError):  # the pending call of this worker fails, too, and is reported
                continue
            if listener is not None and listener.receive(heartbeat):
                self._waits_since, self._has_progress = time.monotonic(), True
        asked = {worker.rank for worker in heartbeats.values()}
        for worker in self._pending.values():
            if worker.rank not in asked:
                request = (0, 0) if listener is None else listener.request()
                heartbeats[worker.actor.heartbeat.remote(*request)] = worker

    def _root_cause(self) -> TrigonError:
        """Return the error to raise for the most likely root cause.

        A process that died comes before a TrigonError, a TrigonError before any other error, and
        any other error before a PeerError, whose cause another rank has.
        """

        def priority(failure: tuple[WorkerHandle, Exception]) -> int:
            if isinstance(failure[1], RayActorError | OutOfMemoryError):
                return 0
            error = _unwrap(failure[1])
            return 3 if isinstance(error, PeerError) else 1 if isinstance(error, TrigonError) else 2

        worker, error = min(self._failures, key=priority)  # of equal ones, the one that the driver saw first
        cause = _unwrap(error)
        location = f"{self._describe(worker)}, in {self._phase}"
        if isinstance(cause, TrigonError):
            return type(cause)(f"{location}: {cause}")
        other_ranks = sorted(other.rank for other, _ in self._failures if other is not worker)
        also = f"\nAlso failed: {', '.join(f'rank {rank}' for rank in other_ranks)}" if other_ranks else ""
        memory = self._describe_memory(worker.rank)
        if isinstance(error, RayTaskError):
            return WorkerError(f"{location}: raised an error{memory}:\n{error}{also}")
        advice = self._group.same_command.from_last("continues from the last checkpoint")
        return LostWorkerError(
            f"{location}: the process died{memory}: {_describe_death(error)}{also}\n"
            f"All other workers were stopped; {advice}"
        )

    def _deadline_error(self) -> LostWorkerError:
        """Return the error for workers that missed the deadline, with their stacks."""
        group, limit = self._group, self._deadline_seconds
        late = {worker.actor.stack.remote(): worker for worker in self._pending.values()}
        # One wait for all of them: the watchdog of the run gives the driver a minute in total.
        arrived, _ = ray.wait(list(late), num_returns=len(late), timeout=_GRACE_SECONDS)
        lines = []
        for reference, worker in late.items():
            state = "does not respond: its process is stopped, or blocked outside of Python"
            if reference in arrived:
                with suppress(RayActorError, RayTaskError):
                    state = f"is in\n{ray.get(reference)}"
            lines.append(f"{self._describe(worker)}{self._describe_memory(worker.rank)} {state}")
        what = f"made no progress for {limit:g} s" if self._has_progress else f"was not done after {limit:g} s"
        option = " (trainer.worker_timeout_seconds)" if limit == group.deadline_seconds else ""
        return LostWorkerError(
            f"{self._phase} {what}{option}; {group.role and group.role + ' '}ranks "
            f"{sorted(worker.rank for worker in late.values())} of {len(group.workers)} hang:\n"
            + "\n".join(lines)
            + self._write_stacks()
        )

    def _write_stacks(self) -> str:
        """Write the stacks of all processes of the run on this machine; return where they are."""
        file = self._group.stacks_file
        if file is None:
            return ""
        register_stacks()  # of the driver, if it has no watchdog
        pids = [os.getpid(), *self._group.local_process_ids()]
        text = dump_stacks(list(dict.fromkeys([*pids, *descendants(*pids)])))
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            return f"\nThe stacks of all processes cannot be written to {file} ({error}):\n{text}"
        return f"\nThe stacks of all processes on this machine are in {file}"

    def _describe(self, worker: WorkerHandle) -> str:
        return f"{self._group.role} rank {worker.rank} on {worker.host} (process {worker.pid})".lstrip()

    def _describe_memory(self, rank: int) -> str:
        heartbeat = self._group.last_heartbeats.get(rank)
        if heartbeat is None:
            return ""
        current, peak = format_bytes(heartbeat.memory_bytes), format_bytes(heartbeat.max_memory_bytes)
        return f", last seen with {current} (at most {peak})"


def wait_for_any(calls: Iterable[Call[Any]], seconds: float) -> None:
    """Wait until a worker has ended its part of one of these calls, for at most n seconds."""
    if pending := [reference for call in calls for reference in call._pending]:
        ray.wait(pending, timeout=seconds)


def _unwrap(error: Exception) -> BaseException:
    """Return the exception that the worker raised, if Ray has wrapped one."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error


def _describe_death(error: Exception) -> str:
    """Return what Ray knows about the end of a process, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return f"Ray killed it because the node ran out of memory. {text[:1000]}"
    if "connection error code 2" in text:  # Ray's message for a process that ended without notice
        return (
            "killed by a signal that cannot be caught (SIGKILL), for example by the out-of-memory killer, or crashed; "
            "a crash writes its stack to the log above"
        )
    return text[:1000]
