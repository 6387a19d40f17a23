"""Where the model of an engine computes, and where its tensors are in between."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from trigon.training.device_memory import explain_out_of_memory
from trigon.training.parallel import ProcessGroup, SingleProcess
from trigon.types import RolloutGroup, TrainGroup


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a policy computes, and where its tensors are in between.

    device: on which the policy computes.
    compute_dtype: of the forward pass, by autocast; None for a sharded policy, which casts by
    itself.
    offload_params: move the weights to the CPU while they are not in use.
    offload_optimizer: move the optimizer states to the CPU between updates.
    process_group: the ranks that hold the policy together.
    model: what the run has the model for, in messages: policy, reference or critic.
    remedies: what to change if the device runs out of memory, in the order to try it.
    """

    device: torch.device
    compute_dtype: torch.dtype | None
    offload_params: bool = False
    offload_optimizer: bool = False
    process_group: ProcessGroup = field(default_factory=SingleProcess)
    model: str = "policy"
    remedies: tuple[str, ...] = ()

    def explain_out_of_memory(
        self, work: str, groups: Iterable[RolloutGroup | TrainGroup], *, max_tokens: int
    ) -> AbstractContextManager[None]:
        """Return the context of a pass or update over groups; see memory.explain_out_of_memory."""
        return explain_out_of_memory(
            f"the {work} of the {self.model}", groups, max_tokens=max_tokens, remedies=self.remedies
        )
