"""Validation: the same prompts, the same seeds, the current weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trigon.data.dataset import PromptSet
from trigon.metrics import values
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.statistics import describe_validation
from trigon.types import Phase, RolloutGroup, SamplingParams

VALIDATION_SEED_STEP = 0
"""Training steps count from 1, so that validation's seeds are its own, and the same at every validation:

differences between two validations come from the weights, not from the draw.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Validation:
    """What came out: every group, and plain numbers under val/..., val_response_length/... and val_prompt_length/..."""

    groups: Sequence[RolloutGroup]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """Samples and scores a whole PromptSet, prompts_per_call at a time."""

    prompts: PromptSet
    sampling: SamplingParams
    prompts_per_call: int

    def evaluate(self, rollout: RolloutEngine, rewards: RewardPool, *, phase: Phase) -> Validation:
        """Return the validation under the weights that the engine holds; to be called inside rollout.awake()."""
        groups: list[RolloutGroup] = []
        for start in range(0, len(self.prompts), self.prompts_per_call):
            with phase("validation"):
                batch = [self.prompts[i] for i in range(start, min(start + self.prompts_per_call, len(self.prompts)))]
            groups += collect(batch, rollout, rewards, self.sampling, step=VALIDATION_SEED_STEP, phase=phase)
        return Validation(groups, values(describe_validation(groups)))
