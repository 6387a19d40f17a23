"""The interface of a rollout engine, which samples completions.

VllmEngine, TransformersEngine and FakeEngine satisfy it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from trigon.errors import EngineError
from trigon.metrics import Metrics
from trigon.types import Completion, LocalWeights, Prompt, SamplingParams, WeightsHandle

OnGroup = Callable[[int, Sequence[Completion]], None]
"""Called with the index of a prompt and its completions."""


class RolloutEngine(Protocol):
    """Samples completions under weights that are loaded into it."""

    @property
    def num_replicas(self) -> int:
        """How many copies of the model sample.

        Prompt i of a call of generate is sampled by replica i % num_replicas.
        """
        ...

    def awake(self, weights: WeightsHandle, *, version: int) -> AbstractContextManager[None]:
        """Return a context in which the engine holds its memory and exactly these weights.

        On entry the engine wakes, loads the weights and clears all caches (prefix, encoder). On
        exit it sleeps. Loading is skipped where the engine holds this version already.
        Raises: EngineError for a kind of handle that the engine cannot read; RolloutError if the
        weights could not be loaded, after which the engine refuses to be used.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        step: int,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Return sampling.n completions for each prompt, in the order of prompts and samples.

        An empty list for a prompt with a completion that the engine failed to sample twice.

        Sample i of a prompt is seeded by (sampling.seed, step, prompt_id, i) alone, so it does not
        depend on which other prompts are sampled at the same time. Media placeholder tokens are
        never sampled.
        Args:
            on_progress: called with the number of newly finished completions every few tokens or
                seconds: 0 after tokens that finish none, None if the engine does not know of any
                progress. It may raise, which ends the call.
            on_group: called in the calling thread, once for each prompt, as soon as all of its
                completions are finished or one has failed twice; with the list that is returned.
        Raises: EngineError outside awake(); RolloutError if the engine fails.
        """
        ...

    def pop_metrics(self) -> Metrics:
        """Return the counts of requests that were submitted again, since the last call."""
        ...

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        ...


def require_local_weights(weights: WeightsHandle) -> LocalWeights:
    """Return the handle if its weights are in this process. Raises: EngineError if not."""
    if not isinstance(weights, LocalWeights):
        raise EngineError(
            f"A rollout engine in this process cannot load {type(weights).__name__}. Give it the weights() of a train "
            "engine in the same process."
        )
    return weights
