"""The seam to whatever samples completions. Knows types only; vLLM, transformers and the fake all satisfy it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from trigon.types import Completion, NamedTensors, Prompt, SamplingParams

OnGroup = Callable[[int, Sequence[Completion]], None]
"""Hears the index of a prompt, and its completions."""


class RolloutEngine(Protocol):
    """Samples completions under weights that are handed to it."""

    def awake(self, weights: NamedTensors, *, version: int) -> AbstractContextManager[None]:
        """Return a context in which the engine holds memory and exactly these weights.

        On entry: wakes, loads the weights, forgets every cache (prefix, encoder) made under older ones. On exit:
        sleeps. Entering with the version that is already held skips the loading.
        Raises: EngineError if a tensor is missing.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        step: int,
        on_progress: Callable[[int], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Return sampling.n completions for each prompt, in submission order, whatever finishes first.

        None at all for a prompt of which the engine failed to sample one, and failed again.

        Sample i of a prompt is seeded by (sampling.seed, step, prompt_id, i) alone, so it does not depend on which
        other prompts are in flight. Media placeholder tokens are never sampled. on_progress hears the number of
        newly finished completions. on_group hears, in the calling thread, of each prompt once: as soon as all of its
        completions are there, or it is known that there will be none; what it hears is what is returned for it.
        Raises: EngineError outside awake().
        """
        ...

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        ...
