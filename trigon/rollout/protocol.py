"""The interface of a rollout engine, which samples completions.

VllmEngine, TransformersEngine and FakeEngine satisfy it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

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


InterruptKind = Literal["drain", "stop"]


class Interruption:
    """Ends a call of generate_until early: one thread asks for it, the one that samples looks.

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


@dataclass(frozen=True, slots=True)
class Until:
    """When a call stops sampling before all completions have ended, and with what it begins.

    num_groups: it stops as soon as all completions of so many prompts have ended,
    num_required: those of the first num_required prompts among them.
    begun: for each of the first prompts, the n completions that an earlier call has begun, which go
    on from their tokens unless they have ended; () for a prompt that begins anew.
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

    def of_replica(self, replica: int, num_replicas: int) -> Until:
        """Return the part of one replica, which samples every num_replicas-th prompt.

        Each stops by itself, so that the result does not depend on which of them is faster.
        """

        def count(number: int) -> int:
            return len(range(replica, number, num_replicas))

        return Until(
            count(self.num_groups),
            count(self.num_required),
            self.begun[replica::num_replicas],
            self.interruption,
        )


@runtime_checkable
class StoppingEngine(RolloutEngine, Protocol):
    """A rollout engine that can stop before all completions have ended, and go on with them."""

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
        """Return what generate returns, some completions of some prompts being unfinished.

        on_group is called for a prompt only once all its completions have ended. What a completion
        goes on with is seeded as a completion that begins in this step (seeds.sample_seed). For
        completions of one turn. When the call stops depends on the number of forward passes, not on
        the time that they take, unless it is interrupted.
        """
        ...


def require_local_weights(weights: WeightsHandle) -> LocalWeights:
    """Return the handle if its weights are in this process. Raises: EngineError if not."""
    if not isinstance(weights, LocalWeights):
        raise EngineError(
            f"A rollout engine in this process cannot load {type(weights).__name__}. Give it the weights() of a train "
            "engine in the same process."
        )
    return weights
