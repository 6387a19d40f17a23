"""The replicas of separate pools, which are replaced when they are lost.

Weights go from the learners to the samplers. Each replica is a worker group of its own, so that the
loss of one leaves the others as they are. Its share of the prompts is sampled by another one that
has the same weights, in the same batches, so that the results are the same; the lost one is
replaced before the next weights are sent. A call that may stop before its end returns such a share
as it was begun instead; episodes that the lost replica has kept begin again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, TypeVar

from trigon.distributed.cluster import GIVEN_UP
from trigon.distributed.weight_transfer import JOIN_SECONDS, TransferAddress
from trigon.distributed.worker import Worker
from trigon.distributed.worker_group import POLL_SECONDS, Call, WorkerGroup, wait_for_any
from trigon.errors import (
    LostSamplersError,
    LostWorkerError,
    RolloutError,
    TransferError,
    TrigonError,
    WorkerError,
    first_line,
)
from trigon.metrics import Metrics, Sum, merge
from trigon.rollout.protocol import Until
from trigon.system.stopping import SAME_COMMAND, SameCommand
from trigon.types import Phase

Result = TypeVar("Result")

MAX_REPLACEMENTS = 3
"""How often lost replicas are replaced until further completions are sampled; then the run ends."""

REPLACE = "restart rollout engine: replace lost samplers"
"""The name of the phase in which replicas are replaced, which may take as long as a start."""

LOST = (LostWorkerError, RolloutError, TransferError)
"""Errors of a replica after which another one in its place may work."""

_JOIN_PHASE = "weights (connecting learners and samplers)"
_JOIN_DEADLINE_SECONDS = 2 * JOIN_SECONDS
_MAX_FAILED_JOINS = 3

_AFTER_FAILURE_SECONDS = 2 * JOIN_SECONDS
"""How long replicas of a transfer that has failed may take to notice; then they count as lost."""


@dataclass(slots=True, eq=False)
class SamplerReplicas:
    """Replicas on workers that do not train, and are sent weights; used as LearnerReplicas are.

    Completions may also be sampled after awake(), with the weights that were sent last; replicas
    that are lost then are not replaced before the next awake(). If all are lost, a call then raises
    LostSamplersError: the learners may not have the weights any more. One that may be interrupted
    returns all prompts as they were begun.

    loopback: all workers are on one node. phase: times the replacement of replicas, and weight
    syncs. shares_homes: deal groups with images to the learners as if these had sampled them, so
    that a run has the same numbers as a run whose workers do both.
    """

    learners: WorkerGroup
    samplers: SamplerPool
    _: KW_ONLY
    loopback: bool
    phase: Phase
    shares_homes: bool = True
    _version: int = -1  # of the weights that were asked for last
    _connected: list[Replica] = field(default_factory=list)  # with the first learner, in its transfer group
    _is_awake: bool = False
    _sent_bytes: int = 0  # since the last pop_metrics

    @property
    def size(self) -> int:
        """See LearnerReplicas."""
        return self.samplers.size

    @contextmanager
    def awake(self, version: int) -> Iterator[None]:
        """See LearnerReplicas. The engines stay awake afterwards, with these weights."""
        self._version = version
        self.learners.processed.forget()
        self.learners.call(Worker.start_step, phase="weights").result()
        self._sync()
        self._is_awake = True
        try:
            yield
        finally:
            self._is_awake = False

    def choose(self, until: Until | None) -> Sequence[int]:
        """See LearnerReplicas."""
        if until is None:
            return range(self.size)
        if self._is_awake or until.interruption is None:
            return self.find_able()
        return self._with_weights()

    def find_able(self) -> Sequence[int]:
        """See LearnerReplicas."""
        while not (able := self._with_weights()):
            if not self._is_awake:
                raise LostSamplersError("all samplers were lost while they sampled")
            self._sync()
        return able

    def group(self, replica: int) -> WorkerGroup:
        """See LearnerReplicas."""
        return self.samplers.group(replica)

    def is_lost(self, replica: int, call: Call[Any]) -> bool:
        """See LearnerReplicas."""
        return self.samplers.is_lost(replica, call)

    def homes(self, replica: int) -> Sequence[int]:
        """See LearnerReplicas. More replicas than there are learners get them in turn."""
        size = self.samplers.replica_size
        ranks = range(replica * size, (replica + 1) * size) if self.shares_homes else ()
        return [rank % len(self.learners.workers) for rank in ranks]

    def note_sampled(self) -> None:
        """See LearnerReplicas."""
        self.samplers.note_sampled()

    def pop_metrics(self) -> Metrics:
        """See LearnerReplicas."""
        samplers = self.samplers
        popped = samplers.call(Worker.pop_rollout_metrics, phase="rollout")
        traffic = [replica.workers.traffic.pop_metrics() for replica in samplers.alive]
        sent, self._sent_bytes = self._sent_bytes, 0
        return merge(
            *popped,
            *traffic,
            {
                "rollout/engine_restarts": Sum(float(samplers.pop_replaced())),
                "moved/weights_sent_bytes": Sum(float(sent)),
            },
        )

    @property
    def _first(self) -> WorkerGroup:
        """The learner that sends the weights."""
        return self.learners.part(0, 1)

    def _with_weights(self) -> list[int]:
        """Return the replicas that have the weights that were asked for last."""
        return [replica.number for replica in self.samplers.alive if replica.version == self._version]

    # -- weights --

    def _sync(self) -> None:
        """Replace the replicas that are lost, and send the weights to those that lack them."""
        samplers, num_failed = self.samplers, 0  # num_failed: attempts to connect
        while True:
            samplers.replace_lost(self.phase)
            samplers.call(Worker.start_step, phase="weights")  # also finds those that have died since they were used
            if len(samplers.alive) < samplers.size:
                continue
            missing = [replica for replica in samplers.alive if replica.version != self._version]
            if not missing:
                return
            if missing != self._connected and not self._connect(missing):
                num_failed += 1
                if num_failed > _MAX_FAILED_JOINS:
                    raise TransferError(
                        f"{_JOIN_PHASE} failed {num_failed} times: the processes cannot reach each other; "
                        "see docs/distributed.md, network problems"
                    )
                continue
            if self._send(missing):
                return

    def _connect(self, members: Sequence[Replica]) -> bool:
        """Connect the first learner with these replicas. Returns: whether all are connected."""
        self._leave()
        size = 1 + sum(len(replica.workers.workers) for replica in members)
        [(host, port)] = self._first.call(
            Worker.listen_for_transfer, self.loopback, phase=_JOIN_PHASE, max_deadline_seconds=_JOIN_DEADLINE_SECONDS
        ).result()
        # A broadcast waits longer than the driver, whose error names the rank at fault.
        timeout = self.learners.deadline_seconds + JOIN_SECONDS
        address = TransferAddress(host, port, size)

        def join(group: WorkerGroup, first_rank: int, deadline: float) -> Call[None]:
            ranks = range(first_rank, first_rank + len(group.workers))
            return group.call(
                Worker.join_transfer,
                address,
                timeout,
                per_rank=ranks,
                phase=_JOIN_PHASE,
                max_deadline_seconds=deadline,
            )

        calls, first_rank = [], 1
        for replica in members:
            calls.append((replica, join(replica.workers, first_rank, _JOIN_DEADLINE_SECONDS)))
            first_rank += len(replica.workers.workers)
        # Rank 0, the learner's, waits longer than the replicas.
        learning = join(self._first, 0, _JOIN_DEADLINE_SECONDS + _AFTER_FAILURE_SECONDS)
        # A replica that could not connect can be used, unlike one that did not get its weights.
        if not self._wait_for(calls, learning, is_usable_after=TransferError):
            return False
        self._connected = list(members)
        return True

    def _leave(self) -> None:
        """Let the first learner leave the transfer group; a broadcast there ends with an error."""
        self._connected = []
        self._first.call(Worker.leave_transfer, phase=_JOIN_PHASE, max_deadline_seconds=_JOIN_DEADLINE_SECONDS).result()

    def _send(self, members: Sequence[Replica]) -> bool:
        """Send the weights to these replicas. Returns: whether all of them have them."""
        calls = [
            (replica, replica.workers.call(Worker.receive_weights, self._version, phase="weights"))
            for replica in members
        ]
        # The deadline of the learners is later than the replicas' deadline.
        deadline = self.learners.deadline_seconds + 2 * JOIN_SECONDS
        sending = self.learners.call(Worker.send_weights, phase="weights", min_deadline_seconds=deadline)
        self._wait_for(calls, sending, is_usable_after=None)
        if sending.error is None:
            self._sent_bytes += sum(sending.result())
        for replica, call in calls:
            if call.error is None:
                # Also if another one failed: it would not take part if they were sent again.
                replica.version = self._version
        return all(replica.version == self._version for replica in members)

    def _wait_for(
        self,
        calls: Sequence[tuple[Replica, Call[None]]],
        learning: Call[Any],
        *,
        is_usable_after: type[TrigonError] | None,
    ) -> bool:
        """Wait for calls of replicas and of learners. Returns: whether none of them has failed.

        When a replica is lost, the learner that may wait for it leaves the transfer group, and with
        it all other replicas.
        is_usable_after: an error by which a replica is not lost; None: there is none.
        Raises: an error of the learners that no error of a replica has caused; an error of a
        replica by which the replica is not lost.
        """
        try:
            with self.phase("weights") as advance:
                pending, failed_at, is_learning = dict(calls), math.inf, True
                while pending or is_learning:
                    self.samplers.require_open()
                    wait_for_any([*pending.values(), learning], POLL_SECONDS)
                    advance(None)
                    is_learning, has_failed = not learning.poll(), False
                    for replica in [replica for replica, call in pending.items() if call.poll()]:
                        call = pending.pop(replica)
                        is_usable = is_usable_after is not None and isinstance(call.error, is_usable_after)
                        has_failed |= is_usable or self.samplers.is_lost(replica.number, call)
                    if learning.error is not None and not isinstance(learning.error, TransferError):
                        raise learning.error
                    has_failed |= learning.error is not None
                    if has_failed and failed_at == math.inf:
                        failed_at = time.monotonic()
                        self._leave()
                    if time.monotonic() > failed_at + _AFTER_FAILURE_SECONDS:
                        for replica in pending:
                            error = TransferError(f"sampler {replica.number} still waits for weights after a failure")
                            self.samplers.lose(replica.number, error)
                return failed_at == math.inf
        except BaseException:
            self._connected = []
            # For the learner that may wait for replicas; that it has failed replaces no error.
            self._first.call(Worker.leave_transfer, phase=_JOIN_PHASE)
            raise


@dataclass(slots=True, eq=False)
class Replica:
    """Workers that sample together; others in their place are another replica of the same number.

    version: the policy version of their weights; None: they have none.
    """

    number: int
    workers: WorkerGroup
    version: int | None = None


class StartReplica(Protocol):
    """Starts the workers of a replica, which join their process group; or ends them."""

    def start(self, replica: int) -> WorkerGroup:
        """Start the workers of a replica in its place. Raises: WorkerError if they do not start."""
        ...

    def end(self, group: WorkerGroup) -> None:
        """Kill the workers of a replica."""
        ...

    def give_up(self) -> None:
        """End the starts in progress, each with a WorkerError."""
        ...


class SamplerPool:
    """The replicas of a run.

    size: their number, lost ones included. replica_size: the number of ranks of each.
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
        self.size, self.replica_size = len(groups), len(groups[0].workers)
        self._replicas = {number: Replica(number, group) for number, group in enumerate(groups)}  # without lost ones
        self._warn = warn
        self._same_command = same_command
        self._open: Callable[[WorkerGroup], Call[Any]] | None = None
        self._num_rounds = 0  # of replacements since completions were last sampled
        self._num_replaced = 0  # replicas since the last pop_replaced
        self._losses: list[str] = []  # what was lost and is not replaced yet
        self._starting: list[WorkerGroup] = []  # in place of lost ones
        self._threads = ThreadPoolExecutor(len(groups), thread_name_prefix="samplers")  # that start replicas
        self._is_closed = False

    @property
    def alive(self) -> list[Replica]:
        """The replicas that are not lost, by number."""
        # A copy first: the thread that samples may lose one meanwhile.
        return sorted(self._replicas.values(), key=lambda replica: replica.number)

    def group(self, replica: int) -> WorkerGroup:
        """Return the workers of a replica that is not lost."""
        return self._replicas[replica].workers

    def local_process_ids(self) -> list[int]:
        """Return the process ids of the workers on this machine."""
        return [pid for replica in self.alive for pid in replica.workers.local_process_ids()]

    def open(self, open_engines: Callable[[WorkerGroup], Call[Any]]) -> None:
        """Build the engines of all replicas, now and of those that are started later."""
        self._open = open_engines
        for call in [open_engines(replica.workers) for replica in self.alive]:
            call.result()

    def call(self, method: Callable[[Worker], Result], *, phase: str) -> list[Result]:
        """Call a method of all workers, and return the results of the replicas not lost by it.

        Raises: the error of a call if it is none of LOST.
        """
        results = []
        for number, call in [(each.number, each.workers.call(method, phase=phase)) for each in self.alive]:
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
        lost = self._replicas.pop(replica, None)
        if lost is not None:
            self._losses.append(first_line(error))
            self._starts.end(lost.workers)

    def replace_lost(self, phase: Phase) -> None:
        """Start others in place of the replicas that are lost, in a phase of the run.

        Raises: WorkerError if that was done too often since completions were last sampled.
        """
        while lost := [number for number in range(self.size) if number not in self._replicas]:
            losses, self._losses = "; ".join(self._losses), []
            if self._num_rounds >= MAX_REPLACEMENTS:
                advice = self._same_command.from_last("continues from the last checkpoint")
                raise WorkerError(
                    f"{losses}\nSamplers were replaced {self._num_rounds} times since completions were last sampled, "
                    f"and have failed again. To continue: {advice}. docs/troubleshooting.md (The rollout engine fails) "
                    "says what to look for"
                )
            self._num_rounds += 1
            self._warn(f"{losses}. Sampler {', '.join(map(str, lost))} is replaced, and the run continues")
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
                    self._replicas[number] = Replica(number, future.result())
                    self._num_replaced += 1

    def note_sampled(self) -> None:
        """Note that completions of a step were sampled: replicas may be replaced as often again."""
        self._num_rounds = 0

    def pop_replaced(self) -> int:
        """Return how many replicas were replaced since the last call."""
        replaced, self._num_replaced = self._num_replaced, 0
        return replaced

    def require_open(self) -> None:
        """Raise WorkerError if the run ends."""
        if self._is_closed:
            raise WorkerError(GIVEN_UP)

    def close(self) -> None:
        """End the calls that wait, and replacements. To be called before the workers are killed."""
        self._is_closed = True
        for group in [*(replica.workers for replica in self.alive), *self._starting]:
            group.is_closed = True
        self._starts.give_up()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _start(self, replica: int) -> WorkerGroup:
        """Start the workers of a replica, with engines; close() ends the start."""
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
