"""Validation: the same prompts, the same seeds, the current weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trigon.data.dataset import Prompts
from trigon.errors import BadRow
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect
from trigon.rollout.protocol import RolloutEngine
from trigon.types import Phase, Prompt, RolloutGroup, SamplingParams

VALIDATION_SEED_STEP = 0
"""Training steps count from 1, so that validation's seeds are its own, and the same at every validation:

differences between two validations come from the weights, not from the draw.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """Samples and scores all prompts, prompts_per_call at a time, built by num_workers threads.

    warn: hears of prompts that have become unusable since the start; they are left out.
    """

    prompts: Prompts
    sampling: SamplingParams
    prompts_per_call: int
    num_workers: int
    warn: Callable[[str], None]

    def sample(self, rollout: RolloutEngine, rewards: RewardPool, *, phase: Phase) -> list[RolloutGroup]:
        """Return a group for each prompt under the weights that the engine holds; to be called inside awake()."""
        groups: list[RolloutGroup] = []
        total = len(self.prompts)
        with (
            ThreadPoolExecutor(self.num_workers, thread_name_prefix="validation") as threads,
            phase("validation", total=total) as advance,
        ):
            for start in range(0, total, self.prompts_per_call):
                indices = range(start, min(start + self.prompts_per_call, total))
                batch = [prompt for prompt in threads.map(self._build, indices) if prompt is not None]
                groups += collect(batch, rollout, rewards, self.sampling, step=VALIDATION_SEED_STEP, phase=phase)
                advance(len(indices))
        return groups

    def _build(self, index: int) -> Prompt | None:
        try:
            return self.prompts[index]
        except BadRow as problem:
            self.warn(f"left out of this validation: {problem}")
            return None
