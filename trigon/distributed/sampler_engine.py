"""The rollout engine of separate pools: weights go from the learners to the samplers.

Prompts are dealt to the replicas, a share to each (engines.deal_prompts). The share of a replica
that is lost is sampled by another one that has the same weights, in the same batches, so that the
results are the same; the lost one is replaced before the next weights are sent. A call that may
stop before its end returns such a share as it was begun instead; episodes that the lost replica has
kept begin again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue

from trigon.distributed.engines import WorkersRolloutEngine, WorkerWeights, deal_prompts
from trigon.distributed.sampler_pool import POLL_SECONDS, SamplerPool
from trigon.distributed.weight_transfer import JOIN_SECONDS, TransferAddress
from trigon.distributed.worker import Worker
from trigon.distributed.worker_group import WorkerGroup
from trigon.errors import EngineError, LostSamplersError, TransferError
from trigon.metrics import Metrics, Sum, merge
from trigon.rollout.protocol import OnGroup, Until
from trigon.types import Completion, Prompt, SamplingParams, WeightsHandle

_JOIN_PHASE = "weights (connecting learners and samplers)"
_JOIN_DEADLINE_SECONDS = 2 * JOIN_SECONDS
_MAX_FAILED_JOINS = 3

_AFTER_FAILURE_SECONDS = 2 * JOIN_SECONDS
"""How long replicas of a transfer that has failed may take to notice; then they count as lost."""


class SamplersRolloutEngine:
    """Samples on workers that do not train. Implements RolloutEngine.

    Completions may also be sampled after awake(), with the weights that were sent last; replicas
    that are lost then are not replaced before the next awake().
    """

    def __init__(
        self,
        learners: WorkerGroup,
        samplers: SamplerPool,
        *,
        loopback: bool,
        sends_rows: bool = False,
        shares_homes: bool = True,
    ) -> None:
        """Connect two pools.

        loopback: all workers are on one node. sends_rows: with the prompts, for environments.
        shares_homes: deal groups with images to the learners as if these had sampled them, so that
        a run has the numbers of one whose workers do both.
        """
        self._learners = learners
        self._first = learners.first()
        self._samplers = samplers
        self._loopback = loopback
        self._sends_rows = sends_rows
        self._shares_homes = shares_homes
        self._engines: dict[int, tuple[WorkerGroup, WorkersRolloutEngine]] = {}
        self._versions: dict[int, int] = {}  # of the weights that each replica has
        self._members: tuple[int, ...] = ()  # replicas of the transfer group
        self._version = -1  # that was asked for last
        self._is_awake = False
        self._sent_bytes = 0  # since the last pop_metrics

    @property
    def num_replicas(self) -> int:
        """See RolloutEngine."""
        return self._samplers.size

    @contextmanager
    def awake(self, weights: WeightsHandle, *, version: int) -> Iterator[None]:
        """See RolloutEngine. The engines stay awake afterwards, with these weights."""
        if not isinstance(weights, WorkerWeights):
            raise EngineError(
                f"A rollout engine of several workers cannot load {type(weights).__name__}. Give it the weights() of "
                "the train engine of the workers that learn."
            )
        self._version = version
        self._learners.processed.forget()
        self._learners.call_all(Worker.start_step, phase="weights")
        self._sync(version)
        self._is_awake = True
        try:
            yield
        finally:
            self._is_awake = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        until: Until | None = None,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See RolloutEngine.

        Without until, the prompts of a replica that is lost are sampled by another one. With until,
        which the other one may not reach for long, they are returned as they were begun, less those
        that had ended; all of them are if no replica has the weights.
        Raises: LostSamplersError if all replicas are lost without until, and the learners may not
        have the weights any more.
        """
        if until is not None and self._is_awake and not self._able():
            self._sync(self._version)
        replicas = range(self.num_replicas) if until is None else self._able()
        dealt = deal_prompts(len(prompts), sampling, until, replicas) if replicas else []
        # With until also those without prompts, which then stop the episodes that they have kept.
        shares = {
            replica: Share(replica, indices)
            for replica, indices in zip(replicas, dealt, strict=True)
            if indices or until is not None
        }
        for share in shares.values():
            self._note_home([prompts[index] for index in share.indices], share.replica, all_ranks=True)
        completions: dict[int, list[Completion]] = {}

        def receive(share: Share, index_in_share: int, found: Sequence[Completion]) -> None:
            index = share.indices[index_in_share]
            if index not in completions:
                completions[index] = self._noted(found, share.replica)
                if on_group is not None:
                    on_group(index, completions[index])

        if until is not None:
            parts = dict(zip(shares, until.of_shares([share.indices for share in shares.values()]), strict=True))
            calls = {
                replica: partial(
                    self._engine_of(replica).generate,
                    [prompts[index] for index in share.indices],
                    sampling,
                    until=parts[replica],
                )
                for replica, share in shares.items()
            }
            for replica, rows in self._sample_until(shares, calls, until, receive, on_progress).items():
                for index, row in zip(shares[replica].indices, rows, strict=True):
                    completions.setdefault(index, self._noted(row, replica))
            if completions:
                self._samplers.complete_call()
            return [
                completions.get(index, self._begun(until, index, sampling.num_completions))
                for index in range(len(prompts))
            ]

        while shares:
            able = self._able()
            if not able:
                if not self._is_awake:
                    raise LostSamplersError("all samplers were lost while they sampled")
                self._sync(self._version)
                continue
            taken = _take(shares, able)
            calls = {
                replica: partial(
                    self._engine_of(replica).generate, [prompts[index] for index in share.indices], sampling
                )
                for replica, share in taken.items()
            }
            done = self._sample(taken, calls, receive, on_progress)
            shares = {replica: share for replica, share in shares.items() if replica not in done}
        self._samplers.complete_call()
        return [completions[index] for index in range(len(prompts))]

    def pop_metrics(self) -> Metrics:
        """See RolloutEngine."""
        samplers = self._samplers
        popped = samplers.call({replica: partial(_pop_metrics, samplers.group(replica)) for replica in samplers.alive})
        traffic = [group.traffic.pop_metrics() for group in samplers.groups if group is not None]
        sent, self._sent_bytes = self._sent_bytes, 0
        return merge(
            *(metrics for of_ranks in popped.values() for metrics in of_ranks),
            *traffic,
            {
                "rollout/engine_restarts": Sum(float(samplers.pop_replaced())),
                "moved/weights_sent_bytes": Sum(float(sent)),
            },
        )

    def close(self) -> None:
        """Do nothing: the workers end with the context that started them."""

    # -- completions --

    def _able(self) -> list[int]:
        """Return the replicas that can sample: they have the weights that were asked for last."""
        return [replica for replica in self._samplers.alive if self._versions.get(replica) == self._version]

    def _sample(
        self,
        dealt: Mapping[int, Share],
        calls: Mapping[int, Callable[..., list[list[Completion]]]],
        receive: Callable[[Share, int, Sequence[Completion]], None],
        on_progress: Callable[[int | None], None] | None,
        look: Callable[[Sequence[int]], object] | None = None,
    ) -> dict[int, list[list[Completion]]]:
        """Sample a share on each of these replicas; return the result of each share that is done.

        calls: of the replicas' engines, which get on_progress and on_group. receive: called in this
        thread with groups, as is on_progress. look: now and then, with the replicas that sample.
        """
        samplers = self._samplers

        def advance(share: Share, num_more: int | None) -> None:
            if on_progress is not None:
                on_progress(share.count(num_more))

        events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        for share in dealt.values():
            share.num_done = 0
        futures = samplers.submit(
            {
                replica: partial(
                    calls[replica],
                    on_progress=partial(_put, events, advance, share),
                    on_group=partial(_put, events, receive, share),
                )
                for replica, share in dealt.items()
            }
        )
        for future in futures.values():
            future.add_done_callback(partial(_wake, events))
        pending = set(futures)
        done: dict[int, list[list[Completion]]] = {}
        while pending or not events.empty():
            samplers.require_open()
            if look is not None:
                look(sorted(pending))
            try:
                events.get(timeout=POLL_SECONDS)()
            except Empty:
                for share in dealt.values():
                    advance(share, None)
            for replica in [replica for replica in pending if futures[replica].done()]:
                pending.remove(replica)
                if not samplers.check(replica, futures[replica]):
                    done[dealt[replica].replica] = futures[replica].result()
        return done

    def _sample_until(
        self,
        shares: Mapping[int, Share],
        calls: Mapping[int, Callable[..., list[list[Completion]]]],
        until: Until,
        receive: Callable[[Share, int, Sequence[Completion]], None],
        on_progress: Callable[[int | None], None] | None,
    ) -> dict[int, list[list[Completion]]]:
        """Do what _sample does, and pass an interruption on to the replicas that sample."""
        asked = 0.0
        pending: Sequence[int] = list(shares)

        def interrupt(replicas: Sequence[int]) -> None:
            nonlocal asked, pending
            pending = replicas
            kind = until.interrupted
            if kind is None or time.monotonic() - asked < POLL_SECONDS:
                return
            asked = time.monotonic()
            for replica in replicas:
                self._engine_of(replica).interrupt(kind)

        try:
            return self._sample(shares, calls, receive, on_progress, look=interrupt)
        except BaseException:
            if not self._samplers.is_closed:  # what the others would sample to the end is not used
                for replica in pending:
                    if replica in self._samplers.alive:
                        self._engine_of(replica).interrupt("stop")
            raise

    def _noted(self, completions: Sequence[Completion], replica: int) -> list[Completion]:
        """Return completions with their replica, and note where their pixels would be."""
        noted = [replace(completion, replica=replica) for completion in completions]
        self._note_home(noted, replica, all_ranks=False)
        return noted

    def _begun(self, until: Until, index: int, num_completions: int) -> list[Completion]:
        """Return the completions of a prompt as they were before a call that has lost them."""
        begun = until.begun[index] if index < len(until.begun) else ()
        nothing = Completion(
            token_ids=(), sampling_logprobs=(), finish_reason="unfinished", text="", policy_version=self._version
        )
        return list(begun) or [nothing] * num_completions

    def _engine_of(self, replica: int) -> WorkersRolloutEngine:
        """Return the rollout engine of one replica."""
        group = self._samplers.group(replica)
        known = self._engines.get(replica)
        if known is not None and known[0] is group:
            return known[1]
        engine = WorkersRolloutEngine(group, tensor_parallel_size=len(group.workers), sends_rows=self._sends_rows)
        self._engines[replica] = group, engine
        return engine

    def _note_home(self, parts: Sequence[Prompt | Completion], replica: int, *, all_ranks: bool) -> None:
        """Note which learners would have the pixels if they had sampled these prompts.

        all_ranks: of the replica; otherwise the first one.
        """
        if not self._shares_homes:
            return
        size = len(self._learners.workers)
        replica_size = self._samplers.replica_size
        ranks = range(replica * replica_size, replica * replica_size + (replica_size if all_ranks else 1))
        self._learners.processed.add(parts, [rank % size for rank in ranks])

    # -- weights --

    def _sync(self, version: int) -> None:
        """Replace the replicas that are lost, and send the weights to those that lack them."""
        samplers, num_failed_joins = self._samplers, 0
        while True:
            samplers.replace_lost()
            self._versions = {replica: held for replica, held in self._versions.items() if self._is_same(replica)}
            # Also finds those that have died since they were used.
            samplers.call({replica: partial(_start_step, samplers.group(replica)) for replica in samplers.alive})
            if len(samplers.alive) < samplers.size:
                continue
            for group in samplers.groups:
                assert group is not None
                group.processed.forget()
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
        """Return whether a replica is the one that joined the transfer group."""
        known = self._engines.get(replica)
        return known is not None and known[0] is self._samplers.groups[replica]

    def _join(self, members: tuple[int, ...]) -> bool:
        """Connect the first learner with these replicas. Returns: whether all are connected."""
        self._leave()
        groups = {replica: self._samplers.group(replica) for replica in members}
        for replica in members:
            self._engine_of(replica)
        size = 1 + sum(len(group.workers) for group in groups.values())
        [(host, port)] = self._first.call_all(
            Worker.listen_for_transfer, self._loopback, phase=_JOIN_PHASE, max_deadline_seconds=_JOIN_DEADLINE_SECONDS
        )
        # A broadcast waits longer than the driver, whose error names the rank at fault.
        timeout = self._learners.deadline_seconds + JOIN_SECONDS
        address = TransferAddress(host, port, size)
        calls: dict[int, Callable[[], object]] = {}
        first_rank = 1
        for replica, group in groups.items():
            calls[replica] = partial(_join_group, group, first_rank, address, timeout)
            first_rank += len(group.workers)
        if self._together(calls, partial(_join_group, self._first, 0, address, timeout), version=None):
            self._members = members
        return self._members == members

    def _leave(self) -> None:
        """Let the first learner leave the transfer group; a broadcast there ends with an error."""
        self._members = ()
        self._first.call_all(Worker.leave_transfer, phase=_JOIN_PHASE, max_deadline_seconds=_JOIN_DEADLINE_SECONDS)

    def _send(self, members: tuple[int, ...], version: int) -> bool:
        """Send the weights to these replicas. Returns: whether all of them have them."""
        calls = {replica: partial(_receive, self._samplers.group(replica), version) for replica in members}
        sent: list[int] = []
        self._together(calls, partial(_send, self._learners, sent), version=version)
        self._sent_bytes += sum(sent)
        return all(self._versions.get(replica) == version for replica in members)

    def _together(
        self, calls: Mapping[int, Callable[[], object]], learner: Callable[[], object], *, version: int | None
    ) -> bool:
        """Call replicas and learners at the same time. Returns: whether none of them has failed.

        When a replica is lost, the learner that may wait for it leaves the transfer group, and with
        it all other replicas.
        version: of the weights that the replicas receive. None: they only connect, and can be used
        when that has failed.
        Raises: the error of the learners that is no consequence of a replica's; an error of a
        replica by which it is not lost.
        """
        samplers = self._samplers
        try:
            with samplers.phase("weights") as advance:
                return self._wait_together(samplers.submit(calls), samplers.submit_one(learner), version, advance)
        except BaseException:
            self._members = ()
            # For the learner that may wait for replicas; that it has failed replaces no error.
            self._first.submit_all(Worker.leave_transfer)
            raise

    def _wait_together(
        self,
        futures: Mapping[int, Future[object]],
        learning: Future[object],
        version: int | None,
        advance: Callable[[int | None], None],
    ) -> bool:
        """Wait for the calls of _together. advance: called with None while they go on."""
        samplers = self._samplers
        pending = set(futures)
        failed_at: float | None = None
        while pending or not learning.done():
            samplers.require_open()
            samplers.wait_for_any([*(futures[replica] for replica in pending), learning])
            advance(None)
            failed = False
            for replica in [replica for replica in pending if futures[replica].done()]:
                pending.remove(replica)
                is_usable = version is None and isinstance(futures[replica].exception(), TransferError)
                if is_usable or samplers.check(replica, futures[replica]):
                    failed = True
                elif version is not None:
                    # Also if another one fails: it would not take part if they were sent again.
                    self._versions[replica] = version
            if learning.done() and (error := learning.exception()) is not None:
                if not isinstance(error, TransferError):
                    raise error
                failed = True
            if failed and failed_at is None:
                failed_at = time.monotonic()
                self._leave()
            if failed_at is not None and time.monotonic() - failed_at > _AFTER_FAILURE_SECONDS:
                for replica in pending:
                    samplers.lose(replica, TransferError(f"sampler {replica} still waits for weights after a failure"))
        return failed_at is None


@dataclass(slots=True)
class Share:
    """The prompts of a call that a replica samples, or another one in its place.

    indices: of the prompts. num_done: completions, by this attempt. num_reported: by any attempt.
    """

    replica: int
    indices: Sequence[int]
    num_done: int = 0
    num_reported: int = 0

    def count(self, num_more: int | None) -> int | None:
        """Count completions that are finished; return how many were not before."""
        if num_more is None:
            return None
        self.num_done += num_more
        num_new = max(self.num_done - self.num_reported, 0)
        self.num_reported += num_new
        return num_new


def _take(shares: Mapping[int, Share], able: Sequence[int]) -> dict[int, Share]:
    """Return which replica samples which share now: its own, or that of one that cannot."""
    own = {replica: shares[replica] for replica in able if replica in shares}
    free = [replica for replica in able if replica not in own]
    others = [share for replica, share in shares.items() if replica not in own]
    return own | dict(zip(free, others, strict=False))


def _put(events: SimpleQueue[Callable[[], None]], function: Callable[..., None], *arguments: object) -> None:
    """Let the thread that reads the events call a function."""
    events.put(partial(function, *arguments))


def _wake(events: SimpleQueue[Callable[[], None]], _: object) -> None:
    """Let the thread that reads the events look which calls have ended."""
    events.put(_nothing)


def _nothing() -> None:
    """Do nothing."""


def _start_step(group: WorkerGroup) -> None:
    group.call_all(Worker.start_step, phase="weights")


def _pop_metrics(group: WorkerGroup) -> list[Metrics]:
    return group.call_all(Worker.pop_rollout_metrics, phase="rollout")


def _join_group(group: WorkerGroup, first_rank: int, address: TransferAddress, timeout_seconds: float) -> None:
    """Connect the ranks of a group. Rank 0, the learner's, waits longer than the replicas."""
    ranks = range(first_rank, first_rank + len(group.workers))
    group.call_all(
        Worker.join_transfer,
        address,
        timeout_seconds,
        per_rank=ranks,
        phase=_JOIN_PHASE,
        max_deadline_seconds=_JOIN_DEADLINE_SECONDS + (0 if first_rank else _AFTER_FAILURE_SECONDS),
    )


def _receive(group: WorkerGroup, version: int) -> None:
    group.call_all(Worker.receive_weights, version, phase="weights")


def _send(group: WorkerGroup, sent: list[int]) -> None:
    """Send the weights of learners. Its deadline is later than that of the replicas."""
    deadline = group.deadline_seconds + 2 * JOIN_SECONDS
    sent += group.call_all(Worker.send_weights, phase="weights", min_deadline_seconds=deadline)
