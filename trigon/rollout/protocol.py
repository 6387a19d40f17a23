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

        Prompt i of a call of generate is sampled by replica i % num_replicas, unless the call
        continues what earlier ones have begun (distributed/balance.py, deal).
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
        until: Until | None = None,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of prompts and samples.

        These are sampling.num_completions: with sampling.with_baseline, the greedy one is the last.

        An empty list for a prompt with a completion that the engine failed to sample twice. With
        until, some completions of some prompts may be unfinished. An episode that is unfinished is
        kept, with its environment, for the next call with until. If that does not continue it, it
        is stopped. If it was not kept, as in another process, it begins again from its start.

        Sample i of a prompt is seeded by (sampling.seed, prompt.draw, prompt_id, i) alone, so it
        does not depend on which other prompts are sampled at the same time, nor on the step. Media
        placeholder tokens are never sampled.
        Args:
            until: with what the call begins, and when it stops. The moment of the stop depends on
                the number of forward passes, not on the time that they take, unless the call is
                interrupted, or episodes do not run turn by turn (Episodes). None: all
                completions begin now, and are sampled to their ends.
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
    """Ends a call of generate early: one thread requests it, and the thread that samples checks.

    drain: turns that have a token continue to their ends, and no other turns begin; a completion of
    one turn is therefore sampled to its end. stop: all turns stop.
    kind: the requested kind; None: none is requested.
    """

    kind: InterruptKind | None = None

    def ask(self, kind: InterruptKind) -> None:
        """Request this, unless a stop is requested already."""
        if self.kind != "stop":
            self.kind = kind


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

    num_groups: it stops as soon as all completions of num_groups prompts have ended.
    num_required: the first num_required prompts must be among them.
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
        """The kind that the interruption requests; None: none."""
        return None if self.interruption is None else self.interruption.kind

    def of_shares(self, shares: Sequence[Sequence[int]]) -> list[Until]:
        """Return the part of each replica, which samples the prompts of these ascending indices.

        Each replica stops by itself, so that the result does not depend on which of them is faster.
        The parts of num_groups add up to it. Each is in proportion to the prompts of the replica,
        so that no replica is idle while another one has all the work, but not less than its
        required prompts.
        """
        num_prompts = sum(map(len, shares))
        num_groups = min(self.num_groups, num_prompts)
        required = [sum(index < self.num_required for index in share) for share in shares]
        parts = list(required)
        for _ in range(num_groups - sum(required)):
            missing = [num_groups * len(share) - part * num_prompts for share, part in zip(shares, parts, strict=True)]
            parts[missing.index(max(missing))] += 1
        return [
            Until(
                part,
                num_required,
                tuple(self.begun[index] for index in share if index < len(self.begun)),
                self.interruption,
            )
            for share, part, num_required in zip(shares, parts, required, strict=True)
        ]


def require_awake(is_awake: bool) -> None:
    """Check that an engine is inside awake(). Raises: EngineError if not."""
    if not is_awake:
        raise EngineError(
            "generate() was called while the rollout engine sleeps. Call it inside `with engine.awake(...)`."
        )


def require_local_weights(weights: WeightsHandle) -> LocalWeights:
    """Return the handle if its weights are in this process. Raises: EngineError if not."""
    if not isinstance(weights, LocalWeights):
        raise EngineError(
            f"A rollout engine in this process cannot load {type(weights).__name__}. Give it the weights() of a train "
            "engine in the same process."
        )
    return weights
