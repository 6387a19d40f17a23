"""The slope of noisy measurements, by Theil and Sen, with its confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, median


@dataclass(frozen=True, slots=True)
class Slope:
    """A slope, in units of y per unit of x, and the interval that holds it with the confidence.

    intercept: of the line through the medians.
    """

    value: float
    low: float
    high: float
    intercept: float


def fit_slope(xs: Sequence[float], ys: Sequence[float], *, confidence: float = 0.95) -> Slope:
    """Return the median of the slopes of all pairs of points, and its interval.

    Single outliers, up to 29 % of the points, do not move it. The interval is Sen's (1968, section
    6), from the normal approximation of Kendall's statistic, without ties in x. It takes the
    points as independent; successive memory measurements are not, so it is too narrow rather than
    too wide.
    Args: xs: distinct. Raises: ValueError with fewer than three points.
    """
    n = len(xs)
    if n < 3:
        raise ValueError(f"a slope needs at least three points, not {n}")
    slopes = sorted((ys[j] - ys[i]) / (xs[j] - xs[i]) for i in range(n) for j in range(i + 1, n))
    deviation = sqrt(n * (n - 1) * (2 * n + 5) / 18)
    half_width = NormalDist().inv_cdf(0.5 + confidence / 2) * deviation
    lower = max(0, int((len(slopes) - half_width) / 2))
    upper = min(len(slopes) - 1, int((len(slopes) + half_width) / 2) + 1)
    value = median(slopes)
    return Slope(value, slopes[lower], slopes[upper], median(ys) - value * median(xs))
