"""The seam to whatever learns. Knows types only; one process, many GPUs and the fake satisfy it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from trigon.metrics import Metrics
from trigon.types import RolloutGroup, TrainGroup, WeightsHandle


class LogprobEngine(Protocol):
    """Scores completions under fixed weights: the reference policy, or the trainer before an update."""

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """Return for each group, for each rollout, float32 [R] log-probabilities on the CPU, without gradient."""
        ...


class TrainEngine(LogprobEngine, Protocol):
    """Owns the policy and its optimizer."""

    def full_kl(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """Return of each token the KL of the policy's whole distribution from the reference's; else as logprobs.

        For engines that were given a reference.
        """
        ...

    def step(self, groups: Sequence[TrainGroup]) -> Metrics:
        """Make one optimizer update from these groups (one mini-batch) and return its metrics.

        An update whose gradient is not finite, or that has no token to learn from, is skipped, and counted in
        actor/skipped_updates.
        """
        ...

    def weights(self) -> WeightsHandle:
        """Return a handle of the policy's weights, which a rollout engine reads; nothing is copied."""
        ...

    def save_state(self, folder: Path, *, model_only: bool) -> Callable[[], None]:
        """Copy weights, and unless model_only the optimizer, and return what writes them into an existing folder.

        What is returned may run in another thread while the engine goes on. It writes safetensors and JSON only.
        """
        ...

    def load_state(self, folder: Path) -> None:
        """Restore what save_state wrote, bit for bit.

        Raises: CheckpointError unless every tensor matches by name, shape and dtype, none missing and none left over.
        """
        ...

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        ...
