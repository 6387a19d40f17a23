"""The engines of a worker group: the same train and rollout protocols as those of a single process.

Prompts are dealt to the sampling replicas in turn, except for those of which an earlier call has
begun completions: these stay with their replica, which may have kept their episodes. Groups are
distributed over ranks by their tokens, and stay on a rank that has their pixels where the balance
allows it. Tokens, log-probabilities and media files pass through the driver; weights and pixels
never do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from trigon.data.packing import tokens_of
from trigon.distributed.balance import deal, partition_near
from trigon.distributed.messages import Message, for_sampling, for_scoring, for_update, pack, without_observed_images
from trigon.distributed.worker import Heartbeat, HeartbeatRequest, Worker
from trigon.distributed.worker_group import DISK_SECONDS, WorkerGroup
from trigon.errors import EngineError
from trigon.metrics import Metrics, merge
from trigon.rollout.protocol import InterruptKind, OnGroup, Until
from trigon.training.protocol import GroupOutputs
from trigon.training.train_groups import has_gradient
from trigon.types import (
    Completion,
    Prompt,
    RolloutGroup,
    SamplingParams,
    TrainGroup,
    WeightsHandle,
    parts_of,
)

Item = TypeVar("Item")


class WorkerWeights(WeightsHandle):
    """Weights of a policy in the workers, which never leave them.

    The rollout engine of the same worker group accepts it: each worker reads its own trainer's
    weights.
    """

    __slots__ = ()


class _SharedRows:
    """Deals groups to the ranks of a worker group, and collects what the ranks return.

    ranks_per_row: consecutive ranks that compute each row together, and receive the same groups.
    """

    def __init__(self, worker_group: WorkerGroup, *, ranks_per_row: int = 1) -> None:
        self._worker_group = worker_group
        self._ranks_per_row = ranks_per_row

    def compute(
        self, method: Callable[[Worker, Message], Message], groups: Sequence[RolloutGroup], *, phase: str
    ) -> list[Any]:
        """Call a method on all workers, each with a share of groups; return results by group."""
        shares = self._partition(groups, [tokens_of(group) for group in groups])
        payloads = self._put(shares, [pack(for_scoring([groups[i] for i in share])) for share in shares], groups, phase)
        results = self._worker_group.call_all(method, per_rank=payloads, phase=phase)
        received = [self._worker_group.receive(result, phase=phase) for result in results]
        return restore_order(shares, received[:: self._ranks_per_row])

    def put_update(
        self, groups: Sequence[TrainGroup], costs: Sequence[int], *, phase: str
    ) -> tuple[list[list[int]], list[Any]]:
        """Return the indices of each share's groups, and Ray's reference of each rank's message."""
        shares = self._partition(groups, costs)
        messages = [pack(for_update([groups[i] for i in share])) for share in shares]
        return shares, self._put(shares, messages, groups, phase)

    def _partition(
        self, groups: Sequence[RolloutGroup] | Sequence[TrainGroup], costs: Sequence[int]
    ) -> list[list[int]]:
        """Return the indices of each share's groups: balanced by cost, most where their pixels are.

        The first share is the one of the first ranks_per_row ranks.
        """
        processed, size = self._worker_group.processed, self._ranks_per_row
        homes = [{rank // size for rank in processed.ranks_of(group)} for group in groups]
        return partition_near(costs, homes, len(self._worker_group.workers) // size)

    def _put(
        self,
        shares: Sequence[Sequence[int]],
        messages: Sequence[Message],
        groups: Sequence[RolloutGroup] | Sequence[TrainGroup],
        phase: str,
    ) -> list[Any]:
        """Put the message of each share, and return Ray's reference for each rank."""
        references = []
        for number, (share, message) in enumerate(zip(shares, messages, strict=True)):
            ranks = range(number * self._ranks_per_row, (number + 1) * self._ranks_per_row)
            for index in share:
                self._worker_group.processed.add(parts_of(groups[index]), ranks)
            references += [self._worker_group.put(message, phase=phase)] * self._ranks_per_row
        return references


class WorkersTrainEngine(_SharedRows):
    """Trains on all workers. Implements TrainEngine.

    regularized: whether groups without advantages have a gradient, too, because of a regularization
    term of the loss.
    """

    def __init__(self, worker_group: WorkerGroup, *, regularized: bool, ranks_per_row: int = 1) -> None:
        super().__init__(worker_group, ranks_per_row=ranks_per_row)
        self._regularized = regularized

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        return self.compute(Worker.logprobs, groups, phase="logprobs")

    def full_kl(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See TrainEngine."""
        return self.compute(Worker.full_kl, groups, phase="full_kl")

    def step(self, groups: Sequence[TrainGroup], outputs: GroupOutputs | None = None) -> Metrics:
        """See TrainedModel. The metrics include the bytes moved since the last update.

        Of the ranks that compute rows together, the first one records outputs.
        """
        worker_group, outputs = self._worker_group, {} if outputs is None else outputs
        costs = update_costs(groups, regularized=self._regularized)
        shares, payloads = self.put_update(groups, costs, phase="update")
        own = {
            number * self._ranks_per_row: [place for place, index in enumerate(share) if index in outputs]
            for number, share in enumerate(shares)
        }
        results = worker_group.call_all(Worker.step, own, per_rank=payloads, phase="update")
        for share, (_, message) in zip(shares, results[:: self._ranks_per_row], strict=True):
            found: GroupOutputs = worker_group.receive(message, phase="update")
            outputs.update({share[place]: of_group for place, of_group in found.items()})
        return merge(*(metrics for metrics, _ in results), worker_group.traffic.pop_metrics())

    def weights(self) -> WorkerWeights:
        """See TrainEngine."""
        return WorkerWeights()

    def save_state(self, folder: Path, *, model_only: bool) -> Callable[[], None]:
        """See TrainEngine. Every worker writes its own part, so all nodes must share the folder."""
        worker_group = self._worker_group
        worker_group.call_all(Worker.stage_state, folder.absolute(), model_only, phase="save (copying)")

        def write() -> None:
            worker_group.call_all(Worker.write_state, phase="save (writing)", min_deadline_seconds=DISK_SECONDS)

        return write

    def load_state(self, folder: Path) -> None:
        """See TrainEngine."""
        self._worker_group.call_all(
            Worker.load_state, folder.absolute(), phase="load", min_deadline_seconds=DISK_SECONDS
        )

    def close(self) -> None:
        """Do nothing: the workers end with the context that started them."""


class WorkersCritic(_SharedRows):
    """Trains a critic on all workers. Implements CriticEngine."""

    def values(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See CriticEngine."""
        return self.compute(Worker.values, groups, phase="values")

    def step(self, groups: Sequence[TrainGroup], outputs: GroupOutputs | None = None) -> Metrics:
        """See CriticEngine. The metrics include the bytes moved since the last update."""
        worker_group = self._worker_group
        _, payloads = self.put_update(groups, [tokens_of(group) for group in groups], phase="update")
        metrics = worker_group.call_all(Worker.critic_step, per_rank=payloads, phase="update_critic")
        return merge(*metrics, worker_group.traffic.pop_metrics())

    def save_state(self, folder: Path, *, model_only: bool) -> Callable[[], None]:
        """Return a function that does nothing: the workers write both models in one call."""
        return _nothing_to_write

    def load_state(self, folder: Path) -> None:
        """See CriticEngine."""
        self._worker_group.call_all(
            Worker.load_critic, folder.absolute(), phase="load", min_deadline_seconds=DISK_SECONDS
        )

    def close(self) -> None:
        """Do nothing: the workers end with the context that started them."""


class WorkersTrunkCritic(WorkersCritic):
    """Trains a value head on the policy's trunk on all workers. Implements TrunkCriticEngine."""

    def logprobs_and_values(self, groups: Sequence[RolloutGroup]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """See TrunkCriticEngine."""
        pairs = self.compute(Worker.logprobs_and_values, groups, phase="logprobs")
        return [logprobs for logprobs, _ in pairs], [values for _, values in pairs]


class WorkersReference(_SharedRows):
    """Computes log-probabilities of the reference on all workers. Implements LogprobEngine."""

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        return self.compute(Worker.reference_logprobs, groups, phase="reference_logprobs")


class WorkersTracer:
    """Traces all workers, each to its own file. Implements trace.Tracer."""

    def __init__(self, worker_group: WorkerGroup, folder: Path) -> None:
        self._worker_group = worker_group
        self._folder = folder

    def start(self) -> None:
        """See Tracer."""
        self._worker_group.call_all(Worker.start_trace, self._folder, phase="trace")

    def finish(self, step: int) -> None:
        """See Tracer."""
        self._worker_group.call_all(Worker.finish_trace, step, phase="trace", min_deadline_seconds=DISK_SECONDS)


class WorkersRolloutEngine:
    """Samples on all workers. Implements RolloutEngine.

    tensor_parallel_size: the number of consecutive ranks that form one replica.
    """

    def __init__(self, worker_group: WorkerGroup, *, tensor_parallel_size: int, sends_rows: bool = False) -> None:
        """Wrap the engines of the workers. sends_rows: with the prompts, for environments."""
        self._worker_group = worker_group
        self._sends_rows = sends_rows
        self._tensor_parallel_size = tensor_parallel_size
        self._generations = count(1)
        self._generation = 0  # the number of the last call

    @property
    def num_replicas(self) -> int:
        """See RolloutEngine."""
        return len(self._worker_group.workers) // self._tensor_parallel_size

    @contextmanager
    def awake(self, weights: WeightsHandle, *, version: int) -> Iterator[None]:
        """See RolloutEngine. Each worker reads the weights of its own trainer."""
        if not isinstance(weights, WorkerWeights):
            raise EngineError(
                f"A rollout engine of several workers cannot load {type(weights).__name__}. Give it the weights() of "
                "the train engine of the same workers."
            )
        self._worker_group.processed.forget()
        self._worker_group.call_all(Worker.wake, version, phase="weights")
        try:
            yield
        except BaseException:
            self._worker_group.submit_all(Worker.sleep)  # not call_all, whose own error could replace this one
            raise
        self._worker_group.call_all(Worker.sleep, phase="sleep")

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

        Each replica stops when its part of until is reached.
        """
        worker_group, replica_size = self._worker_group, self._tensor_parallel_size
        num_workers = len(worker_group.workers)
        num_replicas = self.num_replicas
        shares = deal_prompts(len(prompts), sampling, until, range(num_replicas))
        parts = None if until is None else until.of_shares(shares)
        payloads = []
        for replica, share in enumerate(shares):
            own = [prompts[index] for index in share]
            part = None if parts is None else without_observed_images(parts[replica])
            message = pack((for_sampling(own, with_rows=self._sends_rows), part))
            payloads.append(worker_group.put(message, phase="rollout"))
            worker_group.processed.add(own, range(replica * replica_size, (replica + 1) * replica_size))
        self._generation = generation = next(self._generations)
        progress = _GenerationProgress(
            worker_group,
            generation,
            [shares[rank // replica_size] for rank in range(num_workers)],
            replica_size=replica_size,
            on_progress=on_progress,
            on_group=on_group,
        )
        worker_group.call_all(
            Worker.generate,
            sampling,
            generation,
            per_rank=[payloads[rank // replica_size] for rank in range(num_workers)],
            phase="rollout",
            listener=progress,
        )
        requests = [progress.request(rank) for rank in range(num_workers)]
        last_heartbeats = worker_group.call_all(Worker.heartbeat, per_rank=requests, phase="rollout")
        for rank, heartbeat in enumerate(last_heartbeats):  # with the groups that finished since those of the call
            progress.receive(rank, heartbeat)
        return [progress.completions[index] for index in range(len(prompts))]

    def interrupt(self, kind: InterruptKind) -> None:
        """End the call of generate that runs; from another thread.

        To be repeated until it has ended: a call that a worker has not begun is not interrupted.
        """
        self._worker_group.submit_all(Worker.interrupt, self._generation, kind)

    def restart(self) -> None:
        """See RestartableEngine. All workers start their engines anew, since their starts are one.

        A worker that is still sampling does so first.
        """
        self._worker_group.call_all(
            Worker.restart_rollout, phase="restart of the rollout engines", min_deadline_seconds=DISK_SECONDS
        )

    def pop_metrics(self) -> Metrics:
        """See RolloutEngine."""
        return merge(*self._worker_group.call_all(Worker.pop_rollout_metrics, phase="rollout"))

    def close(self) -> None:
        """Do nothing: the workers end with the context that started them."""


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


class _GenerationProgress:
    """Collects the completions of one generation from heartbeats. Implements HeartbeatListener.

    shares: for each rank, the indices of its prompts. replica_size: ranks of a replica.
    completions: received so far, by prompt.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        generation: int,
        shares: Sequence[Sequence[int]],
        *,
        replica_size: int,
        on_progress: Callable[[int | None], None] | None,
        on_group: OnGroup | None,
    ) -> None:
        self._worker_group = worker_group
        self._generation = generation
        self._shares = shares
        self._replica_size = replica_size
        self._on_progress = on_progress
        self._on_group = on_group
        self._num_samples = [0] * len(shares)  # received so far, by rank
        self._num_groups = [0] * len(shares)
        self.completions: dict[int, list[Completion]] = {}

    def request(self, rank: int) -> HeartbeatRequest:
        """See HeartbeatListener."""
        return HeartbeatRequest(generation=self._generation, skip_groups=self._num_groups[rank])

    def receive(self, rank: int, heartbeat: Heartbeat) -> None:
        """See HeartbeatListener."""
        num_finished = heartbeat.num_samples - self._num_samples[rank]
        self._num_samples[rank] = heartbeat.num_samples
        self._num_groups[rank] += len(heartbeat.groups)
        if self._on_progress is not None:
            # That a worker answers is no progress of its sampling.
            self._on_progress(num_finished or None)
        for index_in_share, message in heartbeat.groups:
            index = self._shares[rank][index_in_share]
            received = self._worker_group.receive(message, phase="rollout")
            completions = [replace(completion, replica=rank // self._replica_size) for completion in received]
            self.completions[index] = completions
            self._worker_group.processed.add(completions, [rank])
            if self._on_group is not None and not any(each.is_unfinished for each in completions):
                self._on_group(index, completions)


def update_costs(groups: Sequence[TrainGroup], *, regularized: bool) -> list[int]:
    """Return the cost of each group in an update: its tokens, or 1 if it has no gradient."""
    return [tokens_of(group) if has_gradient(group, regularized=regularized) else 1 for group in groups]


def restore_order(shares: Sequence[Sequence[int]], results: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the results of all shares in the order of the items.

    shares: for each part of results, the indices of its items.
    """
    by_index = {
        index: result
        for share, part in zip(shares, results, strict=True)
        for index, result in zip(share, part, strict=True)
    }
    return [by_index[index] for index in sorted(by_index)]


def _nothing_to_write() -> None:
    """Do nothing."""
