"""Samples in a thread beside the current step, and measures which of them waits for the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

from trigon.metrics import Mean, Metrics, Sum
from trigon.types import Phase

Result = TypeVar("Result")

_CLOSE_SECONDS = 10.0
"""How long the end of a run waits for the thread that samples."""


class SamplingCall(Generic[Result]):
    """A call of a function that samples, in a thread of its own."""

    def __init__(self, step: int, sample: Callable[[Phase], Result]) -> None:
        """Start the call.

        step: the step for which it samples, or in which it begins. sample: gets a Phase that
        counts its progress; only the thread that makes the step shows and times phases.
        """
        self.step = step
        self._num_progress = 0
        self._is_given_up = False
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"sampling for step {step}")
        self._future = thread.submit(sample, self._phase)
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

    @contextmanager
    def _phase(self, name: str, *, total: int | None = None) -> Iterator[Callable[[int | None], None]]:
        """See Phase."""
        self._advance(0)
        yield self._advance

    def _advance(self, k: int | None) -> None:
        if self._is_given_up:
            raise InterruptedError(f"the sampling for step {self.step} was given up")
        self._num_progress += k is not None


class PoolClock:
    """Adds up the time for which samplers sample, and for which learners wait for them.

    clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._popped = clock()
        self._sampling_since: float | None = None
        self._sampled = 0.0
        self._waited = 0.0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the time in the context as sampling. From any thread, one at a time."""
        with self._lock:
            self._sampling_since = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._sampled += self._sampling_seconds()
                self._sampling_since = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the context as time for which the learners wait."""
        started = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - started

    def pop_metrics(self) -> Metrics:
        """Return the idle seconds of both pools since the last call, and their fractions."""
        with self._lock:
            now = self._clock()
            seconds = max(now - self._popped, 1e-9)
            sampled = self._sampled + self._sampling_seconds()
            waited, self._waited = self._waited, 0.0
            self._sampled, self._popped = 0.0, now
            if self._sampling_since is not None:
                self._sampling_since = now
        idle = max(seconds - sampled, 0.0)
        return {
            "perf/learners_idle_seconds": Sum(waited),
            "perf/learners_idle_fraction": Mean(waited, seconds),
            "perf/samplers_idle_seconds": Sum(idle),
            "perf/samplers_idle_fraction": Mean(idle, seconds),
        }

    def _sampling_seconds(self) -> float:
        """Return the seconds of the current sampling, since the last pop_metrics."""
        return 0.0 if self._sampling_since is None else self._clock() - max(self._sampling_since, self._popped)
