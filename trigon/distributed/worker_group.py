"""All workers as the driver sees them: calls to all of them at once, and what happens when one of them fails.

Knows which rank does what, since when, and how much was sent to it. Refuses to know what the calls are about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

from trigon.distributed.cluster import Placed
from trigon.distributed.worker import Heartbeat
from trigon.errors import TrigonError, WorkerError
from trigon.metrics import Metric, Sum

_LOOK_SECONDS = 1.0
"""How often a worker is asked how it is while it works."""

DISK_SECONDS = 3600.0
"""How long what waits for disks and hubs may take, at least: to load models, to write or read a checkpoint."""

_GRACE_SECONDS = 5.0
"""How long after a first failure others are still heard: the rank that died is what matters, not those that noticed."""


@dataclass(slots=True)
class _Failure:
    """What became of one rank. at: which failure it was, from 0."""

    rank: int
    error: Exception
    at: int


@dataclass(slots=True)
class Traffic:
    """The bytes that went through the driver and Ray's object store, by phase, since they were last told."""

    _sent: dict[str, int] = field(default_factory=dict)
    _received: dict[str, int] = field(default_factory=dict)

    def count(self, phase: str, *, sent: int = 0, received: int = 0) -> None:
        """Add bytes to those of a phase."""
        self._sent[phase] = self._sent.get(phase, 0) + sent
        self._received[phase] = self._received.get(phase, 0) + received

    def pop_metrics(self) -> dict[str, Metric]:
        """Return the bytes so far as metrics, and begin anew."""
        metrics: dict[str, Metric] = {
            "moved/sent_bytes": Sum(float(sum(self._sent.values()))),
            "moved/received_bytes": Sum(float(sum(self._received.values()))),
        }
        for phase, num_bytes in self._sent.items():
            metrics[f"moved/{phase}_bytes"] = Sum(float(num_bytes + self._received[phase]))
        self._sent.clear()
        self._received.clear()
        return metrics


def _look(actor: Any, _: Placed) -> Any:
    return actor.heartbeat.remote()


@dataclass(slots=True)
class WorkerGroup:
    """The workers of a run.

    device: what each worker has. deadline_seconds: how long one call may take before the run is ended.
    traffic: what was sent and received.
    """

    workers: Sequence[Placed]
    device: Literal["cpu", "cuda"]
    deadline_seconds: float
    traffic: Traffic = field(default_factory=Traffic)
    _heartbeats: dict[int, Heartbeat] = field(default_factory=dict)

    def call_all(
        self,
        call: Callable[[Any, Placed], Any],
        *,
        phase: str,
        look: Callable[[Any, Placed], Any] = _look,
        on_look: Callable[[int, Heartbeat], None] | None = None,
        at_least_seconds: float = 0.0,
    ) -> list[Any]:
        """Make one call to each worker at once, and return their results by rank.

        call: given a Ray actor and its place, makes the call: `lambda actor, _: actor.sleep.remote()`.
        look: made to each worker now and then while the workers work, returns its Vitals. on_look: hears them, with the
        rank, before that worker is looked at again. What was not heard when the call ends is not heard any more.
        at_least_seconds: how long this call may take even where deadline_seconds is less.
        Raises: the worker's own TrigonError, named by its rank; WorkerError for anything else that ends one: an error,
        a crash, a kill, or a deadline passed.
        """
        pending = {call(worker.handle, worker): worker for worker in self.workers}
        results: dict[int, Any] = {}
        failures: list[_Failure] = []
        deadline = max(self.deadline_seconds, at_least_seconds)
        started = time.monotonic()
        looks: dict[Any, int] = {}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_LOOK_SECONDS)
            _take(done, pending, results, failures)
            if failures:
                self._give_grace(pending, results, failures)
                raise self._explained(failures, phase)
            if pending and time.monotonic() - started > deadline:
                raise self._hung(list(pending.values()), phase, deadline)
            for rank, heartbeat in self._seen(looks):
                if on_look is not None:
                    on_look(rank, heartbeat)
            for worker in pending.values():
                if worker.rank not in looks.values():
                    looks[look(worker.handle, worker)] = worker.rank
        return [results[worker.rank] for worker in self.workers]

    def sent(self, payload: bytes, *, phase: str) -> Any:
        """Put what workers are to be given into the object store, count it, and return Ray's reference to it."""
        self.traffic.count(phase, sent=len(payload))
        return ray.put(payload)

    def received(self, payload: bytes, *, phase: str) -> bytes:
        """Count what a worker gave back, and return it."""
        self.traffic.count(phase, received=len(payload))
        return payload

    def _seen(self, looks: dict[Any, int]) -> list[tuple[int, Heartbeat]]:
        """Return (rank, how it is) for those that have answered. looks: the open questions; they are taken out."""
        answered, _ = ray.wait(list(looks), num_returns=len(looks), timeout=0) if looks else ([], [])
        found = []
        for reference in answered:
            rank = looks.pop(reference)
            try:
                self._heartbeats[rank] = ray.get(reference)
            except (RayActorError, RayTaskError):  # the call itself will tell, and better
                continue
            found.append((rank, self._heartbeats[rank]))
        return found

    def _give_grace(self, pending: dict[Any, Placed], results: dict[int, Any], failures: list[_Failure]) -> None:
        """Hear the others out for a while: a rank that lost a peer often says so before Ray says that the peer died."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while pending and (left := deadline - time.monotonic()) > 0:
            if any(isinstance(failure.error, RayActorError) for failure in failures):
                return
            done, _ = ray.wait(list(pending), num_returns=1, timeout=left)
            _take(done, pending, results, failures)

    def _explained(self, failures: Sequence[_Failure], phase: str) -> TrigonError:
        """Return the one error that says what happened: a death before an error of ours, that before any other."""

        def weight(failure: _Failure) -> tuple[int, int]:
            if isinstance(failure.error, RayActorError | OutOfMemoryError):
                return 0, failure.at
            return (1 if isinstance(_cause(failure.error), TrigonError) else 2), failure.at

        first = min(failures, key=weight)
        cause = _cause(first.error)
        where = f"rank {first.rank} on {self._host(first.rank)}, in {phase}"
        if isinstance(cause, TrigonError):
            return type(cause)(f"{where}: {cause}")
        others = sorted(failure.rank for failure in failures if failure is not first)
        also = f"\nFailing with it: {', '.join(f'rank {rank}' for rank in others)}" if others else ""
        if isinstance(first.error, RayTaskError):
            return WorkerError(f"{where}: raised an error{self._memory(first.rank)}:\n{first.error}{also}")
        return WorkerError(
            f"{where}: the process died{self._memory(first.rank)}: {_death(first.error)}{also}\n"
            "Everything else was stopped; the same command goes on from the last checkpoint"
        )

    def _hung(self, workers: Sequence[Placed], phase: str, deadline: float) -> WorkerError:
        """Return what can be said of workers that do not come to an end."""
        questions = {worker.rank: worker.handle.heartbeat.remote(with_stack=True) for worker in workers}
        lines = []
        for rank, question in questions.items():
            try:
                heartbeat = ray.get(question, timeout=_GRACE_SECONDS)
                self._heartbeats[rank] = heartbeat
                doing = f"is in\n{heartbeat.stack}"
            except (GetTimeoutError, RayActorError, RayTaskError):
                doing = "does not answer: it is stopped, or stuck outside of Python"
            lines.append(f"rank {rank} on {self._host(rank)}{self._memory(rank)} {doing}")
        return WorkerError(
            f"{phase} was not done after {deadline:g} s (trainer.worker_timeout_seconds); ranks "
            f"{sorted(questions)} of {len(self.workers)} hang:\n" + "\n".join(lines)
        )

    def _host(self, rank: int) -> str:
        worker = self.workers[rank]
        return f"{worker.host} (process {worker.pid})"

    def _memory(self, rank: int) -> str:
        heartbeat = self._heartbeats.get(rank)
        if heartbeat is None:
            return ""
        now, most = (num_bytes / 2**30 for num_bytes in (heartbeat.memory_bytes, heartbeat.max_memory_bytes))
        return f", last seen with {now:.1f} GiB (at most {most:.1f})"


def _take(done: Sequence[Any], pending: dict[Any, Placed], results: dict[int, Any], failures: list[_Failure]) -> None:
    """Move calls that have ended from pending to results, by rank, or to failures."""
    for reference in done:
        worker = pending.pop(reference)
        try:
            results[worker.rank] = ray.get(reference)
        except (RayActorError, RayTaskError, OutOfMemoryError) as error:
            failures.append(_Failure(worker.rank, error, len(failures)))


def _cause(error: Exception) -> BaseException:
    """Return what a worker raised, out of Ray's wrapping."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error


def _death(error: Exception) -> str:
    """Return what Ray knows of a death, in a line."""
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return f"Ray killed it, since the node ran out of memory. {text[:1000]}"
    if "connection error code 2" in text:  # Ray's way of saying that the process is gone and did not say why
        return (
            "killed by a signal that cannot be caught (SIGKILL, by which the kernel frees memory, or somebody's hand), "
            "or crashed; a crash writes its stack to the log above"
        )
    return text[:1000]
