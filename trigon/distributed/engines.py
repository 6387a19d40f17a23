"""The engines of a worker group that learn: the same protocols as in a single process.

Groups are distributed over ranks by their tokens, and stay on a rank that has their pixels where
the balance allows it. Tokens, log-probabilities and media files pass through the driver; weights
and pixels never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from trigon.data.packing import tokens_of
from trigon.distributed.balance import partition_near
from trigon.distributed.messages import Message, for_scoring, for_update, pack
from trigon.distributed.worker import Worker
from trigon.distributed.worker_group import DISK_SECONDS, WorkerGroup
from trigon.errors import EngineError
from trigon.metrics import Metrics, merge
from trigon.training.protocol import GroupOutputs
from trigon.training.train_groups import has_gradient
from trigon.types import RolloutGroup, TrainGroup, WeightsHandle, parts_of

Group = TypeVar("Group", RolloutGroup, TrainGroup)


class WorkerWeights(WeightsHandle):
    """Weights of a policy in the workers, which never leave them.

    The rollout engine of the same worker group accepts it: each worker reads its own trainer's
    weights.
    """

    __slots__ = ()


def require_weights_of_workers(weights: WeightsHandle) -> None:
    """Raise EngineError for weights of another kind, which no worker has."""
    if not isinstance(weights, WorkerWeights):
        raise EngineError(
            f"A rollout engine of several workers cannot load {type(weights).__name__}. Give it the weights() of the "
            "train engine of the workers that learn."
        )


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
        shares, payloads = self._deal(groups, [tokens_of(group) for group in groups], for_scoring, phase=phase)
        results = self._worker_group.call(method, per_rank=payloads, phase=phase).result()
        received = [self._worker_group.receive(result, phase=phase) for result in results]
        by_index = {
            index: result
            for share, part in zip(shares, received[:: self._ranks_per_row], strict=True)
            for index, result in zip(share, part, strict=True)
        }
        return [by_index[index] for index in range(len(groups))]

    def _deal(
        self,
        groups: Sequence[Group],
        costs: Sequence[int],
        reduced: Callable[[list[Group]], list[Group]],
        *,
        phase: str,
    ) -> tuple[list[list[int]], list[Any]]:
        """Return the indices of each share's groups, and Ray's reference of each rank's message.

        Shares are balanced by cost, and most groups are where their pixels are. The first share is
        the one of the first ranks_per_row ranks. reduced: leaves out what the ranks do not read.
        """
        worker_group, size = self._worker_group, self._ranks_per_row
        processed = worker_group.processed
        homes = [{rank // size for rank in processed.ranks_of(group)} for group in groups]
        shares = partition_near(costs, homes, len(worker_group.workers) // size)
        references = []
        for number, share in enumerate(shares):
            own = [groups[index] for index in share]
            for group in own:
                processed.add(parts_of(group), range(number * size, (number + 1) * size))
            references += [worker_group.put(pack(reduced(own)), phase=phase)] * size
        return shares, references


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

        Among ranks that compute rows together, the first one records outputs.
        """
        worker_group, outputs = self._worker_group, {} if outputs is None else outputs
        costs = update_costs(groups, regularized=self._regularized)
        shares, payloads = self._deal(groups, costs, for_update, phase="update")
        own = {
            number * self._ranks_per_row: [place for place, index in enumerate(share) if index in outputs]
            for number, share in enumerate(shares)
        }
        results = worker_group.call(Worker.step, own, per_rank=payloads, phase="update").result()
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
        worker_group.call(Worker.stage_state, folder.absolute(), model_only, phase="save (copying)").result()

        def write() -> None:
            worker_group.call(Worker.write_state, phase="save (writing)", min_deadline_seconds=DISK_SECONDS).result()

        return write

    def load_state(self, folder: Path) -> None:
        """See TrainEngine."""
        self._worker_group.call(
            Worker.load_state, folder.absolute(), phase="load", min_deadline_seconds=DISK_SECONDS
        ).result()


class WorkersCritic(_SharedRows):
    """Trains a critic on all workers. Implements CriticEngine."""

    def values(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See CriticEngine."""
        return self.compute(Worker.values, groups, phase="values")

    def step(self, groups: Sequence[TrainGroup], outputs: GroupOutputs | None = None) -> Metrics:
        """See CriticEngine. The metrics include the bytes moved since the last update."""
        worker_group = self._worker_group
        _, payloads = self._deal(groups, [tokens_of(group) for group in groups], for_update, phase="update")
        metrics = worker_group.call(Worker.critic_step, per_rank=payloads, phase="update_critic").result()
        return merge(*metrics, worker_group.traffic.pop_metrics())

    def save_state(self, folder: Path, *, model_only: bool) -> Callable[[], None]:
        """Return a function that does nothing: the workers write both models in one call."""
        return lambda: None

    def load_state(self, folder: Path) -> None:
        """See CriticEngine."""
        self._worker_group.call(
            Worker.load_critic, folder.absolute(), phase="load", min_deadline_seconds=DISK_SECONDS
        ).result()


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
        self._worker_group.call(Worker.start_trace, self._folder, phase="trace").result()

    def finish(self, step: int) -> None:
        """See Tracer."""
        self._worker_group.call(Worker.finish_trace, step, phase="trace", min_deadline_seconds=DISK_SECONDS).result()


def update_costs(groups: Sequence[TrainGroup], *, regularized: bool) -> list[int]:
    """Return the cost of each group in an update: its tokens, or 1 if it has no gradient."""
    return [tokens_of(group) if has_gradient(group, regularized=regularized) else 1 for group in groups]
