"""How groups are dealt to the ranks of a worker group, and what the ranks return is collected."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from trigon.data.packing import tokens_of
from trigon.distributed.balance import partition_near
from trigon.distributed.processed_media import Part
from trigon.distributed.recent_files import RecentFiles
from trigon.distributed.serialization import (
    decode_logprobs,
    encode_rollouts,
    group_parts,
)
from trigon.distributed.worker import Worker
from trigon.distributed.worker_group import WorkerGroup
from trigon.training.update_plan import has_gradient
from trigon.types import RolloutGroup, TrainGroup

Item = TypeVar("Item")
Group = TypeVar("Group", RolloutGroup, TrainGroup)


def update_costs(groups: Sequence[TrainGroup], *, regularized: bool) -> list[int]:
    """Return the cost of each group in an update: its tokens, or 1 if it has no gradient."""
    return [tokens_of(group) if has_gradient(group, regularized=regularized) else 1 for group in groups]


def call_by_group(
    worker_group: WorkerGroup,
    method: Callable[[Worker, bytes], bytes],
    groups: Sequence[RolloutGroup],
    ranks_per_row: int,
    *,
    phase: str,
) -> list[list[Tensor]]:
    """Call a method on all workers, each with a share of groups, and return its tensors.

    Ranks that compute rows together return the same ones.
    """
    shares = partition(worker_group, groups, [tokens_of(group) for group in groups], ranks_per_row)
    payloads = put_shares(worker_group, encode_rollouts, groups, shares, ranks_per_row, phase=phase)
    received = [
        worker_group.count_received(result, phase=phase)
        for result in worker_group.call_all(method, per_rank=payloads, phase=phase)
    ]
    return restore_order(shares, [decode_logprobs(result) for result in received[::ranks_per_row]])


def partition(
    worker_group: WorkerGroup,
    groups: Sequence[RolloutGroup] | Sequence[TrainGroup],
    costs: Sequence[int],
    ranks_per_row: int,
) -> list[list[int]]:
    """Return the indices of each share's groups: balanced by cost, most where their pixels are.

    The first share is that of the first ranks_per_row ranks.
    """
    homes = [{rank // ranks_per_row for rank in worker_group.processed.ranks_of(group)} for group in groups]
    return partition_near(costs, homes, len(worker_group.workers) // ranks_per_row)


def put_shares(
    worker_group: WorkerGroup,
    encode: Callable[[Sequence[Group], Container[str]], bytes],
    groups: Sequence[Group],
    shares: Sequence[Sequence[int]],
    ranks_per_row: int,
    *,
    phase: str,
) -> list[Any]:
    """Put the messages with the shares of groups, and return Ray's reference for each rank."""
    payloads = []
    for number, share in enumerate(shares):
        ranks = range(number * ranks_per_row, (number + 1) * ranks_per_row)
        own = [groups[index] for index in share]
        files = FilesOfRanks([worker_group.files[rank] for rank in ranks])
        payload = encode(own, files)
        files.add(group_parts(own))
        worker_group.processed.add(group_parts(own), ranks)
        payloads += [worker_group.put(payload, phase=phase)] * ranks_per_row
    return payloads


class FilesOfRanks:
    """The files that all of these ranks have: those that a message to all of them can omit."""

    def __init__(self, ranks: Sequence[RecentFiles]) -> None:
        self._ranks = ranks

    def __contains__(self, file_hash: object) -> bool:
        return all(file_hash in files for files in self._ranks)

    def add(self, parts: Iterable[Part]) -> None:
        """See RecentFiles."""
        for files in self._ranks:
            files.add(parts)


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
