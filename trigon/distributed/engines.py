"""N workers as one engine that trains and one that samples: the same two protocols as in a single process.

Knows which worker gets what: groups are spread by their tokens, prompts evenly over the replicas that sample. Sends
bytes and counts them; no weight and no pixel passes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from trigon.data.packing import tokens_of
from trigon.distributed.balance import partition_balanced
from trigon.distributed.cluster import Placed
from trigon.distributed.serialization import (
    decode_completions,
    decode_logprobs,
    encode_prompts,
    encode_rollouts,
    encode_train,
)
from trigon.distributed.worker import Heartbeat
from trigon.distributed.worker_group import DISK_SECONDS, WorkerGroup
from trigon.errors import EngineError
from trigon.metrics import Metrics, merge
from trigon.rollout.protocol import OnGroup
from trigon.training.local import has_gradient
from trigon.types import Completion, Prompt, RolloutGroup, SamplingParams, TrainGroup, WeightsHandle

Item = TypeVar("Item")


class WorkerWeights(WeightsHandle):
    """Weights of a policy in the workers, which never leave them.

    The rollout engine of the same worker group accepts it: each worker reads its own trainer's
    weights.
    """

    __slots__ = ()


class WorkersTrainEngine:
    """Satisfies TrainEngine. regularized: whether a group without an advantage has a gradient all the same."""

    def __init__(self, worker_group: WorkerGroup, *, regularized: bool) -> None:
        self._worker_group = worker_group
        self._regularized = regularized

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        return _logprobs(
            self._worker_group, groups, lambda actor, payload: actor.logprobs.remote(payload), phase="logprobs"
        )

    def full_kl(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See TrainEngine."""
        return _logprobs(
            self._worker_group, groups, lambda actor, payload: actor.full_kl.remote(payload), phase="full_kl"
        )

    def step(self, groups: Sequence[TrainGroup]) -> Metrics:
        """See TrainEngine. Its metrics tell as well how many bytes were moved since the last update."""
        worker_group = self._worker_group
        shares = partition_balanced(update_costs(groups, regularized=self._regularized), len(worker_group.workers))
        payloads = [
            worker_group.sent(encode_train([groups[index] for index in share]), phase="update") for share in shares
        ]
        metrics = worker_group.call_all(lambda actor, worker: actor.step.remote(payloads[worker.rank]), phase="update")
        return merge(*metrics, worker_group.traffic.pop_metrics())

    def weights(self) -> WorkerWeights:
        """See TrainEngine."""
        return WorkerWeights()

    def save_state(self, folder: Path, *, model_only: bool) -> Callable[[], None]:
        """See TrainEngine. Every worker writes its own part, so that all nodes must see the folder."""
        worker_group = self._worker_group
        worker_group.call_all(
            lambda actor, _: actor.stage_state.remote(folder.absolute(), model_only), phase="save (copying)"
        )

        def write() -> None:
            worker_group.call_all(
                lambda actor, _: actor.write_state.remote(), phase="save (writing)", at_least_seconds=DISK_SECONDS
            )

        return write

    def load_state(self, folder: Path) -> None:
        """See TrainEngine."""
        self._worker_group.call_all(
            lambda actor, _: actor.load_state.remote(folder.absolute()), phase="load", at_least_seconds=DISK_SECONDS
        )

    def close(self) -> None:
        """See TrainEngine. The workers end with the context that started them."""


class WorkersReference:
    """Satisfies LogprobEngine."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        return _logprobs(
            self._worker_group,
            groups,
            lambda actor, payload: actor.reference_logprobs.remote(payload),
            phase="reference_logprobs",
        )


class WorkersTracer:
    """Traces all workers, each into a file of its own. Satisfies trace.Tracer."""

    def __init__(self, worker_group: WorkerGroup, folder: Path) -> None:
        self._worker_group = worker_group
        self._folder = folder

    def start(self) -> None:
        """See Tracer."""
        self._worker_group.call_all(lambda actor, _: actor.start_trace.remote(self._folder), phase="trace")

    def finish(self, step: int) -> None:
        """See Tracer."""
        self._worker_group.call_all(
            lambda actor, _: actor.finish_trace.remote(step), phase="trace", at_least_seconds=DISK_SECONDS
        )


class WorkersRolloutEngine:
    """Satisfies RolloutEngine. tensor_parallel_size: consecutive ranks that make up one replica."""

    def __init__(self, worker_group: WorkerGroup, *, tensor_parallel_size: int) -> None:
        self._worker_group = worker_group
        self._tensor_parallel_size = tensor_parallel_size
        self._numbers = count(1)

    @contextmanager
    def awake(self, weights: WeightsHandle, *, version: int) -> Iterator[None]:
        """See RolloutEngine. Each worker reads the weights of its own trainer."""
        if not isinstance(weights, WorkerWeights):
            raise EngineError(
                f"A rollout engine of several workers cannot load {type(weights).__name__}. Give it the weights() of "
                "the train engine of the same workers."
            )
        self._worker_group.call_all(lambda actor, _: actor.wake.remote(version), phase="weights")
        yield
        self._worker_group.call_all(lambda actor, _: actor.sleep.remote(), phase="sleep")

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        step: int,
        on_progress: Callable[[int], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See RolloutEngine. Groups come with each look at the workers, some time after they have ended."""
        worker_group, ranks_each = self._worker_group, self._tensor_parallel_size
        num_replicas = len(worker_group.workers) // ranks_each
        # Dealt out like cards: neighbours, which are often alike, go to different replicas.
        shares = [range(replica, len(prompts), num_replicas) for replica in range(num_replicas)]
        payloads = [
            worker_group.sent(encode_prompts([prompts[index] for index in share]), phase="rollout") for share in shares
        ]
        number = next(self._numbers)
        num_samples = [0] * len(worker_group.workers)  # heard of, by rank
        num_groups = [0] * len(worker_group.workers)
        rows: dict[int, list[Completion]] = {}

        def look(actor: Any, worker: Placed) -> Any:
            return actor.heartbeat.remote(generation=number, since=num_groups[worker.rank])

        def hear(rank: int, heartbeat: Heartbeat) -> None:
            finished, num_samples[rank] = heartbeat.samples - num_samples[rank], heartbeat.samples
            num_groups[rank] += len(heartbeat.groups)
            if on_progress is not None and finished:
                on_progress(finished)
            for place, completions in heartbeat.groups:
                index = shares[rank // ranks_each][place]
                [rows[index]] = decode_completions(worker_group.received(completions, phase="rollout"))
                if on_group is not None:
                    on_group(index, rows[index])

        worker_group.call_all(
            lambda actor, worker: actor.generate.remote(
                payloads[worker.rank // ranks_each], sampling, step, number=number
            ),
            phase="rollout",
            look=look,
            on_look=hear,
        )
        for rank, heartbeat in enumerate(
            worker_group.call_all(look, phase="rollout")
        ):  # what has ended since the last look
            hear(rank, heartbeat)
        return [rows[index] for index in range(len(prompts))]

    def close(self) -> None:
        """See RolloutEngine. The workers end with the context that started them."""


def _logprobs(
    worker_group: WorkerGroup, groups: Sequence[RolloutGroup], call: Callable[[Any, Any], Any], *, phase: str
) -> list[list[Tensor]]:
    shares = _shares(groups, len(worker_group.workers))
    payloads = [worker_group.sent(encode_rollouts([groups[index] for index in share]), phase=phase) for share in shares]
    replies = worker_group.call_all(lambda actor, worker: call(actor, payloads[worker.rank]), phase=phase)
    return _in_order(shares, [decode_logprobs(worker_group.received(reply, phase=phase)) for reply in replies])


def update_costs(groups: Sequence[TrainGroup], *, regularized: bool) -> list[int]:
    """Return what each group costs in an update: the tokens of its pass, or next to nothing where it has none."""
    return [tokens_of(group) if has_gradient(group, regularized=regularized) else 1 for group in groups]


def _shares(groups: Sequence[RolloutGroup], num_workers: int) -> list[list[int]]:
    return partition_balanced([tokens_of(group) for group in groups], num_workers)


def _in_order(shares: Sequence[Sequence[int]], answers: Sequence[Sequence[Item]]) -> list[Item]:
    """Put back together what was dealt out: shares are the indices that each part of the answers belongs to."""
    found = {
        index: answer
        for share, part in zip(shares, answers, strict=True)
        for index, answer in zip(share, part, strict=True)
    }
    return [found[index] for index in sorted(found)]
