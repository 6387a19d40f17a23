"""A train engine and a critic without models, which count updates.

For tests of the loop, and for trying out a dataset and a reward function within milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trigon.metrics import Mean, Metrics, Sum
from trigon.training.protocol import GroupOutputs, ModelName
from trigon.types import LocalWeights, RolloutGroup, TokenLogprobs, TrainGroup, TrainSequence

FAKE_LOGPROB = -1.0
"""The log-probability of every token. rollout/fake.py has the same, so there is no mismatch."""


class _CountsUpdates:
    """Has a number of updates as its only state."""

    name: ModelName

    def __init__(self) -> None:
        self.updates = 0

    def _update(self, loss_key: str, loss: float) -> Metrics:
        """Count an update, and return its metrics."""
        self.updates += 1
        return {
            loss_key: Mean(loss),
            f"{self.name}/grad_norm": Mean(1.0),
            f"{self.name}/skipped_updates": Sum(0.0),
            f"{self.name}/nonfinite_updates": Sum(0.0),
        }

    def save_state(self, folder: Path, *, model_only: bool) -> Callable[[], None]:
        """See TrainedModel."""
        text = json.dumps({"updates": self.updates})

        def write() -> None:
            folder.mkdir(exist_ok=True)
            (folder / "optimizer.json").write_text(text, encoding="utf-8")

        return write

    def load_state(self, folder: Path) -> None:
        """See TrainedModel."""
        self.updates = json.loads((folder / "optimizer.json").read_text(encoding="utf-8"))["updates"]


class FakeTrainEngine(_CountsUpdates):
    """Satisfies TrainEngine. Its only weight, "updates", is the number of updates made."""

    name = "actor"

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        return [
            [torch.full((rollout.completion.num_sampled,), FAKE_LOGPROB) for rollout in group.rollouts]
            for group in groups
        ]

    def full_kl(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See TrainEngine. The reference has the same log-probabilities."""
        return [[torch.zeros(rollout.completion.num_sampled) for rollout in group.rollouts] for group in groups]

    def step(self, groups: Sequence[TrainGroup], outputs: GroupOutputs | None = None) -> Metrics:
        """See TrainedModel. The loss is minus the mean advantage, the entropy 0.5 nats."""
        if outputs is not None:
            outputs.update({index: list(map(_outputs, groups[index].sequences)) for index in outputs})
        advantages = torch.cat([sequence.advantages for group in groups for sequence in group.sequences])
        return self._update("actor/pg_loss", -float(advantages.mean()))

    def weights(self) -> LocalWeights:
        """See TrainEngine."""
        return LocalWeights(lambda dtype=None: iter([("updates", torch.tensor([float(self.updates)]))]))


def _outputs(sequence: TrainSequence) -> TokenLogprobs:
    logprobs = torch.full(sequence.loss_mask.shape, FAKE_LOGPROB)
    return TokenLogprobs(logprobs, torch.full_like(logprobs, 0.5), None)


class FakeCriticEngine(_CountsUpdates):
    """Satisfies CriticEngine. Values everything at the number of updates made."""

    name = "critic"

    def values(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See CriticEngine."""
        return [
            [torch.full((rollout.completion.num_sampled + 1,), float(self.updates)) for rollout in group.rollouts]
            for group in groups
        ]

    def step(self, groups: Sequence[TrainGroup], outputs: GroupOutputs | None = None) -> Metrics:
        """See CriticEngine. The loss is the mean return."""
        returns = [sequence.returns for group in groups for sequence in group.sequences if sequence.returns is not None]
        return self._update("critic/vf_loss", float(torch.cat(returns).mean()))
