"""Calls to all workers at once, with deadlines and error reports.

Runs in the driver, and counts the bytes that go through it. Does not depend on what is computed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, TypeVarTuple, overload

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from trigon.distributed.cluster import WorkerHandle
from trigon.distributed.messages import Message, StoredFiles, unpack
from trigon.distributed.worker import Heartbeat, HeartbeatRequest, Worker
from trigon.errors import LostWorkerError, PeerError, TrigonError, WorkerError
from trigon.metrics import Metric, Sum
from trigon.system.hangs import dump_stacks, register_stacks
from trigon.system.processes import ProcessTree
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

_HEARTBEAT_SECONDS = 1.0
"""Interval at which busy workers are asked for a heartbeat."""

_GRACE_SECONDS = 5.0
"""How long to wait for further failures after the first one.

The root cause is often reported last: a rank that lost its peer may fail before Ray notices that
the peer died.
"""


class HeartbeatListener(Protocol):
    """Requests and receives the heartbeats of the workers while they execute a call."""

    def request(self, rank: int) -> HeartbeatRequest:
        """Return what the next heartbeat of this rank should include."""
        ...

    def receive(self, rank: int, heartbeat: Heartbeat) -> None:
        """Process a heartbeat. Called by the thread that made the call."""
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


@dataclass(slots=True)
class Traffic:
    """The bytes sent and received through the driver, by phase, since the last pop_metrics()."""

    _sent: dict[str, int] = field(default_factory=dict)
    _received: dict[str, int] = field(default_factory=dict)

    def count(self, phase: str, *, sent: int = 0, received: int = 0) -> None:
        """Add bytes to the counts of a phase."""
        self._sent[phase] = self._sent.get(phase, 0) + sent
        self._received[phase] = self._received.get(phase, 0) + received

    def pop_metrics(self) -> dict[str, Metric]:
        """Return the counts as metrics, and reset them."""
        metrics: dict[str, Metric] = {
            "moved/sent_bytes": Sum(float(sum(self._sent.values()))),
            "moved/received_bytes": Sum(float(sum(self._received.values()))),
        }
        for phase, num_bytes in self._sent.items():
            metrics[f"moved/{phase}_bytes"] = Sum(float(num_bytes + self._received[phase]))
        self._sent.clear()
        self._received.clear()
        return metrics


@dataclass(slots=True)
class _Failure:
    """The error of one rank. order: 0 for the failure that the driver saw first."""

    rank: int
    error: Exception
    order: int


@dataclass(slots=True)
class WorkerGroup:
    """The workers of a run, in the order of their ranks.

    device: the kind of device that each worker has. deadline_seconds: time limit of one call.
    stacks_file: where the stacks of all processes on this machine are written if a call hangs.
    same_command: goes on with the run when a worker has died.
    role: what its workers are in messages, where a run has several groups. is_closed: set from
    another thread, ends a call that waits.
    files: the media files that messages to the workers refer to.
    processed: which workers have the pixels of which prompts; updated by those who send groups.
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
    _heartbeats: dict[int, Heartbeat] = field(default_factory=dict)

    @overload
    def call_all(
        self,
        method: Callable[[W, *Arguments], Result],
        *arguments: *Arguments,
        phase: str,
        min_deadline_seconds: float = 0.0,
        max_deadline_seconds: float = math.inf,
    ) -> list[Result]: ...

    @overload
    def call_all(
        self,
        method: Callable[[W, First, *Arguments], Result],
        *arguments: *Arguments,
        per_rank: Sequence[First],
        phase: str,
        listener: HeartbeatListener | None = None,
        min_deadline_seconds: float = 0.0,
        max_deadline_seconds: float = math.inf,
    ) -> list[Result]: ...

    def call_all(
        self,
        method: Callable[..., Any],
        *arguments: *Arguments,
        per_rank: Sequence[Any] | None = None,
        phase: str,
        listener: HeartbeatListener | None = None,
        min_deadline_seconds: float = 0.0,
        max_deadline_seconds: float = math.inf,
    ) -> list[Any]:
        """Call a method of Worker on all ranks at once, and return the results by rank.

            worker_group.call_all(Worker.wake, version, phase="weights")
            worker_group.call_all(Worker.step, per_rank=payloads, phase="update")

        Args:
            method: looked up on the Ray actors by its name.
            arguments: the same for all ranks; after the value of per_rank, if there is one.
            per_rank: the method's first argument, one value for each rank. Ray replaces a reference
                from put() by its message.
            phase: the name of the call in metrics and errors.
            listener: requests and receives heartbeats during the call. Heartbeats that have not
                been received when the call ends are dropped.
            min_deadline_seconds: the deadline, if deadline_seconds is smaller.
            max_deadline_seconds: the deadline, if deadline_seconds is larger.
        Raises: the worker's own TrigonError with its rank prepended; WorkerError for any other
        error, for a process that died, and for a deadline that passed.
        """
        pending = self._submit(method, arguments, per_rank)
        results: dict[int, Any] = {}
        failures: list[_Failure] = []
        deadline = min(max(self.deadline_seconds, min_deadline_seconds), max_deadline_seconds)
        started = time.monotonic()
        heartbeats: dict[Any, int] = {}  # requested and not yet received: Ray's reference -> rank
        while pending:
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_HEARTBEAT_SECONDS)
            _collect(done, pending, results, failures)
            if failures:
                self._wait_for_failures(pending, results, failures)
                raise self._root_cause(failures, phase)
            if self.is_closed:
                raise WorkerError(f"{phase} was given up, since the run ends")
            if pending and time.monotonic() - started > deadline:
                raise self._deadline_error(list(pending.values()), phase, deadline)
            for rank in self._receive_heartbeats(heartbeats):
                if listener is not None:
                    listener.receive(rank, self._heartbeats[rank])
            for worker in pending.values():
                if worker.rank not in heartbeats.values():
                    request = HeartbeatRequest() if listener is None else listener.request(worker.rank)
                    heartbeats[worker.actor.heartbeat.remote(request)] = worker.rank
        return [results[worker.rank] for worker in self.workers]

    def first(self) -> WorkerGroup:
        """Return a group of the first worker alone."""
        return WorkerGroup(
            self.workers[:1],
            self.device,
            self.deadline_seconds,
            stacks_file=self.stacks_file,
            same_command=self.same_command,
            role=self.role,
        )

    def local_process_ids(self) -> list[int]:
        """Return the process ids of the workers on this machine."""
        return [worker.pid for worker in self.workers if worker.is_local]

    def submit_all(self, method: Callable[[W, *Arguments], Any], *arguments: *Arguments) -> None:
        """Queue a call of a method of Worker on all ranks, and return at once.

        It runs after the calls that are running. For cleanup while an error is raised: neither a
        busy nor a failed worker delays or replaces that error. Ray logs the errors of these calls.
        """
        self._submit(method, arguments, None)

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

    def _submit(
        self, method: Callable[..., Any], arguments: Sequence[Any], per_rank: Sequence[Any] | None
    ) -> dict[Any, WorkerHandle]:
        """Start a call on each worker. Returns: Ray's reference of each call -> its worker."""
        assert per_rank is None or len(per_rank) == len(self.workers), f"{per_rank} for {len(self.workers)} workers"
        calls = {}
        for index, worker in enumerate(self.workers):
            first = () if per_rank is None else (per_rank[index],)
            calls[getattr(worker.actor, method.__name__).remote(*first, *arguments)] = worker
        return calls

    def _receive_heartbeats(self, heartbeats: dict[Any, int]) -> list[int]:
        """Store the requested heartbeats that have arrived, and return their ranks."""
        arrived, _ = ray.wait(list(heartbeats), num_returns=len(heartbeats), timeout=0) if heartbeats else ([], [])
        ranks = []
        for reference in arrived:
            rank = heartbeats.pop(reference)
            try:
                self._heartbeats[rank] = ray.get(reference)
            except (RayActorError, RayTaskError):  # the pending call of this worker fails, too, and is reported
                continue
            ranks.append(rank)
        return ranks

    def _wait_for_failures(
        self, pending: dict[Any, WorkerHandle], results: dict[int, Any], failures: list[_Failure]
    ) -> None:
        """Collect further calls for _GRACE_SECONDS, or until Ray reports that a process died."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while pending and (left := deadline - time.monotonic()) > 0:
            if any(isinstance(failure.error, RayActorError) for failure in failures):
                return
            done, _ = ray.wait(list(pending), num_returns=1, timeout=left)
            _collect(done, pending, results, failures)

    def _root_cause(self, failures: Sequence[_Failure], phase: str) -> TrigonError:
        """Return the error to raise for the most likely root cause.

        A process that died comes before a TrigonError, a TrigonError before any other error, and
        that before a PeerError, of which another rank has the cause.
        """

        def priority(failure: _Failure) -> tuple[int, int]:
            if isinstance(failure.error, RayActorError | OutOfMemoryError):
                return 0, failure.order
            error = _unwrap(failure.error)
            return (3 if isinstance(error, PeerError) else 1 if isinstance(error, TrigonError) else 2), failure.order

        first = min(failures, key=priority)
        cause = _unwrap(first.error)
        location = f"{self._describe_rank(first.rank)}, in {phase}"
        if isinstance(cause, TrigonError):
            return type(cause)(f"{location}: {cause}")
        other_ranks = sorted(failure.rank for failure in failures if failure is not first)
        also = f"\nAlso failed: {', '.join(f'rank {rank}' for rank in other_ranks)}" if other_ranks else ""
        memory = self._describe_memory(first.rank)
        if isinstance(first.error, RayTaskError):
            return WorkerError(f"{location}: raised an error{memory}:\n{first.error}{also}")
        goes_on = f"All other workers were stopped; {self.same_command.from_last('goes on from the last checkpoint')}"
        return LostWorkerError(f"{location}: the process died{memory}: {_describe_death(first.error)}{also}\n{goes_on}")

    def _deadline_error(self, workers: Sequence[WorkerHandle], phase: str, deadline: float) -> LostWorkerError:
        """Return the error for workers that missed the deadline, with their stacks."""
        request = HeartbeatRequest(with_stack=True)
        references = {worker.rank: worker.actor.heartbeat.remote(request) for worker in workers}
        # One wait for all of them: the watchdog of the run gives the driver a minute in total.
        arrived, _ = ray.wait(list(references.values()), num_returns=len(references), timeout=_GRACE_SECONDS)
        lines = []
        for rank, reference in references.items():
            state = "does not respond: its process is stopped, or blocked outside of Python"
            if reference in arrived:
                with suppress(RayActorError, RayTaskError):
                    heartbeat = ray.get(reference)
                    self._heartbeats[rank] = heartbeat
                    state = f"is in\n{heartbeat.stack}"
            lines.append(f"{self._describe_rank(rank)}{self._describe_memory(rank)} {state}")
        limit = " (trainer.worker_timeout_seconds)" if deadline == self.deadline_seconds else ""
        return LostWorkerError(
            f"{phase} was not done after {deadline:g} s{limit}; {self.role and self.role + ' '}ranks "
            f"{sorted(references)} of {len(self.workers)} hang:\n" + "\n".join(lines) + self._write_stacks()
        )

    def _write_stacks(self) -> str:
        """Write the stacks of all processes of the run on this machine; return where they are."""
        if self.stacks_file is None:
            return ""
        register_stacks()  # of the driver, if it has no watchdog
        pids = [os.getpid(), *(worker.pid for worker in self.workers if worker.is_local)]
        text = dump_stacks(list(dict.fromkeys([*pids, *ProcessTree().below(*pids)])))
        try:
            self.stacks_file.write_text(text, encoding="utf-8")
        except OSError as error:
            return f"\nThe stacks of all processes cannot be written to {self.stacks_file} ({error}):\n{text}"
        return f"\nThe stacks of all processes on this machine are in {self.stacks_file}"

    def _describe_rank(self, rank: int) -> str:
        worker = self.workers[rank]
        return f"{self.role} rank {rank} on {worker.host} (process {worker.pid})".lstrip()

    def _describe_memory(self, rank: int) -> str:
        heartbeat = self._heartbeats.get(rank)
        if heartbeat is None:
            return ""
        current, peak = format_bytes(heartbeat.memory_bytes), format_bytes(heartbeat.max_memory_bytes)
        return f", last seen with {current} (at most {peak})"


def _collect(
    done: Sequence[Any], pending: dict[Any, WorkerHandle], results: dict[int, Any], failures: list[_Failure]
) -> None:
    """Move finished calls from `pending` to `results`, by rank, or to `failures`."""
    for reference in done:
        worker = pending.pop(reference)
        try:
            results[worker.rank] = ray.get(reference)
        except (RayActorError, RayTaskError, OutOfMemoryError) as error:
            failures.append(_Failure(worker.rank, error, len(failures)))


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
