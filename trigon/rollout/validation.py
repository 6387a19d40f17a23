"""Validation: samples and scores all validation prompts, each time with the same seeds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from trigon.data.stream import Prompts
from trigon.errors import BadRow
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect
from trigon.rollout.protocol import RolloutEngine
from trigon.types import Phase, Prompt, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """Samples and scores the validation prompts.

    prompts_per_call: prompts that are built, sampled and scored together.
    num_workers: threads that build prompts.
    warn: called with a message for each prompt that can no longer be built; it is skipped.
    """

    prompts: Prompts
    sampling: SamplingParams
    prompts_per_call: int
    num_workers: int
    warn: Callable[[str], None]

    def sample(self, rollout: RolloutEngine, rewards: RewardPool, *, phase: Phase) -> list[RolloutGroup]:
        """Return a scored group for each prompt, in order. The engine must be awake.

        Prompts that cannot be built, or that the engine fails to sample, have no group. The prompts
        of the groups have no pixels, which may be more than memory holds.
        """
        total = len(self.prompts)
        groups: list[RolloutGroup] = []
        with (
            ThreadPoolExecutor(self.num_workers, thread_name_prefix="validation") as threads,
            phase("validation", total=total) as advance,
        ):
            for start in range(0, total, self.prompts_per_call):
                indices = range(start, min(start + self.prompts_per_call, total))
                batch = [prompt for prompt in threads.map(self._build, indices) if prompt is not None]
                for group in collect(batch, rollout, rewards, self.sampling, phase=phase):
                    groups.append(replace(group, prompt=replace(group.prompt, vision=None)))
                advance(len(indices))
        return groups

    def image_files(self, prompt_id: str) -> list[bytes]:
        """Return the images of a prompt as encoded files; none with videos.

        May be called from any thread. Raises: as Prompts.image_files.
        """
        index = self.prompts.index_of(prompt_id)
        assert index is not None, f"{prompt_id} is no validation prompt"
        return self.prompts.image_files(index)

    def _build(self, index: int) -> Prompt | None:
        try:
            return self.prompts[index]
        except BadRow as error:
            self.warn(f"skipped in this validation: {error}")
            return None
