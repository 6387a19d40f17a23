"""The rollout engine of separate pools: weights go from the learners to the samplers.

The share of a replica that is lost is sampled by another one that has the same weights, in the same
batches, so that the results are the same; the lost one is replaced before the next weights are
sent. A call that may stop before its end returns such a share as it was begun instead; episodes
that the lost replica has kept begin again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trigon.distributed.engines import require_weights_of_workers
from trigon.distributed.rollout_engine import WorkersRolloutEngine
from trigon.distributed.sampler_pool import SamplerPool
from trigon.distributed.weight_transfer import JOIN_SECONDS, TransferAddress
from trigon.distributed.worker import Worker
from trigon.distributed.worker_group import POLL_SECONDS, Call, WorkerGroup, wait_for_any
from trigon.errors import LostSamplersError, TransferError
from trigon.metrics import Metrics, Sum, merge
from trigon.rollout.protocol import Until
from trigon.types import Completion, Phase, Prompt, WeightsHandle

_JOIN_PHASE = "weights (connecting learners and samplers)"
_JOIN_DEADLINE_SECONDS = 2 * JOIN_SECONDS
_MAX_FAILED_JOINS = 3

_AFTER_FAILURE_SECONDS = 2 * JOIN_SECONDS
"""How long replicas of a transfer that has failed may take to notice; then they count as lost."""


class SamplersRolloutEngine(WorkersRolloutEngine):
    """Samples on workers that do not train. Implements RolloutEngine.

    Completions may also be sampled after awake(), with the weights that were sent last; replicas
    that are lost then are not replaced before the next awake(). A call without until then raises
    LostSamplersError if all are lost: the learners may not have the weights any more. One with
    until returns all prompts as they were begun.
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

        loopback: all workers are on one node. phase: in which replicas are replaced, or get
        weights. sends_rows: with the prompts, for environments. shares_homes: deal groups with
        images to the learners as if these had sampled them, so that a run has the numbers of one
        whose workers do both.
        """
        super().__init__(learners, replica_size=samplers.replica_size, sends_rows=sends_rows)
        self._first = learners.part(0, 1)
        self._samplers = samplers
        self._loopback = loopback
        self._phase = phase
        self._shares_homes = shares_homes
        self._versions: dict[int, int] = {}  # of the weights that each replica has
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
        if self._is_awake and not self._with_weights():
            self._sync(self._version)
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
        is_lost = self._samplers.is_lost(replica, call)
        if not is_lost:
            self._samplers.complete_call()
        return is_lost

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
        # The deadline of the learners is later than that of the replicas.
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
        version: of the weights that the replicas receive. None: they only connect, and can be used
        when that has failed.
        Raises: the error of the learners that is no consequence of a replica's; an error of a
        replica by which it is not lost.
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
