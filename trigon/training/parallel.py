"""The ranks that train one policy together, as a train engine sees them.

Knows what ranks must agree on: sums, the number of forwards, and when gradients travel. Alone is the one of a single
process, for whom all of it is trivial; fsdp.py has the one of many. Refuses to know models and losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn


class ProcessGroup(Protocol):
    """What one rank knows of all. Every method is to be called on all ranks, in the same order.

    rank: this one, from 0. size: how many there are. state_group: the process group on which checkpoints are agreed,
    apart from training's; None where there is only one rank.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def state_group(self) -> Any | None: ...

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """Return each number summed over the ranks, in float64."""
        ...

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Return the largest of each number on any rank."""
        ...

    def before_forward(self, policy: nn.Module, *, sync_gradients: bool) -> None:
        """Prepare a pass with gradient. settle: so that after it gradients are those of all ranks.

        They may wait for a later pass of the same update otherwise, if that gives one to the same parameters.
        """
        ...

    def reshard(self, policy: nn.Module) -> None:
        """Let go of weights that were gathered from other ranks."""
        ...


class SingleProcess:
    """The ranks of a single process."""

    rank = 0
    size = 1
    state_group = None

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """See Ranks."""
        return list(numbers)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """See Ranks."""
        return list(numbers)

    def before_forward(self, policy: nn.Module, *, sync_gradients: bool) -> None:
        """See Ranks. There is nobody to exchange gradients with."""

    def reshard(self, policy: nn.Module) -> None:
        """See Ranks. Nothing was gathered."""


def passes_in_step(shows_image: Sequence[bool], process_group: ProcessGroup) -> tuple[bool, ...]:
    """Return one entry for each pass that all ranks must make together, given which of this rank's show an image.

    A sharded policy is gathered by all ranks at once, so that all make as many passes as the one that has most, and
    in each either all run the vision tower or none. An entry says whether any rank shows it an image in that pass.

    Example: rank 0 has (True, False, False), rank 1 has (False,): both get (True, False, False).
    """
    [most] = process_group.largest([len(shows_image)])
    padded = [*map(float, shows_image), *[0.0] * (int(most) - len(shows_image))]
    return tuple(shown > 0 for shown in process_group.largest(padded))
