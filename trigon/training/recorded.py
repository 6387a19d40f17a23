"""What the forward passes of an update return for the groups whose tokens a run records.

An update computes the log-probability and the entropy of every token that it learns from. Keeping
them costs no pass, and the host does not wait for them: they are copied while it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor

from trigon.data.packing import by_owner
from trigon.training.update_plan import UpdatePlan
from trigon.types import TokenLogprobs


class RecordedOutputs:
    """Collects the outputs of the rows that contain recorded groups."""

    def __init__(self, plan: UpdatePlan, recorded: Collection[int]) -> None:
        """Collect of this update. recorded: indices among all groups of this rank."""
        self._plan = plan
        self._recorded = {place: index for place, index in enumerate(plan.indices) if index in recorded}
        self._rows: dict[int, Tensor] = {}  # by the number of the batch: [2, S]

    def receiver(self, number: int) -> Callable[[TokenLogprobs], None] | None:
        """Return what receives the outputs of a batch; None if it has no recorded group."""
        if any(group in self._recorded for group, _ in self._plan.batches[number].owners):
            return partial(self._receive, number)
        return None

    def by_group(self) -> dict[int, list[TokenLogprobs]]:
        """Return the outputs of each recorded group that has a gradient, by its index.

        Called after the device has finished the passes. Tensors float32 [R] on the CPU.
        """
        batches = [self._plan.batches[number] for number in self._rows]
        owned = by_owner(batches, list(self._rows.values()))
        outputs: dict[int, list[TokenLogprobs]] = {index: [] for index in self._recorded.values()}
        for place, number in sorted(owned):
            if place in self._recorded:
                logprobs, entropy = owned[place, number]
                outputs[self._recorded[place]].append(TokenLogprobs(logprobs, entropy, None))
        return outputs

    def _receive(self, number: int, outputs: TokenLogprobs) -> None:
        stacked = torch.stack([outputs.logprobs.detach().float(), outputs.entropy.detach().float()])
        self._rows[number] = stacked.to("cpu", non_blocking=True)  # into pinned memory
