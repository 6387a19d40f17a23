"""What happens when files that only report cannot be written: the run goes on.

A fault is reported when it begins and when it ends; each step tries again. Lines of metrics.jsonl
wait in memory meanwhile; rollouts and images are lost. At the end the run says what is missing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from trigon.report.metrics import METRICS
from trigon.report.run_folder import RunFolder
from trigon.system.disk import describe_fault, fault_number

MAX_WAITING = 10_000
"""Lines of metrics.jsonl that may wait; beyond them the first are lost."""


class LogFaults:
    """Counts what is lost, by kind. May be used from several threads.

    folder: of the run. warn: called with a message when a fault begins, and when it ends.
    """

    def __init__(self, folder: Path, *, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._lock = threading.Lock()
        self._lost: dict[str, int] = {}
        self._failing: set[str] = set()

    def lost(self, kind: str, number: int, error: OSError, *, consequence: str = "They are lost") -> None:
        """Count what could not be written. kind: in the plural. consequence: a sentence."""
        with self._lock:
            begins = kind not in self._failing
            self._failing.add(kind)
            if number:
                self._lost[kind] = self._lost.get(kind, 0) + number
        if begins:
            reason = str(error) if fault_number(error) is None else describe_fault(error, self._folder)
            self._warn(f"{kind} cannot be written: {reason}. {consequence}; the run goes on, and each step tries again")

    def written(self, kind: str) -> None:
        """Note that something of this kind was written."""
        with self._lock:
            ends = kind in self._failing
            self._failing.discard(kind)
        if ends:
            self._warn(f"{kind} are written again")

    def summarize(self) -> None:
        """Warn of all that is lost."""
        with self._lock:
            lost = sorted(self._lost.items())
        if lost:
            numbers = ", ".join(f"{number:,} {kind}" for kind, number in lost)
            self._warn(f"could not be written and are not in {self._folder}: {numbers}")


class MetricsLog:
    """Writes the lines of metrics.jsonl, in order, as soon as that is possible.

    warn: called with a message if the run folder had to be made again.
    """

    def __init__(self, folder: RunFolder, faults: LogFaults, *, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._faults = faults
        self._warn = warn
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque()
        self._kind = f"lines of {METRICS}"

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step, after those that wait.

        Raises: ConfigError if the run folder was moved, and another run has taken its place.
        """
        self._waiting.append((step, metrics))
        try:
            self._write()
        except OSError as error:
            excess = max(len(self._waiting) - MAX_WAITING, 0)
            for _ in range(excess):
                self._waiting.popleft()
            self._faults.lost(self._kind, excess, error, consequence="They wait in memory")
        else:
            self._faults.written(self._kind)

    def close(self) -> None:
        """Try a last time to write what waits, and count it as lost if that fails."""
        try:
            self._write()
        except OSError as error:
            self._faults.lost(self._kind, len(self._waiting), error)

    def _write(self) -> None:
        if self._waiting and (moved := self._folder.restore()) is not None:
            self._warn(moved)
        while self._waiting:
            self._folder.append_metrics(*self._waiting[0])
            self._waiting.popleft()
