"""Whether memory grows from step to step, and will reach its limit: the watcher `memory`.

Each kind of memory has two metrics, what is used and what is left. The slope of what is used, by
Theil and Sen over the latest steps after a warm-up, says how many steps are left. A process starts
with its memory anew, so unlike the other watchers this one has no state in a checkpoint.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from trigon.report.watch.slope import fit_slope

WARM_UP_STEPS = 5
"""First steps of a process, which are left out: caches fill, and the optimizer gets its states."""

WINDOW_STEPS = 60
"""Latest steps whose slope is computed."""

LEAST_STEPS = 8
"""Latest steps that can stop the run: the fewest with which a slope is certain, and one jump among
them is none."""

LEAST_STEPS_TO_WARN = 40
"""Steps after the warm-up before a warning: by then growth that slows down, as of caches, is over.
"""

PARTS = 4
"""Parts of the window, in each of which memory has to grow: a few jumps are no leak."""

LEAST_SHARE = 0.25
"""Slope of each part as a share of that of the window."""

LEAST_GROWTH_GB = 0.0625
"""Growth over the steps that are compared below which nothing is said: 64 MiB."""

CONFIDENCE = 0.99
"""The whole interval of this confidence has to be above 0."""


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """A kind of memory with a limit. used, left: their metrics, in GiB.

    used: their sum counts. consequence: what happens at the limit. ends_run: it is the end of the
    run, so that stopping before is better.
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
    MemoryKind(
        "GPU memory",
        ("perf/gpu_memory_allocated_gb",),
        "perf/gpu_memory_free_gb",
        "an allocation fails",
    ),
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


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that grows.

    first_step, last_step: of the slope. gb_per_step: the slope. left_gb: what was left in the last
    step, and save_gb: what a save takes of that; 0 if the limit is reached without one. growing:
    the metrics that grow, the fastest first, with GiB per step. is_lasting: it grows all over the
    window. num_workers: of a machine.
    """

    kind: MemoryKind
    first_step: int
    last_step: int
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
        """Return what grows, how fast, and when it reaches the limit."""
        parts = ", ".join(
            f"{key} by {1024 * slope:.3g}"
            + (f" in each of {self.num_workers} workers" if key == WORKER and self.num_workers > 1 else "")
            for key, slope in self.growing
        )
        save = f", of which a save takes {self.save_gb:.2f} GiB" if self.save_gb else ""
        return (
            f"{self.kind.name} grows by {1024 * self.gb_per_step:.3g} MiB per step since step {self.first_step} "
            f"({parts} MiB), and {self.left_gb:.2f} GiB are left{save}: at this rate {self.kind.consequence} in "
            f"{self.steps_left:,.0f} steps"
        )


class MemoryGrowth:
    """The memory of the latest steps, of each kind.

    num_workers: of a worker group on one machine: they grow alike, and their metric is that of the
    largest. save_gb: host memory into which a save copies weights and optimizer states, on one
    machine. A run that is stopped saves, so that much has to be left.
    """

    def __init__(self, *, num_workers: int = 1, save_gb: float = 0.0) -> None:
        self._num_workers = num_workers
        self._save_gb = save_gb
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

    def find(self, *, steps_to_stop: int, total_steps: int) -> tuple[Growth, bool] | None:
        """Return the growth that reaches its limit first, and whether it has to stop the run.

        It has to if the limit ends the run, and is reached within steps_to_stop steps. Growth that
        reaches no limit before the last step is none. total_steps: the number of the run's last
        step.
        """
        found: list[tuple[Growth, bool]] = []
        for kind in KINDS:
            growth = self._growth(kind)
            if growth is None:
                continue
            is_near = growth.steps_left <= steps_to_stop
            reaches_limit = growth.last_step + growth.steps_left < total_steps
            if is_near or (reaches_limit and growth.is_lasting and len(self._steps) >= LEAST_STEPS_TO_WARN):
                found.append((growth, is_near and kind.ends_run))
        return min(found, key=lambda each: (not each[0].kind.ends_run, each[0].steps_left), default=None)

    def _growth(self, kind: MemoryKind) -> Growth | None:
        points = [
            (step, sum(metrics.get(key, 0.0) * self._count(key) for key in kind.used), metrics[kind.left])
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
        parts = []
        for key in kind.used:
            values = [(step, metrics[key]) for step, metrics in self._steps if step >= first and key in metrics]
            if len(values) >= LEAST_STEPS:
                part = fit_slope(*zip(*values, strict=True), confidence=CONFIDENCE)
                if part.low > 0:
                    parts.append((key, part.value))
        growing = tuple(sorted(parts, key=lambda part: -part[1]))
        limits = [(left[-1], 0.0)]
        if kind is HOST and self._left_now is not None:
            limits.append((self._left_now, self._save_gb))
        left_gb, save_gb = min(limits, key=lambda limit: limit[0] - limit[1])
        return Growth(
            kind,
            first,
            steps[-1],
            rate,
            left_gb,
            growing,
            is_lasting=len(slopes) > 1 and slopes[1][1] > 0,
            save_gb=save_gb,
            num_workers=self._num_workers,
        )

    def _count(self, key: str) -> int:
        """Return how many processes of a machine have the memory of this metric."""
        return self._num_workers if key == WORKER else 1


def _certain_slope(steps: Sequence[int], used: Sequence[float], *, parts: int = 1) -> float:
    """Return the slope if memory certainly grows, in each of these parts too; otherwise 0."""
    slope = fit_slope(steps, used, confidence=CONFIDENCE)
    if slope.low <= 0 or slope.value * (steps[-1] - steps[0]) < LEAST_GROWTH_GB:
        return 0.0
    cuts = [len(steps) * part // parts for part in range(parts + 1)]
    least = min(fit_slope(steps[a:b], used[a:b]).value for a, b in itertools.pairwise(cuts))
    return slope.value if least >= LEAST_SHARE * slope.value else 0.0
