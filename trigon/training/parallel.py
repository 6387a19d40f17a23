"""The process group of a train engine: the ranks that train one policy together.

Every rank has to make the same collective calls and the same number of forward passes.
SingleProcess is the group of one process; fsdp.py has the group of several. Does not depend on
models, losses or torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


class ProcessGroup(Protocol):
    """The collective operations of training. All ranks call every method, in the same order.

    rank: the rank of this process, from 0. size: number of ranks.
    state_group: a second torch process group, for writing checkpoints while training continues;
    None for a single process.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def state_group(self) -> Any | None: ...

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each number over the ranks, in float64."""
        ...

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """Return the maximum of each number over the ranks, in float64."""
        ...

    def before_forward(self, policy: nn.Module, *, sync_gradients: bool) -> None:
        """Prepare a pass with gradient.

        sync_gradients: reduce gradients over all ranks after the pass. If False, the reduction
        between copies of the weights (hybrid sharding) may be deferred to a later pass of the same
        update, which has to give a gradient to the same parameters.
        """
        ...

    def reshard(self, policy: nn.Module) -> None:
        """Free the weights that were gathered from other ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the weights of a policy are sharded over the ranks.

    full_shard: free each layer after the forward pass and gather it again for the backward pass.
        False keeps layers gathered in between, which is faster and needs the memory of all weights.
    ranks_per_copy: number of ranks that share one copy of the weights; the other ranks hold further
        copies (hybrid sharding). None: all ranks share one copy.
    param_dtype: dtype in which weights are gathered and used for computation.
    reduce_dtype: dtype in which gradients are reduced.
    cpu_offload: keep weights, gradients and optimizer states in host memory permanently.
    """

    full_shard: bool
    ranks_per_copy: int | None
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    cpu_offload: bool


class SingleProcess:
    """The process group of one process. Satisfies ProcessGroup."""

    rank = 0
    size = 1
    state_group = None

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """See ProcessGroup."""
        return list(numbers)

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """See ProcessGroup."""
        return list(numbers)

    def before_forward(self, policy: nn.Module, *, sync_gradients: bool) -> None:
        """See ProcessGroup. There are no gradients to reduce."""

    def reshard(self, policy: nn.Module) -> None:
        """See ProcessGroup. There are no gathered weights."""


def passes_in_step(shows_image: Sequence[bool], process_group: ProcessGroup) -> tuple[bool, ...]:
    """Return the passes that all ranks make together: for each, whether any rank has images in it.

    All ranks gather a sharded policy at the same time. They therefore make as many passes as the
    rank with the most micro-batches, and in each pass either all or none of them run the vision
    tower.

    Args:
        shows_image: for each micro-batch of this rank, whether it has images or videos.

    Example: rank 0 has (True, False, False), rank 1 has (False,): both get (True, False, False).
    """
    [num_passes] = process_group.all_reduce_max([len(shows_image)])
    padded = [*map(float, shows_image), *[0.0] * (int(num_passes) - len(shows_image))]
    return tuple(shown > 0 for shown in process_group.all_reduce_max(padded))
