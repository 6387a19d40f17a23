"""Measures the memory of a run once a step.

The meter takes a few milliseconds a step, and has a thread that reads what is left once a second,
because a step needs most memory in its middle.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from types import TracebackType

from trigon.metrics import Max, Metric, Metrics, Min
from trigon.system.gpu_memory import gpu_memory_now
from trigon.system.host_memory import count_usable_bytes
from trigon.system.processes import ProcessTree, count_resident_bytes, descendants

SECONDS = 1.0
"""Interval at which what is left is read."""


class MemoryMeter:
    """Measures until it is closed.

    reward_workers: returns their process ids. workers: returns the ids of the workers on
    this machine, which measure themselves. object_store: returns metrics of Ray's object store.
    """

    def __init__(
        self,
        *,
        reward_workers: Callable[[], Collection[int]] = tuple,
        workers: Callable[[], Collection[int]] = tuple,
        object_store: Callable[[], Metrics] = dict,
    ) -> None:
        self._reward_workers = reward_workers
        self._workers = workers
        self._object_store = object_store
        self._closed = threading.Event()
        self._least_left: float | None = None
        self._lock = threading.Lock()
        self._read_left()
        self._thread = threading.Thread(target=self._read_until_closed, name="memory", daemon=True)
        self._thread.start()

    def measure(self) -> dict[str, Metric]:
        """Return the memory now, and the least that was left since the last call, in GiB."""
        self._read_left()
        with self._lock:
            least, self._least_left = self._least_left, None
        driver, rewards, workers = os.getpid(), set(self._reward_workers()), set(self._workers())
        tree = ProcessTree()
        children = tree.below(driver, without={*rewards, *workers})
        return {
            "perf/memory_driver_gb": Max(count_resident_bytes([driver]) / 2**30),
            "perf/memory_reward_workers_gb": Max(count_resident_bytes({*rewards, *tree.below(*rewards)}) / 2**30),
            "perf/memory_children_gb": Max(count_resident_bytes(children) / 2**30),
            **_measure_shared_memory(),
            **gpu_memory_now(),
            **self._object_store(),
            **({} if least is None else {"perf/memory_free_gb": Min(least)}),
        }

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

    def _read_left(self) -> None:
        left = count_usable_bytes()
        if left is not None:
            with self._lock:
                self._least_left = min(left / 2**30, self._least_left or float("inf"))

    def _read_until_closed(self) -> None:
        while not self._closed.wait(SECONDS):
            self._read_left()


def measure_worker() -> dict[str, Metric]:
    """Return the memory of this worker of a worker group with all below it, and what is left here.

    In GiB. Of several workers, the largest counts, and the least that is left on any machine.
    """
    left = count_usable_bytes()
    pids = [os.getpid(), *descendants(os.getpid())]
    return {
        "perf/memory_worker_gb": Max(count_resident_bytes(pids) / 2**30),
        **gpu_memory_now(),
        **({} if left is None else {"perf/memory_free_gb": Min(left / 2**30)}),
    }


def _measure_shared_memory() -> dict[str, Metric]:
    try:
        system = os.statvfs("/dev/shm")
    except OSError:  # not Linux
        return {}
    return {
        "perf/shared_memory_used_gb": Max((system.f_blocks - system.f_bfree) * system.f_frsize / 2**30),
        "perf/shared_memory_free_gb": Min(system.f_bavail * system.f_frsize / 2**30),
    }
