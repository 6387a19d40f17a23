"""Measures the memory of a run once a step, and finds growth that will reach its limit.

The meter takes a few milliseconds a step, and has a thread that reads what is left once a second,
because a step needs most memory in its middle. The slope of what is used, by Theil and Sen over the
latest steps after a warm-up, says how many steps are left. A process starts with its memory empty,
so nothing of this is in a checkpoint.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import NormalDist, median

from trigon.metrics import Max, Metric, Metrics, Min
from trigon.system.machine import count_usable_bytes, gpu_memory_now
from trigon.system.processes import count_resident_bytes, descendants

SECONDS = 1.0
"""Interval at which what is left is read."""

STEPS_TO_STOP = 5
"""The run is stopped when memory lasts for fewer steps than these."""

WARM_UP_STEPS = 5
"""First steps of a process, which are left out: caches fill, and the optimizer gets its states."""

WINDOW_STEPS, LEAST_STEPS_TO_WARN, PARTS = 60, 40, 4
"""Latest steps whose slope can warn, the fewest of them (by then growth that slows down, as of
caches, is over), and the parts of the window in each of which memory has to grow: a few jumps are
no leak."""

LEAST_STEPS = 8
"""Latest steps whose slope can stop the run: the fewest with which a slope is certain."""

LEAST_SHARE = 0.25
"""Slope of each part of the window as a share of the slope of the whole window."""

LEAST_GROWTH_GB = 0.0625
"""Growth over the steps that are compared below which nothing is reported."""

CONFIDENCE = 0.99
"""The whole interval of this confidence has to be above 0."""


class MemoryMeter:
    """Measures until it is closed.

    reward_workers: returns their process ids. workers: returns the ids of the workers on
    this machine, which measure themselves. object_store: returns metrics of Ray's object store.
    left_gb: what was left at the last measure(), in GiB; None if that is unknown.
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
        self.left_gb: float | None = None
        self._closed = threading.Event()
        self._least_left: float | None = None
        self._lock = threading.Lock()
        self._read_left()
        self._thread = threading.Thread(target=self._read_until_closed, name="memory", daemon=True)
        self._thread.start()

    def measure(self) -> dict[str, Metric]:
        """Return the memory now, and the least that was left since the last call, in GiB."""
        self.left_gb = self._read_left()
        with self._lock:
            least, self._least_left = self._least_left, None
        driver, rewards, workers = os.getpid(), set(self._reward_workers()), set(self._workers())
        children = descendants(driver, without={*rewards, *workers})
        return {
            "perf/memory_driver_gb": Max(count_resident_bytes([driver]) / 2**30),
            "perf/memory_reward_workers_gb": Max(count_resident_bytes({*rewards, *descendants(*rewards)}) / 2**30),
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_left(self) -> float | None:
        left = count_usable_bytes()
        if left is None:
            return None
        with self._lock:
            self._least_left = min(left / 2**30, self._least_left or float("inf"))
        return left / 2**30

    def _read_until_closed(self) -> None:
        while not self._closed.wait(SECONDS):
            self._read_left()


def measure_worker() -> dict[str, Metric]:
    """Return the memory of this worker of a worker group with all below it, and what is left here.

    In GiB. Over several workers, the largest use counts, and the smallest rest on any machine.
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


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """Memory that has a limit.

    used: metrics whose sum is what is used, in GiB; left: the metric of what is left. consequence:
    what happens at the limit. ends_run: it ends the run, so that stopping before is better.
    """

    name: str
    used: tuple[str, ...]
    left: str
    consequence: str
    ends_run: bool = True


WORKER = "perf/memory_worker_gb"
"""The memory of the largest worker of a worker group."""

HOST = MemoryKind(
    "host memory",
    ("perf/memory_driver_gb", "perf/memory_reward_workers_gb", "perf/memory_children_gb", WORKER),
    "perf/memory_free_gb",
    "the kernel kills the run",
)
KINDS: tuple[MemoryKind, ...] = (
    HOST,
    MemoryKind("GPU memory", ("perf/gpu_memory_allocated_gb",), "perf/gpu_memory_free_gb", "an allocation fails"),
    MemoryKind(
        "shared memory (/dev/shm)",
        ("perf/shared_memory_used_gb",),
        "perf/shared_memory_free_gb",
        "a process that writes to it is killed",
    ),
    MemoryKind(
        "Ray's object store",
        ("perf/object_store_used_gb",),
        "perf/object_store_free_gb",
        "objects are written to disk",
        ends_run=False,
    ),
)

_ADVICE = {
    "perf/memory_reward_workers_gb": "The reward function keeps what it should free: a cache or a list that grows",
    "perf/memory_driver_gb": "A hook or a logger in this process, or Trigon itself, keeps what it should free",
    WORKER: "The trainer or vLLM in a worker keeps what it should free",
    "perf/memory_children_gb": "A process below the driver, such as vLLM's, keeps what it should free",
}


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that grows.

    first_step: the first step of the slope. gb_per_step: the slope. left_gb: what was left in the
    last step, and save_gb: what a save takes of that, 0 if the limit is reached without one.
    growing: the metrics that grow, the fastest first, with GiB per step. is_lasting: it grows all
    over the window. num_workers: workers of a machine.
    """

    kind: MemoryKind
    first_step: int
    gb_per_step: float
    left_gb: float
    growing: tuple[tuple[str, float], ...]
    is_lasting: bool
    save_gb: float
    num_workers: int

    @property
    def steps_left(self) -> float:
        """Steps until nothing is left; 0 if a save has no room now."""
        return max(self.left_gb - self.save_gb, 0.0) / self.gb_per_step

    def describe(self) -> str:
        """Return what grows, how fast, when it reaches the limit, and what to look at."""
        parts = ", ".join(
            f"{key} by {1024 * slope:.3g}"
            + (f" in each of {self.num_workers} workers" if key == WORKER and self.num_workers > 1 else "")
            for key, slope in self.growing
        )
        save = f", of which a save takes {self.save_gb:.2f} GiB" if self.save_gb else ""
        fastest = self.growing[0][0] if self.growing else ""
        return (
            f"{self.kind.name} grows by {1024 * self.gb_per_step:.3g} MiB per step since step {self.first_step} "
            f"({parts} MiB), and {self.left_gb:.2f} GiB are left{save}: at this rate {self.kind.consequence} in "
            f"{self.steps_left:,.0f} steps. {_ADVICE.get(fastest, 'docs/metrics.md explains the memory metrics')}"
        )


class MemoryGrowth:
    """The memory of the latest steps, of each kind.

    total_steps: number of the run's last step; growth that reaches no limit before it is none.
    num_workers: workers on one machine, which grow alike; their metric is of the largest one.
    save_gb: host memory into which a save copies weights and optimizer states, on one machine. A
    run that is stopped saves, so that much has to be left. steps_to_stop: None: STEPS_TO_STOP.
    """

    def __init__(
        self, total_steps: int, *, num_workers: int = 1, save_gb: float = 0.0, steps_to_stop: int | None = None
    ) -> None:
        self._total_steps = total_steps
        self._num_workers = num_workers
        self._save_gb = save_gb
        self._steps_to_stop = STEPS_TO_STOP if steps_to_stop is None else steps_to_stop
        self._left_now: float | None = None
        self._num_seen = 0
        self._steps: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=WINDOW_STEPS)

    def add(self, step: int, metrics: Mapping[str, float], *, left_now_gb: float | None = None) -> None:
        """Remember the memory of a step.

        left_now_gb: host memory left at its end, where a save would be; more than the least of the
        step. None: it is not known, or what a save in progress has copied is missing in it.
        """
        self._left_now = left_now_gb
        self._num_seen += 1
        if self._num_seen > WARM_UP_STEPS:
            keys = {key for kind in KINDS for key in (*kind.used, kind.left)}
            self._steps.append((step, {key: metrics[key] for key in keys if key in metrics}))

    def find(self) -> tuple[Growth, bool] | None:
        """Return the growth that reaches its limit first, and whether it has to stop the run."""
        found: list[tuple[Growth, bool]] = []
        for growth in filter(None, map(self._growth, KINDS)):
            is_near = growth.steps_left <= self._steps_to_stop
            reaches_limit = self._steps[-1][0] + growth.steps_left < self._total_steps
            if is_near or (reaches_limit and growth.is_lasting and len(self._steps) >= LEAST_STEPS_TO_WARN):
                found.append((growth, is_near and growth.kind.ends_run))
        return min(found, key=lambda each: (not each[0].kind.ends_run, each[0].steps_left), default=None)

    def _growth(self, kind: MemoryKind) -> Growth | None:
        counts = {key: self._num_workers if key == WORKER else 1 for key in kind.used}
        points = [
            (step, sum(metrics.get(key, 0.0) * count for key, count in counts.items()), metrics[kind.left])
            for step, metrics in self._steps
            if isfinite(metrics.get(kind.left, float("nan")))
        ]
        if len(points) < LEAST_STEPS:
            return None
        steps, used, left = zip(*points, strict=True)
        # A leak may have begun in the middle of the window, or become faster.
        slopes = [(steps[-LEAST_STEPS], _certain_slope(steps[-LEAST_STEPS:], used[-LEAST_STEPS:]))]
        if len(points) >= LEAST_STEPS * PARTS:
            slopes.append((steps[0], _certain_slope(steps, used, parts=PARTS)))
        first, rate = max(slopes, key=lambda slope: slope[1])
        if rate == 0.0:
            return None
        growing = []
        for key in kind.used:
            values = [(step, metrics[key]) for step, metrics in self._steps if step >= first and key in metrics]
            if len(values) >= LEAST_STEPS:
                slope, low, _ = fit_slope(*zip(*values, strict=True))
                growing += [(key, slope)] if low > 0 else []
        limits = [(left[-1], 0.0)]
        if kind is HOST and self._left_now is not None:
            limits.append((self._left_now, self._save_gb))
        left_gb, save_gb = min(limits, key=lambda limit: limit[0] - limit[1])
        return Growth(
            kind,
            first,
            rate,
            left_gb,
            tuple(sorted(growing, key=lambda part: -part[1])),
            is_lasting=len(slopes) > 1 and slopes[1][1] > 0,
            save_gb=save_gb,
            num_workers=self._num_workers,
        )


def _certain_slope(steps: Sequence[int], used: Sequence[float], *, parts: int = 1) -> float:
    """Return the slope if memory certainly grows, in each of these parts too; otherwise 0."""
    slope, low, _ = fit_slope(steps, used)
    if low <= 0 or slope * (steps[-1] - steps[0]) < LEAST_GROWTH_GB:
        return 0.0
    cuts = [len(steps) * part // parts for part in range(parts + 1)]
    least = min(fit_slope(steps[a:b], used[a:b])[0] for a, b in itertools.pairwise(cuts))
    return slope if least >= LEAST_SHARE * slope else 0.0


def fit_slope(
    xs: Sequence[float], ys: Sequence[float], *, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Return the median of the slopes of all pairs of points, and both ends of its interval.

    Single outliers, up to 29 % of the points, do not move it. The interval is Sen's (1968, section
    6), from the normal approximation of Kendall's statistic, without ties in x. It takes the
    points as independent; successive memory measurements are not, so it is too narrow rather than
    too wide.
    Args: xs: distinct, two or more.
    """
    n = len(xs)
    slopes = sorted((ys[j] - ys[i]) / (xs[j] - xs[i]) for i in range(n) for j in range(i + 1, n))
    half_width = NormalDist().inv_cdf(0.5 + confidence / 2) * sqrt(n * (n - 1) * (2 * n + 5) / 18)
    lower = max(0, int((len(slopes) - half_width) / 2))
    upper = min(len(slopes) - 1, int((len(slopes) + half_width) / 2) + 1)
    return median(slopes), slopes[lower], slopes[upper]
