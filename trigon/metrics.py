"""Metrics that carry their own reduction, so that merging over micro-batches, ranks and steps cannot change their
meaning.

Knows arithmetic only: no loggers, no collectives, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, kept as its total and its count: Mean(total=6.0, count=4) is 1.5; an empty one is nan."""

    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")

    def merged(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """A total."""

    value: float

    def merged(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen."""

    value: float

    def merged(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value seen."""

    value: float

    def merged(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class EffectiveShare:
    """Effective sample size of importance weights as a share of their number: total^2 / (count * squares), in (0, 1].

    1 where all weights are equal; nan where there are none (Kong, 1992).
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
    """Return the plain mean of values as a Mean that knows how many there were."""
    values = list(values)
    return Mean(float(sum(values)), float(len(values)))


def merge(*several: Metrics) -> dict[str, Metric]:
    """Merge metrics key by key, each by its own reduction.

    Raises: TypeError if one key is reduced in two different ways.
    """
    result: dict[str, Metric] = {}
    for metrics in several:
        for key, metric in metrics.items():
            known = result.get(key)
            if known is None:
                result[key] = metric
            elif type(known) is type(metric):
                result[key] = known.merged(metric)  # type: ignore[arg-type]
            else:
                raise TypeError(f"metric {key!r} is both a {type(known).__name__} and a {type(metric).__name__}")
    return result


def values(metrics: Metrics) -> dict[str, float]:
    """Return the plain numbers, sorted by key."""
    return {key: metrics[key].value for key in sorted(metrics)}
