"""Passes metrics and samples to the loggers of a run, so that none of them can stop or slow it.

Each logger has a thread, which makes its calls in order. A logger is given up, with one warning,
when a call raises, when one takes longer than CALL_SECONDS, and when MAX_PENDING reports wait for
it. Everything that it misses is in the run folder.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from trigon.report.loggers.protocol import Logger, Sample, SampleSplit

MAX_PENDING = 1000
"""Reports that may wait for a logger. A step has one, and one more where samples are shown."""
CALL_SECONDS = 300.0
"""How long a call may take while others wait for it."""
CLOSE_SECONDS = 60.0
"""How long a run waits at its end for all loggers together."""
CLOSE_SECONDS_AFTER_ERROR = 10.0

MakeSamples = Callable[[], Sequence[Sample]]


class Deliveries:
    """All loggers of a run, each with its thread.

    warn: called with a message when a logger is given up, from any thread.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        *,
        warn: Callable[[str], None],
        max_pending: int = MAX_PENDING,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        self._deliveries = [
            _Delivery(logger, warn=warn, max_pending=max_pending, call_seconds=call_seconds) for logger in loggers
        ]

    def any(self) -> bool:
        """Return whether there is a logger that has not been given up."""
        return any(delivery.is_alive for delivery in self._deliveries)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step to all loggers."""
        for delivery in self._deliveries:
            delivery.submit(functools.partial(_log_metrics, delivery.logger, step, dict(metrics)))

    def samples(self, step: int, split: SampleSplit, make_samples: MakeSamples) -> None:
        """Pass samples to all loggers. make_samples: called once, in the thread of a logger."""
        make_once = _Once(make_samples)
        for delivery in self._deliveries:
            delivery.submit(functools.partial(_log_samples, delivery.logger, step, split, make_once))

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Make the calls that wait and close all loggers, for at most so many seconds."""
        deadline = time.monotonic() + seconds
        for delivery in self._deliveries:
            delivery.submit_close()
        for delivery in self._deliveries:
            delivery.join(max(deadline - time.monotonic(), 0.0), limit=seconds)
        self._deliveries.clear()


class _Delivery:
    """The thread of one logger."""

    def __init__(self, logger: Logger, *, warn: Callable[[str], None], max_pending: int, call_seconds: float) -> None:
        self.logger = logger
        self.is_alive = True
        self._name = name_of(logger)
        self._warn = warn
        self._max_pending = max_pending
        self._call_seconds = call_seconds
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()  # None: the end
        self._call_started: float | None = None
        self._lock = threading.Lock()
        # A daemon: a call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._make_calls, name=f"logger-{self._name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> None:
        """Add a call to those that wait, unless the logger has been given up."""
        started = self._call_started
        if started is not None and time.monotonic() - started > self._call_seconds:
            self._give_up(f"has not returned from a call for {self._call_seconds:g} s")
        if self._calls.qsize() >= self._max_pending:
            self._give_up(f"is {self._max_pending} reports behind")
        if self.is_alive:
            self._calls.put(call)

    def submit_close(self) -> None:
        """Add the last call, after which the thread ends."""
        close = getattr(self.logger, "close", None)
        if close is not None:
            self.submit(close)
        self._calls.put(None)

    def join(self, seconds: float, *, limit: float) -> None:
        """Wait for the thread. limit: the time that all loggers had, for the warning."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._give_up(f"has not finished {limit:g} s after the end of the run")

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self.is_alive:
                continue
            self._call_started = time.monotonic()
            try:
                call()
            # SystemExit too: it would end this thread, which is the logger's own, without a word.
            except BaseException as error:  # noqa: BLE001  (see the module docstring)
                self._give_up(f"failed: {type(error).__name__}: {error}")
            self._call_started = None

    def _give_up(self, reason: str) -> None:
        with self._lock:
            was_alive, self.is_alive = self.is_alive, False
        if was_alive:
            self._warn(
                f"the logger {self._name} {reason}. It is no longer used; the run goes on, and all metrics and "
                "rollouts are in its folder"
            )


def name_of(logger: Logger) -> str:
    """Return the name of a logger in messages: its attribute `name`, or its type's."""
    return str(getattr(logger, "name", type(logger).__name__))


class _Once:
    """A function without arguments that is called once, by whichever thread asks first."""

    def __init__(self, make: MakeSamples) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Sequence[Sample] | None = None

    def __call__(self) -> Sequence[Sample]:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


# The methods are looked up in the logger's thread: one that is missing is the logger's failure.


def _log_metrics(logger: Logger, step: int, metrics: Mapping[str, float]) -> None:
    logger.log_metrics(step, metrics)


def _log_samples(logger: Logger, step: int, split: SampleSplit, make_samples: _Once) -> None:
    logger.log_samples(step, split, make_samples())
