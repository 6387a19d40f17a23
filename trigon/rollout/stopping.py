"""The methods of a StoppingEngine that sample, for engines that implement both as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from trigon.rollout.protocol import OnGroup, Until
from trigon.types import Completion, Prompt, SamplingParams


class SamplesUntil(ABC):
    """Implements generate and generate_until of a StoppingEngine by one method of a subclass."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        step: int,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See RolloutEngine, and what the engine's own method says."""
        return self._generate(prompts, sampling, None, step=step, on_progress=on_progress, on_group=on_group)

    def generate_until(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        until: Until,
        *,
        step: int,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See StoppingEngine, and what the engine's own method says."""
        return self._generate(prompts, sampling, until, step=step, on_progress=on_progress, on_group=on_group)

    @abstractmethod
    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        until: Until | None,
        *,
        step: int,
        on_progress: Callable[[int | None], None] | None,
        on_group: OnGroup | None,
    ) -> list[list[Completion]]:
        """Sample until all completions have ended, or until the end that is given."""
