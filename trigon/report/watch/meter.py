"""Measures the memory of a run on this machine, once for each step.

Memory of the driver, of the reward workers and of the other processes below the driver; what the
machine or the control group has left; shared memory. A few milliseconds a step, and a thread that
reads what is left once a second, because a step needs most in its middle.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from types import TracebackType

from trigon.metrics import Max, Metric, Metrics, Min
from trigon.system.gpu_memory import gpu_memory_now
from trigon.system.host_memory import count_usable_bytes
from trigon.system.processes import ProcessTree, count_resident_bytes

SECONDS = 1.0
"""Interval at which what is left is read."""

SHARED_MEMORY = "/dev/shm"


def no_processes() -> Collection[int]:
    """Return no process ids."""
    return ()


def no_metrics() -> Metrics:
    """Return no metrics."""
    return {}


class MemoryMeter:
    """Measures until it is closed.

    reward_workers: their process ids now. workers: those of the worker group on this machine, which
    measure themselves. object_store: metrics of Ray's object store.
    left_gb: what was left at the last measure(), in GiB; None: not known.
    """

    def __init__(
        self,
        *,
        reward_workers: Callable[[], Collection[int]] = no_processes,
        workers: Callable[[], Collection[int]] = no_processes,
        object_store: Callable[[], Metrics] = no_metrics,
    ) -> None:
        self._reward_workers = reward_workers
        self._workers = workers
        self._object_store = object_store
        self.left_gb: float | None = None
        self._closed = threading.Event()
        self._least_free: int | None = None
        self._lock = threading.Lock()
        self._read_free()
        self._thread = threading.Thread(target=self._read_until_closed, name="memory", daemon=True)
        self._thread.start()

    def measure(self) -> dict[str, Metric]:
        """Return the memory now, and the least that was left since the last call. In GiB."""
        now = self._read_free()
        self.left_gb = None if now is None else now / 2**30
        with self._lock:
            free, self._least_free = self._least_free, None
        driver, rewards = os.getpid(), set(self._reward_workers())
        workers = set(self._workers())
        tree = ProcessTree()
        children = tree.below(driver, without={*rewards, *workers})
        measured: dict[str, Metric] = {
            "perf/memory_driver_gb": Max(count_resident_bytes([driver]) / 2**30),
            "perf/memory_reward_workers_gb": Max(count_resident_bytes({*rewards, *tree.below(*rewards)}) / 2**30),
            "perf/memory_children_gb": Max(count_resident_bytes(children) / 2**30),
            **_measure_shared_memory(),
            **gpu_memory_now(),
            **self._object_store(),
        }
        if free is not None:
            measured["perf/memory_free_gb"] = Min(free / 2**30)
        return measured

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> MemoryMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_free(self) -> int | None:
        free = count_usable_bytes()
        with self._lock:
            if free is not None:
                self._least_free = free if self._least_free is None else min(self._least_free, free)
        return free

    def _read_until_closed(self) -> None:
        while not self._closed.wait(SECONDS):
            self._read_free()


def measure_worker() -> dict[str, Metric]:
    """Return the memory of this worker of a worker group with all below it, and what is left here.

    In GiB; of several workers, the largest, and the least that is left on any machine.
    """
    pids = [os.getpid(), *ProcessTree().below(os.getpid())]
    measured: dict[str, Metric] = {
        "perf/memory_worker_gb": Max(count_resident_bytes(pids) / 2**30),
        **gpu_memory_now(),
    }
    free = count_usable_bytes()
    if free is not None:
        measured["perf/memory_free_gb"] = Min(free / 2**30)
    return measured


def _measure_shared_memory() -> dict[str, Metric]:
    try:
        system = os.statvfs(SHARED_MEMORY)
    except OSError:  # not Linux
        return {}
    return {
        "perf/shared_memory_used_gb": Max((system.f_blocks - system.f_bfree) * system.f_frsize / 2**30),
        "perf/shared_memory_free_gb": Min(system.f_bavail * system.f_frsize / 2**30),
    }
