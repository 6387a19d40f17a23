"""Estimates from completions that are clustered by prompt: means, pass@k, majority votes, tests.

Completions of a prompt are alike, so that n of them carry less information than completions of n
prompts. All intervals and tests here take the prompt as the unit. docs/evaluation.md has the
formulas with their sources. Imports only the standard library and numpy.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
"""The confidence of all intervals."""

_UPPER = 0.5 + CONFIDENCE / 2

MAX_SUBSETS = 500
"""Subsets of a prompt's completions that majority_at_k enumerates; of more, it draws this many."""

NUM_FLIPS = 10_000
"""Random sign flips of the permutation test."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its confidence interval.

    value: the mean over all values. low, high: ends of the interval. standard_error: clustered by
    prompt. num_prompts, num_values: how many there were. All numbers are nan without values, and
    the standard error is nan for a single prompt.
    """

    value: float
    low: float
    high: float
    standard_error: float
    num_prompts: int
    num_values: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean over prompts of a difference between two results for the same prompts.

    low, high: ends of its confidence interval. p_value: p-value of the paired permutation test,
    two-sided. num_prompts: prompts in both results. num_better, num_worse: prompts with a positive,
    and with a negative difference.
    """

    value: float
    low: float
    high: float
    p_value: float
    num_prompts: int
    num_better: int
    num_worse: int


def estimate_mean(groups: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of all values, with an interval that is clustered by group.

    If all values are within [0, 1], the interval is Wilson's for a proportion, with the effective
    number of values, m(1 - m) / variance of the mean, adjusted for the degrees of freedom (Korn and
    Graubard, 1998; Franco et al., 2019): it stays within [0, 1] and is not empty where all values
    are equal. For one value of 0 or 1 in each group it is Wilson's interval itself. Otherwise it is
    the mean plus or minus Student's quantile times the standard error of Liang and Zeger (1986);
    not below 0 if no value is.
    Args: groups: the values of each prompt; empty ones are left out.
    """
    groups = [group for group in groups if group]
    num_groups, count = len(groups), sum(map(len, groups))
    if not groups:
        return Estimate(math.nan, math.nan, math.nan, math.nan, 0, 0)
    # As trigon.metrics sums them, so that equal values give equal means.
    mean = sum(value for group in groups for value in group) / count
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in groups)
    variance = squares / count**2
    error = math.sqrt(variance * num_groups / (num_groups - 1)) if num_groups > 1 else math.nan
    if all(0 <= value <= 1 for group in groups for value in group):
        spread = mean * (1 - mean)
        effective = float(num_groups if spread <= 0 else spread / variance if variance else count)
        is_plain = count == num_groups and all(group[0] in (0, 1) for group in groups)
        if spread > 0 and not is_plain and num_groups > 1:  # then the variance is estimated, and not m(1 - m)
            z, t = NormalDist().inv_cdf(_UPPER), student_quantile(_UPPER, num_groups - 1)
            effective *= (z / t) ** 2
        low, high = wilson_interval(mean, effective)
    elif num_groups > 1:
        half = student_quantile(_UPPER, num_groups - 1) * error
        smallest = min(value for group in groups for value in group)
        low, high = max(mean - half, 0.0 if smallest >= 0 else -math.inf), mean + half
    else:
        low, high = -math.inf, math.inf
    return Estimate(mean, low, high, error, num_groups, count)


def wilson_interval(mean: float, count: float) -> tuple[float, float]:
    """Return Wilson's score interval (1927) of a proportion in `count` values."""
    z = NormalDist().inv_cdf(_UPPER)
    shrink = 1 + z**2 / count
    centre = (mean + z**2 / (2 * count)) / shrink
    half = z / shrink * math.sqrt(mean * (1 - mean) / count + z**2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, for a probability of 0.5 or above.

    By bisection of the distribution function, whose sums are exact for whole degrees of freedom
    (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    if degrees > 1000:  # the expansion's first term is then exact to six digits
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * degrees)
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, degrees: int) -> float:
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    term, total = (cosine, 0.0) if degrees % 2 else (1.0, 0.0)
    for number in range(1 + degrees % 2, degrees, 2):
        total += term
        term *= number / (number + 1) * cosine**2
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if degrees % 2 else math.sin(angle) * total
    return 0.5 + inside / 2


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that at least one of k completions is right, without bias.

    1 - C(n - c, k) / C(n, k) (Chen et al., 2021, arXiv:2107.03374, equation 1), for k completions
    drawn without replacement from the n that were sampled, c of them right.
    Raises: ValueError if k is above num_samples.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} needs at least {k} completions, there are {num_samples}")
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(num_samples - num_right + 1, num_samples + 1))


def majority_at_k(answers: Sequence[int | None], right: Sequence[float], k: int, *, seed: str) -> float:
    """Return the probability that the most frequent answer of k completions is right.

    The mean over subsets of k of the n completions: over all of them if there are at most
    MAX_SUBSETS, otherwise over that many random ones. Answers that are equally frequent share the
    vote, as if one were drawn. A completion without an answer does not vote; if none has one, the
    vote is wrong.
    Args:
        answers: the number of each completion's answer; equal answers have equal numbers. None:
            no answer.
        right: whether each completion is right, 0 or 1. An answer is as right as its completions
            are on average.
        seed: the seed of the random subsets.
    Raises: ValueError if k is above the number of completions.
    """
    n = len(answers)
    if k > n:
        raise ValueError(f"maj@{k} needs at least {k} completions, there are {n}")
    totals: dict[int, list[float]] = {}
    for answer, value in zip(answers, right, strict=True):
        if answer is not None:
            totals.setdefault(answer, []).append(value)
    rightness = {answer: sum(values) / len(values) for answer, values in totals.items()}
    if math.comb(n, k) <= MAX_SUBSETS:
        subsets = list(combinations(range(n), k))
    else:
        rng = random.Random(seed)
        subsets = [tuple(rng.sample(range(n), k)) for _ in range(MAX_SUBSETS)]
    total = 0.0
    for subset in subsets:
        votes = Counter(answer for index in subset if (answer := answers[index]) is not None)
        if votes:
            most = max(votes.values())
            winners = [rightness[answer] for answer, number in votes.items() if number == most]
            total += sum(winners) / len(winners)
    return total / len(subsets)


def compare_pairs(first: Sequence[float], second: Sequence[float], *, unit: float) -> Difference:
    """Return how much higher the first of two paired results is, each prompt counting the same.

    The interval is Student's for the mean difference, with two more prompts whose differences are
    plus and minus one unit, so that it is not empty where all prompts agree. For results of 0 or 1
    these are the adjusted intervals of Bonett and Price (2012).
    Args:
        first, second: [prompts] the results of each prompt.
        unit: the smallest difference that one completion makes: 1 / n for means of n values that
            are 0 or 1.
    """
    differences = [one - other for one, other in zip(first, second, strict=True)]
    num_prompts = len(differences)
    if not differences:
        return Difference(math.nan, math.nan, math.nan, math.nan, 0, 0, 0)
    mean = math.fsum(differences) / num_prompts
    adjusted = [*differences, unit, -unit]
    centre = math.fsum(adjusted) / len(adjusted)
    squares = math.fsum((value - centre) ** 2 for value in adjusted)
    error = math.sqrt(squares) / len(adjusted)
    half = student_quantile(_UPPER, num_prompts + 1) * error
    tiny = 1e-12
    return Difference(
        value=mean,
        low=min(mean, centre - half),
        high=max(mean, centre + half),
        p_value=permutation_test(differences),
        num_prompts=num_prompts,
        num_better=sum(value > tiny for value in differences),
        num_worse=sum(value < -tiny for value in differences),
    )


def permutation_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the paired permutation test.

    The probability that the sum of the differences is at least as far from 0 if the sign of each is
    random, as it is where the two results of a prompt are exchangeable (Fisher, 1935). From
    NUM_FLIPS random flips, where the observed signs count as one of them.
    """
    values = np.array(differences)
    rng = np.random.default_rng(0)
    observed = abs(values.sum())
    num_extreme = 0
    for _ in range(NUM_FLIPS // 100):
        signs = rng.integers(0, 2, (100, len(values)), dtype=np.int8) * 2 - 1
        num_extreme += int((np.abs(signs @ values) >= observed - 1e-9 * len(values)).sum())
    return (1 + num_extreme) / (1 + NUM_FLIPS)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm, 1979), in the same order."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
