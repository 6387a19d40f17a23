"""The rollout engine of separate pools, and its replicas, which are replaced when they are lost.

Weights go from the learners to the samplers. Each replica is a worker group of its own, so that the
loss of one leaves the others as they are. Its share of the prompts is sampled by another one that
has the same weights, in the same batches, so that the results are the same; the lost one is
replaced before the next weights are sent. A call that may stop before its end returns such a share
as it was begun instead; episodes that the lost replica has kept begin again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from trigon.distributed.engines import require_weights_of_workers
from trigon.distributed.rollout_engine import Share, WorkersRolloutEngine
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
from trigon.types import Completion, Phase, Prompt, SamplingParams, WeightsHandle

Result = TypeVar("Result")

MAX_REPLACEMENTS = 3
"""How often lost replicas are replaced until completions are sampled; then the run ends."""

REPLACE = "restart rollout engine: replace lost samplers"
"""The name of the phase in which replicas are replaced, which may take as long as a start."""

LOST = (LostWorkerError, RolloutError, TransferError)
"""Errors of a replica after which another one in its place may work."""

_JOIN_PHASE = "weights (connecting learners and samplers)"
_JOIN_DEADLINE_SECONDS = 2 * JOIN_SECONDS
_MAX_FAILED_JOINS = 3

_AFTER_FAILURE_SECONDS = 2 * JOIN_SECONDS
"""How long replicas of a transfer that has failed may take to notice; then they count as lost."""


class SamplersRolloutEngine(WorkersRolloutEngine):
    """Samples on workers that do not train. Implements RolloutEngine.

    Completions may also be sampled after awake(), with the weights that were sent last; replicas
    that are lost then are not replaced before the next awake(). If all are lost, a call then raises
    LostSamplersError: the learners may not have the weights any more. One that may be interrupted
    returns all prompts as they were begun.
    """

    def __init__(
        self,
        learners: WorkerGroup,
        samplers: SamplerPool,
        *,
        loopback: bool,
        phase: Phase,
        sends_rows: bool = False,
        shares_homes: bool = True,
    ) -> None:
        """Connect two pools.

        loopback: all workers are on one node. phase: times the replacement of replicas, and weight
        syncs. sends_rows: send the rows of prompts too, for environments. shares_homes: deal groups
        with images to the learners as if these had sampled them, so that a run has the same numbers
        as a run whose workers do both.
        """
        super().__init__(learners, replica_size=samplers.replica_size, sends_rows=sends_rows)
        self._first = learners.part(0, 1)
        self._samplers = samplers
        self._loopback = loopback
        self._phase = phase
        self._shares_homes = shares_homes
        self._versions: dict[int, int] = {}  # the policy version that each replica has
        self._joined: dict[int, WorkerGroup] = {}  # the workers of each replica when it was connected last
        self._members: tuple[int, ...] = ()  # replicas of the transfer group
        self._is_awake = False
        self._sent_bytes = 0  # since the last pop_metrics

    @property
    def num_replicas(self) -> int:
        """See RolloutEngine."""
        return self._samplers.size

    @contextmanager
    def awake(self, weights: WeightsHandle, *, version: int) -> Iterator[None]:
        """See RolloutEngine. The engines stay awake afterwards, with these weights."""
        require_weights_of_workers(weights)
        self._version = version
        self._learners.processed.forget()
        self._learners.call(Worker.start_step, phase="weights").result()
        self._sync(version)
        self._is_awake = True
        try:
            yield
        finally:
            self._is_awake = False

    def pop_metrics(self) -> Metrics:
        """See RolloutEngine."""
        samplers = self._samplers
        popped = samplers.call(Worker.pop_rollout_metrics, phase="rollout")
        traffic = [group.traffic.pop_metrics() for group in samplers.groups if group is not None]
        sent, self._sent_bytes = self._sent_bytes, 0
        return merge(
            *popped,
            *traffic,
            {
                "rollout/engine_restarts": Sum(float(samplers.pop_replaced())),
                "moved/weights_sent_bytes": Sum(float(sent)),
            },
        )

    # -- the replicas --

    def _replicas(self, until: Until | None) -> Sequence[int]:
        if until is None:
            return range(self.num_replicas)
        if self._is_awake or until.interruption is None:
            return self._able()
        return self._with_weights()

    def _able(self) -> Sequence[int]:
        while not (able := self._with_weights()):
            if not self._is_awake:
                raise LostSamplersError("all samplers were lost while they sampled")
            self._sync(self._version)
        return able

    def _with_weights(self) -> list[int]:
        """Return the replicas that have the weights that were asked for last."""
        return [replica for replica in self._samplers.alive if self._versions.get(replica) == self._version]

    def _group(self, replica: int) -> WorkerGroup:
        return self._samplers.group(replica)

    def _is_lost(self, replica: int, call: Call[Any]) -> bool:
        return self._samplers.is_lost(replica, call)

    def _sample(
        self,
        shares: dict[int, Share],
        sampling: SamplingParams,
        until: Until | None,
        advance: Callable[[int | None], None],
    ) -> list[Share]:
        lost = super()._sample(shares, sampling, until, advance)
        # The probes of a parity check are so few that replicas sample them that fail in each step.
        if not sampling.one_turn and any(share.indices and share not in lost for share in shares.values()):
            self._samplers.complete_call()
        return lost

    def _note_home(self, parts: Sequence[Prompt | Completion], replica: int, *, num_ranks: int) -> None:
        if self._shares_homes:
            super()._note_home(parts, replica, num_ranks=num_ranks)

    # -- weights --

    def _sync(self, version: int) -> None:
        """Replace the replicas that are lost, and send the weights to those that lack them."""
        samplers, num_failed_joins = self._samplers, 0
        while True:
            samplers.replace_lost(self._phase)
            self._versions = {replica: held for replica, held in self._versions.items() if self._is_same(replica)}
            samplers.call(Worker.start_step, phase="weights")  # also finds those that have died since they were used
            if len(samplers.alive) < samplers.size:
                continue
            missing = tuple(replica for replica in samplers.alive if self._versions.get(replica) != version)
            if not missing:
                return
            is_joined = missing == self._members and all(map(self._is_same, missing))
            if not is_joined and not self._join(missing):
                num_failed_joins += 1
                if num_failed_joins > _MAX_FAILED_JOINS:
                    raise TransferError(
                        f"{_JOIN_PHASE} failed {num_failed_joins} times: the processes cannot reach each other; "
                        "see docs/distributed.md, network problems"
                    )
                continue
            if self._send(missing, version):
                return

    def _is_same(self, replica: int) -> bool:
        """Return whether a replica has the workers that were connected last."""
        return replica in self._joined and self._joined[replica] is self._samplers.groups[replica]

    def _join(self, members: tuple[int, ...]) -> bool:
        """Connect the first learner with these replicas. Returns: whether all are connected."""
        self._leave()
        groups = {replica: self._samplers.group(replica) for replica in members}
        self._joined |= groups
        size = 1 + sum(len(group.workers) for group in groups.values())
        [(host, port)] = self._first.call(
            Worker.listen_for_transfer, self._loopback, phase=_JOIN_PHASE, max_deadline_seconds=_JOIN_DEADLINE_SECONDS
        ).result()
        # A broadcast waits longer than the driver, whose error names the rank at fault.
        timeout = self._learners.deadline_seconds + JOIN_SECONDS
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

        calls, first_rank = {}, 1
        for replica, group in groups.items():
            calls[replica] = join(group, first_rank, _JOIN_DEADLINE_SECONDS)
            first_rank += len(group.workers)
        # Rank 0, the learner's, waits longer than the replicas.
        learning = join(self._first, 0, _JOIN_DEADLINE_SECONDS + _AFTER_FAILURE_SECONDS)
        if self._together(calls, learning, version=None):
            self._members = members
        return self._members == members

    def _leave(self) -> None:
        """Let the first learner leave the transfer group; a broadcast there ends with an error."""
        self._members = ()
        self._first.call(Worker.leave_transfer, phase=_JOIN_PHASE, max_deadline_seconds=_JOIN_DEADLINE_SECONDS).result()

    def _send(self, members: tuple[int, ...], version: int) -> bool:
        """Send the weights to these replicas. Returns: whether all of them have them."""
        calls = {
            replica: self._samplers.group(replica).call(Worker.receive_weights, version, phase="weights")
            for replica in members
        }
        # The deadline of the learners is later than the replicas' deadline.
        deadline = self._learners.deadline_seconds + 2 * JOIN_SECONDS
        sending = self._learners.call(Worker.send_weights, phase="weights", min_deadline_seconds=deadline)
        self._together(calls, sending, version=version)
        if sending.error is None:
            self._sent_bytes += sum(sending.result())
        return all(self._versions.get(replica) == version for replica in members)

    def _together(self, calls: Mapping[int, Call[None]], learning: Call[Any], *, version: int | None) -> bool:
        """Wait for calls of replicas and of learners. Returns: whether none of them has failed.

        When a replica is lost, the learner that may wait for it leaves the transfer group, and with
        it all other replicas.
        version: the policy version that the replicas receive. None: they only connect, and can be
        used when that has failed.
        Raises: an error of the learners that no error of a replica has caused; an error of a
        replica by which the replica is not lost.
        """
        try:
            with self._phase("weights") as advance:
                pending, failed_at, is_learning = dict(calls), math.inf, True
                while pending or is_learning:
                    self._samplers.require_open()
                    wait_for_any([*pending.values(), learning], POLL_SECONDS)
                    advance(None)
                    is_learning = not learning.poll()
                    if self._have_failed(pending, learning, version) and failed_at == math.inf:
                        failed_at = time.monotonic()
                        self._leave()
                    if time.monotonic() > failed_at + _AFTER_FAILURE_SECONDS:
                        for replica in pending:
                            error = TransferError(f"sampler {replica} still waits for weights after a failure")
                            self._samplers.lose(replica, error)
                return failed_at == math.inf
        except BaseException:
            self._members = ()
            # For the learner that may wait for replicas; that it has failed replaces no error.
            self._first.call(Worker.leave_transfer, phase=_JOIN_PHASE)
            raise

    def _have_failed(self, pending: dict[int, Call[None]], learning: Call[Any], version: int | None) -> bool:
        """Remove the calls of replicas that have ended, and return whether any call has failed."""
        failed = False
        for replica in [replica for replica, call in pending.items() if call.poll()]:
            call = pending.pop(replica)
            is_usable = version is None and isinstance(call.error, TransferError)
            if is_usable or self._samplers.is_lost(replica, call):
                failed = True
            elif version is not None:
                # Also if another one fails: it would not take part if they were sent again.
                self._versions[replica] = version
        if learning.error is not None:
            if not isinstance(learning.error, TransferError):
                raise learning.error
            failed = True
        return failed


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

    groups: the workers of each replica; None: lost, and not replaced yet. replica_size: the number
    of ranks of a replica.
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
        self.replica_size = len(groups[0].workers)
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
                advice = self._same_command.from_last("continues from the last checkpoint")
                raise WorkerError(
                    f"{losses}\nSamplers were replaced {self._num_rounds} times since completions were last sampled, "
                    f"and have failed again. To continue: {advice}. docs/troubleshooting.md (The rollout engine fails) "
                    "says what to look for"
                )
            self._num_rounds += 1
            self.warn(f"{losses}. Sampler {', '.join(map(str, lost))} is replaced, and the run continues")
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
        """Note that a step's completions were sampled: replicas may be replaced as often again."""
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
