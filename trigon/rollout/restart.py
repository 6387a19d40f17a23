"""Starts a rollout engine again after it has failed, once in a run.

Does not depend on what the engine is: vLLM in this process, or in each of several workers.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from trigon.errors import RolloutError
from trigon.metrics import Metrics, Sum, merge
from trigon.rollout.protocol import OnGroup, RolloutEngine, Until
from trigon.system.stopping import SameCommand
from trigon.types import Completion, Prompt, SamplingParams, WeightsHandle

RESTART = "restart rollout engine"
"""The name of the phase in which an engine is started again."""


@runtime_checkable
class Restartable(Protocol):
    """What can start a rollout engine again after a RolloutError: the engine, or its workers."""

    def restart(self) -> None:
        """Drop the engine and start it again, asleep and without weights.

        Episodes that it keeps between calls are stopped, and begin again in the next one.
        Called outside awake(). Raises: RolloutError if it does not start.
        """
        ...


@dataclass(slots=True, eq=False)
class _Awake:
    """A context of awake() that has been entered. stack: ends it."""

    weights: WeightsHandle
    version: int
    stack: ExitStack = field(default_factory=ExitStack)


class RestartingEngine:
    """A rollout engine that is started again after its first RolloutError. Satisfies RolloutEngine.

    The new engine loads the trainer's weights, with all checks of a weight sync, and samples all
    prompts of the call that failed: a completion is a function of its seed and the weights, so the
    results are the same as without the failure, bit for bit on the CPU. Episodes that earlier calls
    had begun are an exception: they begin again. A second failure ends the run: an engine that
    fails again keeps failing.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        restart: Callable[[], object],
        *,
        warn: Callable[[str], None],
        same_command: SameCommand,
        phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Wrap an engine.

        restart: frees the device memory that the engine needs to start, and does what Restartable
        says. warn: called with a message when it is started again. same_command: continues the run
        after the second failure. phase: the context in which it is started again, made with its
        name: it takes as long as a start, and not as long as sampling or a weight sync may take.
        """
        self._engine = engine
        self._start_again = restart
        self._warn = warn
        self._same_command = same_command
        self._phase = phase
        self._contexts: list[_Awake] = []  # outermost first
        self._restarted = False
        self._num_restarts = 0  # since the last pop_metrics

    @property
    def num_replicas(self) -> int:
        """See RolloutEngine."""
        return self._engine.num_replicas

    @contextmanager
    def awake(self, weights: WeightsHandle, *, version: int) -> Iterator[None]:
        """See RolloutEngine. A weight sync that fails is made again by a new engine."""
        context = _Awake(weights, version)
        try:
            self._enter(context)
        except RolloutError as error:
            self._restart(error, [*self._contexts, context])
        self._contexts.append(context)
        try:
            with context.stack:  # of the engine that runs then: a restart enters it again
                yield
        finally:
            self._contexts.remove(context)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        until: Until | None = None,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See RolloutEngine. on_group is called once for each prompt, whatever fails."""
        finished: dict[int, Sequence[Completion]] = {}
        num_reported = 0
        while True:
            num_done = 0  # by this attempt

            def report_progress(num_more: int | None) -> None:
                nonlocal num_done, num_reported
                num_done += num_more or 0
                num_new, num_reported = max(num_done - num_reported, 0), max(num_reported, num_done)
                if on_progress is not None:
                    on_progress(None if num_more is None else num_new)

            def report_group(index: int, completions: Sequence[Completion]) -> None:
                if index not in finished:
                    finished[index] = completions
                    if on_group is not None:
                        on_group(index, completions)

            try:
                rows = self._engine.generate(
                    prompts, sampling, until=until, on_progress=report_progress, on_group=report_group
                )
            except RolloutError as error:
                self._restart(error, self._contexts)
                continue
            return [list(finished.get(index, row)) for index, row in enumerate(rows)]

    def pop_metrics(self) -> Metrics:
        """See RolloutEngine."""
        restarts, self._num_restarts = self._num_restarts, 0
        return merge(self._engine.pop_metrics(), {"rollout/engine_restarts": Sum(float(restarts))})

    def close(self) -> None:
        """See RolloutEngine."""
        self._engine.close()

    def _enter(self, context: _Awake) -> None:
        context.stack.enter_context(self._engine.awake(context.weights, version=context.version))

    def _restart(self, error: RolloutError, contexts: Sequence[_Awake]) -> None:
        """Start the engine again, and wake it in these contexts.

        Raises: RolloutError if that fails, or if it was already started again before.
        """
        if self._restarted:
            raise RolloutError(
                f"{error}\nThe rollout engine was already started again in this run, and has failed again. To "
                f"continue: {self._same_command.from_last('continues from the last checkpoint')}. "
                "docs/troubleshooting.md (The rollout engine fails) says what to look for"
            ) from error
        self._restarted = True
        self._num_restarts += 1
        self._warn(
            f"{error}\nThe rollout engine is started again, and loads the trainer's weights; a second time ends the run"
        )
        release_frames(error)
        for context in reversed(contexts):
            context.stack.close()
        try:
            with self._phase(RESTART):
                self._start_again()
            for context in contexts:
                self._enter(context)
        except RolloutError as again:
            raise RolloutError(f"{again}\nIt failed when it was started again after: {error}") from again


def release_frames(error: BaseException) -> None:
    """Clear the local variables of the calls that raised an error and its causes.

    They hold the engine that failed, whose memory the next one needs.
    """
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)
        raised = raised.__cause__ or raised.__context__
