"""Metrics that carry their own reduction, so that merging does not change their meaning.

Independent of loggers, collectives and tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, stored as total and count: Mean(6.0, 4).value is 1.5; nan if empty."""

    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")

    def merged(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum."""

    value: float

    def merged(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """The maximum."""

    value: float

    def merged(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    """The minimum."""

    value: float

    def merged(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class EffectiveShare:
    """The effective sample size of importance weights as a share of their number (Kong, 1992).

    total^2 / (count * squares), in (0, 1]: 1 if all weights are equal, nan if there are none.
    total: sum of the weights. squares: sum of their squares.
    """

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        return self.total**2 / (self.count * self.squares) if self.squares else float("nan")

    def merged(self, other: EffectiveShare) -> EffectiveShare:
        return EffectiveShare(self.total + other.total, self.squares + other.squares, self.count + other.count)


Metric = Mean | Sum | Max | Min | EffectiveShare
Metrics = Mapping[str, Metric]


def mean_of(values: Iterable[float]) -> Mean:
    """Return the unweighted mean of values, whose count is their number."""
    values = list(values)
    return Mean(float(sum(values)), float(len(values)))


def mean_max_min(name: str, numbers: Iterable[float]) -> dict[str, Metric]:
    """Return the mean, the largest and the smallest number, under name/mean, name/max and name/min.

    Without numbers there are no metrics.
    """
    numbers = [float(number) for number in numbers]
    if not numbers:
        return {}
    return {f"{name}/mean": mean_of(numbers), f"{name}/max": Max(max(numbers)), f"{name}/min": Min(min(numbers))}


def merge(*metrics_to_merge: Metrics) -> dict[str, Metric]:
    """Return all metrics, with those of equal keys merged by their reduction.

    Raises: TypeError if a key has two different reductions.
    """
    result: dict[str, Metric] = {}
    for metrics in metrics_to_merge:
        for key, metric in metrics.items():
            merged = result.get(key)
            if merged is None:
                result[key] = metric
            elif type(merged) is type(metric):
                result[key] = merged.merged(metric)  # type: ignore[arg-type]
            else:
                raise TypeError(f"metric {key!r} is both a {type(merged).__name__} and a {type(metric).__name__}")
    return result


def values(metrics: Metrics) -> dict[str, float]:
    """Return the value of each metric, sorted by key."""
    return {key: metrics[key].value for key in sorted(metrics)}
