"""The rollout engine of workers: deals the prompts of a call to replicas, and collects completions.

A replica is one worker, or several consecutive ones with tensor parallelism, of the workers that
learn or of others, which may be lost (samplers.py). Prompts are dealt in turn. A prompt that
an earlier call has begun stays with its replica, which may have kept the episodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from trigon.distributed.balance import deal
from trigon.distributed.engines import require_weights_of_workers
from trigon.distributed.messages import Message, for_sampling, pack, without_observed_images
from trigon.distributed.samplers import SamplerReplicas
from trigon.distributed.worker import Heartbeat, Worker
from trigon.distributed.worker_group import DISK_SECONDS, POLL_SECONDS, Call, WorkerGroup, wait_for_any
from trigon.metrics import Metrics, merge
from trigon.rollout.protocol import InterruptKind, OnGroup, Until
from trigon.types import Completion, Prompt, SamplingParams, WeightsHandle


@dataclass(frozen=True, slots=True)
class LearnerReplicas:
    """The workers that learn, which also sample; each reads its own weights. Satisfies Restartable.

    Replicas are named by their numbers. learners: the workers that learn. replica_size: the number
    of consecutive ranks that form one replica.
    """

    learners: WorkerGroup
    replica_size: int

    @property
    def size(self) -> int:
        """The number of replicas, lost ones included."""
        return len(self.learners.workers) // self.replica_size

    @contextmanager
    def awake(self, version: int) -> Iterator[None]:
        """Return a context in which all replicas have the newest weights, of this version."""
        self.learners.processed.forget()
        self.learners.call(Worker.wake, version, phase="weights").result()
        try:
            yield
        except BaseException:
            self.learners.call(Worker.sleep, phase="sleep")  # its own error does not replace this one
            raise
        self.learners.call(Worker.sleep, phase="sleep").result()

    def restart(self) -> None:
        """See Restartable. All workers start their engines again, since their starts are one.

        A worker that is still sampling does so first.
        """
        phase = "restart of the rollout engines"
        self.learners.call(Worker.restart_rollout, phase=phase, min_deadline_seconds=DISK_SECONDS).result()

    def choose(self, until: Until | None) -> Sequence[int]:
        """Return the replicas to which the prompts of a call are dealt; none if all are lost."""
        return range(self.size)

    def find_able(self) -> Sequence[int]:
        """Return the replicas that can sample now, at least one. Raises: LostSamplersError."""
        return range(self.size)

    def group(self, replica: int) -> WorkerGroup:
        """Return the workers of a replica that can sample now."""
        return self.learners.part(replica * self.replica_size, (replica + 1) * self.replica_size)

    def is_lost(self, replica: int, call: Call[Any]) -> bool:
        """Return whether a call that has ended has lost its replica. Raises: another error.

        No replica is lost here: a worker that learns and dies ends the run.
        """
        call.result()
        return False

    def homes(self, replica: int) -> Sequence[int]:
        """Return the learners that count as having the pixels of what a replica samples."""
        return range(replica * self.replica_size, (replica + 1) * self.replica_size)

    def note_sampled(self) -> None:
        """Note that completions of a step were sampled. Does nothing: no replica is replaced."""

    def pop_metrics(self) -> Metrics:
        """Return the counts of the replicas since the last call."""
        return merge(*self.learners.call(Worker.pop_rollout_metrics, phase="rollout").result())


class WorkersRolloutEngine:
    """Samples on several workers. Implements RolloutEngine.

    sends_rows: the rows of prompts are sent too, for environments.
    """

    def __init__(self, replicas: LearnerReplicas | SamplerReplicas, *, sends_rows: bool = False) -> None:
        self._replicas = replicas
        self._sends_rows = sends_rows
        self._version = -1  # of the weights that were asked for last
        self._generation = 0  # the number of the last call of Worker.generate

    @property
    def num_replicas(self) -> int:
        """See RolloutEngine."""
        return self._replicas.size

    @contextmanager
    def awake(self, weights: WeightsHandle, *, version: int) -> Iterator[None]:
        """See RolloutEngine. Where the weights come from is known to the replicas."""
        require_weights_of_workers(weights)
        self._version = version
        with self._replicas.awake(version):
            yield

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        until: Until | None = None,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See RolloutEngine. Finished groups arrive with heartbeats, about a second apart.

        Each replica stops when its part of until is reached. Without until, the prompts of a
        replica that is lost are sampled by another one. With until, which the other one may not
        reach for long, they are returned as they were begun, without prompts that had ended. If no
        prompt had ended, and the call cannot be interrupted, another one samples them, too.
        """
        replicas, processed = self._replicas, self._replicas.learners.processed
        advance = on_progress or (lambda num_finished: None)
        rows: dict[int, list[Completion]] = {}
        is_any_ended = False

        def receive(index: int, completions: Sequence[Completion], replica: int) -> None:
            nonlocal is_any_ended
            if index in rows:  # from a replica that was lost since
                return
            rows[index] = [replace(each, replica=replica) for each in completions]
            processed.add(rows[index], replicas.homes(replica)[:1])
            if not any(each.is_unfinished for each in completions):
                is_any_ended = True
                if on_group is not None:
                    on_group(index, rows[index])

        shares: dict[int, Share] = {}  # by the replica that each is dealt to
        chosen = replicas.choose(until)
        dealt = deal_prompts(len(prompts), sampling, until, chosen) if chosen else []
        parts = [None] * len(dealt) if until is None else until.of_shares(dealt)
        for replica, indices, part in zip(chosen, dealt, parts, strict=True):
            # With until also those without prompts, which then stop the episodes they have kept.
            if indices or until is not None:
                own = [prompts[index] for index in indices]
                begun = None if part is None else without_observed_images(part)
                message = pack((for_sampling(own, with_rows=self._sends_rows), begun))
                shares[replica] = Share(replica, indices, message, advance, receive)
                processed.add(own, replicas.homes(replica))
        while shares:
            able, num_received = replicas.find_able(), len(rows)
            running = {replica: shares.pop(replica) for replica in able if replica in shares}
            free = [replica for replica in able if replica not in running]
            running |= {replica: shares.pop(lost) for replica, lost in zip(free, list(shares), strict=False)}
            lost_shares = self._sample(running, sampling, until, advance)
            # The probes of a parity check are so few that replicas sample them that fail in each
            # step. What another replica had sampled before is no progress.
            if len(rows) > num_received and not sampling.one_turn:
                replicas.note_sampled()
            if until is not None and (is_any_ended or until.interruption is not None):
                break
            shares |= {share.replica: share for share in lost_shares}
        return [
            rows[index] if index in rows else self._begun(until, index, sampling.num_completions)
            for index in range(len(prompts))
        ]

    def pop_metrics(self) -> Metrics:
        """See RolloutEngine."""
        return self._replicas.pop_metrics()

    def close(self) -> None:
        """Do nothing: the workers end with the context that started them."""

    def _sample(
        self,
        shares: dict[int, Share],
        sampling: SamplingParams,
        until: Until | None,
        advance: Callable[[int | None], None],
    ) -> list[Share]:
        """Sample a share on each of these replicas; return those whose replica was lost."""
        self._generation += 1
        running, lost = dict(shares), []
        for replica, share in running.items():
            share.begin(self._replicas.group(replica), sampling, self._generation)
        interrupted_at = 0.0
        try:
            while running:
                kind = None if until is None else until.interrupted
                # Again and again: a call that a worker has not begun is not interrupted.
                if kind is not None and time.monotonic() > interrupted_at + POLL_SECONDS:
                    interrupted_at = time.monotonic()
                    for share in running.values():
                        share.interrupt(kind)
                wait_for_any([share.call for share in running.values()], POLL_SECONDS)
                advance(None)
                for replica in [replica for replica, share in running.items() if share.poll()]:
                    share = running.pop(replica)
                    if self._replicas.is_lost(replica, share.call):
                        lost.append(share)
        except BaseException:
            for share in running.values():  # what they would sample to the end is not used
                share.interrupt("stop")
            raise
        return lost

    def _begun(self, until: Until | None, index: int, num_completions: int) -> list[Completion]:
        """Return the completions of a prompt as they were before a call that has lost them."""
        assert until is not None, "without until, all prompts are sampled"
        begun = until.begun[index] if index < len(until.begun) else ()
        nothing = Completion(
            token_ids=(), sampling_logprobs=(), finish_reason="unfinished", text="", policy_version=self._version
        )
        return list(begun) or [nothing] * num_completions


@dataclass(slots=True, eq=False)
class Share:
    """The prompts of a call that a replica samples, or another one in its place.

    Implements HeartbeatListener.
    replica: the replica that they were dealt to. indices: the indices of the prompts. message: the
    message for Worker.generate. on_progress: called with the number of newly finished completions.
    on_completions: called with the index of a prompt, its completions, and replica. call: the call
    of the replica that samples them.
    """

    replica: int
    indices: Sequence[int]
    message: Message
    on_progress: Callable[[int | None], None]
    on_completions: Callable[[int, Sequence[Completion], int], None]
    call: Call[Any] = field(init=False)
    _group: WorkerGroup = field(init=False)
    _generation: int = field(init=False)
    _num_samples: int = 0  # that on_progress has been called with
    _num_groups: int = 0  # received from the replica that samples them now
    _is_sampled: bool = False

    def begin(self, group: WorkerGroup, sampling: SamplingParams, generation: int) -> None:
        """Begin to sample the prompts on a replica's workers.

        generation: the number of the call.
        """
        self._group, self._generation = group, generation
        self._num_groups, self._is_sampled = 0, False
        messages = [group.put(self.message, phase="rollout")] * len(group.workers)
        self.call = group.call(Worker.generate, sampling, generation, per_rank=messages, phase="rollout", listener=self)

    def poll(self) -> bool:
        """Process what has arrived, and return whether the replica is done, or has failed."""
        if not self.call.poll():
            return False
        if self.call.error is None and not self._is_sampled:
            # For the groups that have finished since the last heartbeat of the call.
            self._is_sampled = True
            self.call = self._group.call(Worker.heartbeat, *self.request(), phase="rollout")
            return self.poll()
        if self.call.error is None:
            for heartbeat in self.call.result():
                self.receive(heartbeat)
        return True

    def interrupt(self, kind: InterruptKind) -> None:
        """Interrupt the replica, unless the run ends."""
        if not self._group.is_closed:
            self._group.call(Worker.interrupt, self._generation, kind, phase="interrupt")

    def request(self) -> tuple[int, int]:
        """See HeartbeatListener."""
        return self._generation, self._num_groups

    def receive(self, heartbeat: Heartbeat) -> bool:
        """See HeartbeatListener. Only the first rank of a replica has completions."""
        num_more = max(heartbeat.num_samples - self._num_samples, 0)
        self._num_samples += num_more
        self._num_groups += len(heartbeat.groups)
        self.on_progress(num_more or None)  # that a worker answers is no progress of its sampling
        for number, message in heartbeat.groups:
            completions = self._group.receive(message, phase="rollout")
            self.on_completions(self.indices[number], completions, self.replica)
        return num_more > 0 or bool(heartbeat.groups)


def deal_prompts(
    num_prompts: int, sampling: SamplingParams, until: Until | None, replicas: Sequence[int]
) -> list[list[int]]:
    """Return the indices of the prompts that each of these replicas samples, ascending.

    A prompt with tokens of unfinished completions stays with the replica that has sampled them. The
    others balance the numbers of completions that are left to sample; without begun ones they are
    dealt in turn, so that adjacent prompts, which are often similar, go to different replicas.
    """
    begun = () if until is None else until.begun
    costs = [sampling.num_completions] * num_prompts
    homes: list[int | None] = [None] * num_prompts
    for index, row in enumerate(begun):
        unfinished = [completion for completion in row if completion.is_unfinished]
        costs[index] = len(unfinished) if row else sampling.num_completions
        found = next((completion.replica for completion in unfinished if completion.token_ids), None)
        homes[index] = replicas.index(found) if found in replicas else None
    return deal(costs, homes, len(replicas))
