"""Measures how long the workers that learn, and those that sample, have nothing to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trigon.metrics import Mean, Metrics, Sum


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
        """Count the time in the context as that of sampling. From any thread, one at a time."""
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
        """Count the time in the context as that for which the learners wait."""
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
        """Return the seconds of the sampling that goes on now, since the last pop_metrics."""
        return 0.0 if self._sampling_since is None else self._clock() - max(self._sampling_since, self._popped)
