"""The engines of a worker group: the same train and rollout protocols as those of a single process.

Prompts are dealt to the sampling replicas in turn. Groups are distributed over ranks by their
tokens, and stay on a rank that has their pixels where the balance allows it. Only serialized
tokens, log-probabilities and media files pass through the driver; weights and pixels never do.
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
from trigon.distributed.balance import partition_near
from trigon.distributed.recent_files import RecentFiles
from trigon.distributed.serialization import (
    decode_completions,
    decode_logprobs,
    encode_prompts,
    encode_rollouts,
    encode_train,
    group_parts,
)
from trigon.distributed.worker import Heartbeat, HeartbeatRequest, Worker
from trigon.distributed.worker_group import DISK_SECONDS, WorkerGroup
from trigon.errors import EngineError
from trigon.metrics import Metrics, merge
from trigon.rollout.protocol import OnGroup
from trigon.training.local import has_gradient
from trigon.types import Completion, Prompt, RolloutGroup, SamplingParams, TokenLogprobs, TrainGroup, WeightsHandle

Item = TypeVar("Item")
Group = TypeVar("Group", RolloutGroup, TrainGroup)


class WorkerWeights(WeightsHandle):
    """Weights of a policy in the workers, which never leave them.

    The rollout engine of the same worker group accepts it: each worker reads its own trainer's
    weights.
    """

    __slots__ = ()


class WorkersTrainEngine:
    """Trains on all workers. Implements TrainEngine.

    regularized: whether groups without advantages have a gradient, too, because of a regularization
    term of the loss.
    """

    def __init__(self, worker_group: WorkerGroup, *, regularized: bool) -> None:
        self._worker_group = worker_group
        self._regularized = regularized

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        return _call_by_group(self._worker_group, Worker.logprobs, groups, phase="logprobs")

    def token_logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[TokenLogprobs]]:
        """See TrainEngine."""
        scored = _call_by_group(self._worker_group, Worker.token_logprobs, groups, phase="logprobs")
        return [
            [
                TokenLogprobs(logprobs, entropy, None)
                for logprobs, entropy in zip(group[: len(group) // 2], group[len(group) // 2 :], strict=True)
            ]
            for group in scored
        ]

    def full_kl(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See TrainEngine."""
        return _call_by_group(self._worker_group, Worker.full_kl, groups, phase="full_kl")

    def step(self, groups: Sequence[TrainGroup]) -> Metrics:
        """See TrainEngine. The metrics include the bytes moved since the last update."""
        worker_group = self._worker_group
        costs = update_costs(groups, regularized=self._regularized)
        shares = _partition(worker_group, groups, costs)
        payloads = [
            _put_groups(worker_group, encode_train, [groups[index] for index in share], rank=rank, phase="update")
            for rank, share in enumerate(shares)
        ]
        metrics = worker_group.call_all(Worker.step, per_rank=payloads, phase="update")
        return merge(*metrics, worker_group.traffic.pop_metrics())

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


class WorkersReference:
    """Computes log-probabilities of the reference on all workers. Implements LogprobEngine."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        return _call_by_group(self._worker_group, Worker.reference_logprobs, groups, phase="reference_logprobs")


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
        step: int,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See RolloutEngine. Finished groups arrive with heartbeats, about a second apart."""
        worker_group, replica_size = self._worker_group, self._tensor_parallel_size
        num_workers = len(worker_group.workers)
        num_replicas = self.num_replicas
        # Round-robin: adjacent prompts are often similar, so they go to different replicas.
        shares = [range(replica, len(prompts), num_replicas) for replica in range(num_replicas)]
        payloads = []
        for replica, share in enumerate(shares):
            ranks = range(replica * replica_size, (replica + 1) * replica_size)
            files = _FilesOfRanks([worker_group.files[rank] for rank in ranks])
            share_prompts = [prompts[index] for index in share]
            payload = encode_prompts(share_prompts, files, with_rows=self._sends_rows)
            payloads.append(worker_group.put(payload, phase="rollout"))
            files.add(share_prompts)
            worker_group.processed.add(share_prompts, ranks)
        generation = next(self._generations)
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
            step,
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
        for index_in_share, payload in heartbeat.groups:
            index = self._shares[rank][index_in_share]
            [decoded] = decode_completions(self._worker_group.count_received(payload, phase="rollout"))
            completions = [replace(completion, replica=rank // self._replica_size) for completion in decoded]
            self.completions[index] = completions
            self._worker_group.processed.add(completions, [rank])
            if self._on_group is not None:
                self._on_group(index, completions)


def update_costs(groups: Sequence[TrainGroup], *, regularized: bool) -> list[int]:
    """Return the cost of each group in an update: its tokens, or 1 if it has no gradient."""
    return [tokens_of(group) if has_gradient(group, regularized=regularized) else 1 for group in groups]


def _call_by_group(
    worker_group: WorkerGroup,
    method: Callable[[Worker, bytes], bytes],
    groups: Sequence[RolloutGroup],
    *,
    phase: str,
) -> list[list[Tensor]]:
    """Call a method on all workers, each with a share of groups, and return its tensors."""
    shares = _partition(worker_group, groups, [tokens_of(group) for group in groups])
    payloads = [
        _put_groups(worker_group, encode_rollouts, [groups[index] for index in share], rank=rank, phase=phase)
        for rank, share in enumerate(shares)
    ]
    results = worker_group.call_all(method, per_rank=payloads, phase=phase)
    return _restore_order(
        shares, [decode_logprobs(worker_group.count_received(result, phase=phase)) for result in results]
    )


def _partition(
    worker_group: WorkerGroup, groups: Sequence[RolloutGroup] | Sequence[TrainGroup], costs: Sequence[int]
) -> list[list[int]]:
    """Return the indices of each rank's groups: balanced by cost, most where their pixels are."""
    homes = [worker_group.processed.ranks_of(group) for group in groups]
    return partition_near(costs, homes, len(worker_group.workers))


def _put_groups(
    worker_group: WorkerGroup,
    encode: Callable[[Sequence[Group], RecentFiles], bytes],
    groups: Sequence[Group],
    *,
    rank: int,
    phase: str,
) -> Any:
    """Put the message with a rank's groups, and return Ray's reference."""
    files = worker_group.files[rank]
    payload = encode(groups, files)
    files.add(group_parts(groups))
    worker_group.processed.add(group_parts(groups), [rank])
    return worker_group.put(payload, phase=phase)


class _FilesOfRanks:
    """The files that all of these ranks have: those that a message to all of them can omit."""

    def __init__(self, ranks: Sequence[RecentFiles]) -> None:
        self._ranks = ranks

    def __contains__(self, file_hash: object) -> bool:
        return all(file_hash in files for files in self._ranks)

    def add(self, prompts: Sequence[Prompt]) -> None:
        """See RecentFiles."""
        for files in self._ranks:
            files.add(prompts)


def _restore_order(shares: Sequence[Sequence[int]], results: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the results of all shares in the order of the items.

    shares: for each part of results, the indices of its items.
    """
    by_index = {
        index: result
        for share, part in zip(shares, results, strict=True)
        for index, result in zip(share, part, strict=True)
    }
    return [by_index[index] for index in sorted(by_index)]
