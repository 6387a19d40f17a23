"""The interface of a rollout engine, which samples completions.

VllmEngine, TransformersEngine and FakeEngine satisfy it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

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
        until: Until | None = None,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of prompts and samples.

        These are sampling.num_completions: with sampling.with_baseline, the greedy one is the last.

        An empty list for a prompt with a completion that the engine failed to sample twice. With
        until, some completions of some prompts may be unfinished.

        Sample i of a prompt is seeded by (sampling.seed, step, prompt_id, i) alone, so it does not
        depend on which other prompts are sampled at the same time. Media placeholder tokens are
        never sampled.
        Args:
            until: with what the call begins, and when it stops. When that is depends on the number
                of forward passes, not on the time that they take, unless it is interrupted. What
                completes a completion that an earlier call has begun is seeded as a completion of
                this step. None: all completions begin now, and are sampled to their ends.
            on_progress: called with the number of newly finished completions every few tokens or
                seconds: 0 after tokens that finish none, None if the engine does not know of any
                progress. It may raise, which ends the call.
            on_group: called in the calling thread, once for each prompt, as soon as all of its
                completions have ended or one has failed twice; with the list that is returned.
        Raises: EngineError outside awake(); RolloutError if the engine fails.
        """
        ...

    def pop_metrics(self) -> Metrics:
        """Return the counts of requests that were submitted again, since the last call."""
        ...

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        ...


InterruptKind = Literal["drain", "stop"]


class Interruption:
    """Ends a call of generate early: one thread asks for it, the one that samples looks.

    drain: completions that have a token go on to their ends, and no others begin. stop: all stop.
    """

    def __init__(self) -> None:
        """Ask for nothing yet."""
        self._kind: InterruptKind | None = None

    @property
    def kind(self) -> InterruptKind | None:
        """What is asked for."""
        return self._kind

    def ask(self, kind: InterruptKind) -> None:
        """Ask for this, unless a stop is asked for already."""
        if self._kind != "stop":
            self._kind = kind


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A prompt whose completions have not all ended.

    completions: n, some of them unfinished; () to sample it from the start. num_carried: how many
    steps have left it to the next one.
    """

    prompt: Prompt
    completions: tuple[Completion, ...] = ()
    num_carried: int = 0


@dataclass(frozen=True, slots=True)
class Until:
    """When a call stops sampling before all completions have ended, and with what it begins.

    num_groups: it stops as soon as all completions of so many prompts have ended,
    num_required: those of the first num_required prompts among them.
    begun: for each of the first prompts, all completions that an earlier call has begun, which
    continue from their tokens unless they have ended; () for a prompt that begins in this call.
    interruption: ends the call, too, when it is asked for; the result then depends on the time.
    """

    num_groups: int
    num_required: int = 0
    begun: tuple[tuple[Completion, ...], ...] = ()
    interruption: Interruption | None = None

    @property
    def interrupted(self) -> InterruptKind | None:
        """What the interruption asks for."""
        return None if self.interruption is None else self.interruption.kind

    def of_share(self, indices: range) -> Until:
        """Return the part of a replica that samples the prompts of these indices.

        Each replica stops by itself, so that the result does not depend on which of them is faster.
        """

        def count(number: int) -> int:
            return len(range(indices.start, min(number, indices.stop), indices.step))

        begun = self.begun[indices.start : indices.stop : indices.step]
        return Until(count(self.num_groups), count(self.num_required), begun, self.interruption)


def require_local_weights(weights: WeightsHandle) -> LocalWeights:
    """Return the handle if its weights are in this process. Raises: EngineError if not."""
    if not isinstance(weights, LocalWeights):
        raise EngineError(
            f"A rollout engine in this process cannot load {type(weights).__name__}. Give it the weights() of a train "
            "engine in the same process."
        )
    return weights
