"""Samples in a thread, beside the step that the loop makes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from trigon.report.recorder import ReadImages
from trigon.report.rollouts import RolloutRow
from trigon.run import Run

Result = TypeVar("Result")

_CLOSE_SECONDS = 10.0
"""How long the end of a run waits for the thread that samples."""


class SamplingThread(Generic[Result]):
    """A call of a function that samples for a step. report: for what it calls, in the thread."""

    def __init__(self, run: Run, step: int) -> None:
        """Prepare the call; start() makes it."""
        self.step = step
        self.report = ThreadReport(run, self._advance)
        self._num_progress = 0
        self._is_given_up = False
        self._future: Future[Result]

    def start(self, sample: Callable[[], Result]) -> None:
        """Call the function in the thread."""
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"sampling for step {self.step}")
        self._future = thread.submit(sample)
        thread.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        """Whether everything is sampled and scored, or has failed."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """The error of the call; None: not yet, or none."""
        return self._future.exception() if self.is_done else None

    @property
    def result(self) -> Result | None:
        """The result of the call; None: not yet, or an error."""
        return self._future.result() if self.is_done and self.error is None else None

    def wait(self, seconds: float) -> bool:
        """Wait, but not longer than this; return is_done."""
        wait([self._future], seconds)
        return self.is_done

    def pop_progress(self) -> bool:
        """Return whether the sampling has made progress since the last call."""
        made, self._num_progress = self._num_progress, 0
        return made > 0

    def give_up(self) -> None:
        """End the sampling, and wait for its thread for a while."""
        self._is_given_up = True
        self.wait(_CLOSE_SECONDS)

    def _advance(self, k: int | None) -> None:
        if self._is_given_up:
            raise InterruptedError(f"the sampling for step {self.step} was given up")
        self._num_progress += k is not None


@dataclass(frozen=True, slots=True)
class ThreadReport:
    """The report of what samples in a thread: phases of the loop are shown and timed, not its own.

    advance: called with the progress of all phases.
    """

    run: Run
    advance: Callable[[int | None], None]

    @contextmanager
    def phase(self, name: str, *, total: int | None = None) -> Iterator[Callable[[int | None], None]]:
        """See Phase."""
        self.advance(0)
        yield self.advance

    def warn(self, text: str) -> None:
        """See Reporter."""
        self.run.report.warn(text)

    def filtered_rollouts(self, step: int, rows: Sequence[RolloutRow], *, read_images: ReadImages) -> None:
        """See Reporter. With a group filter nothing is sampled ahead."""
        assert not rows
