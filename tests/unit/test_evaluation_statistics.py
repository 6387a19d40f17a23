"""Estimates and tests of evaluations: by hand, against published tables, and by simulation."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from trigon.tools.eval import statistics
from trigon.tools.eval.statistics import (
    compare_pairs,
    estimate_mean,
    holm,
    majority_at_k,
    pass_at_k,
    permutation_test,
    student_quantile,
    wilson_interval,
)


def test_wilson_interval_by_hand():
    # 81 of 263, Newcombe (1998), table I, method 3.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    low, high = wilson_interval(0.0, 20)
    assert (low, high) == pytest.approx((0.0, 0.1611), abs=5e-5)
    estimate = estimate_mean([[1.0]] * 81 + [[0.0]] * 182)  # one binary value for each prompt
    assert (estimate.low, estimate.high) == pytest.approx(wilson_interval(81 / 263, 263))
    assert estimate.standard_error == pytest.approx(math.sqrt(81 / 263 * 182 / 263 / 262))
    all_right = estimate_mean([[1.0] * 4] * 20)
    assert all_right.value == all_right.high == 1.0
    assert all_right.low == pytest.approx(wilson_interval(1.0, 20)[0])


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (3, 3.1824), (30, 2.0423), (5000, 1.9604)],
)
def test_student_quantiles_are_those_of_printed_tables(degrees, quantile):
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-4)


def test_completions_of_a_prompt_that_are_all_alike_count_once():
    single = estimate_mean([[1.0]] * 30 + [[0.0]] * 70)
    eightfold = estimate_mean([[1.0] * 8] * 30 + [[0.0] * 8] * 70)
    assert eightfold.num_values == 800
    assert eightfold.standard_error == pytest.approx(single.standard_error)
    assert eightfold.high - eightfold.low == pytest.approx(single.high - single.low, rel=0.02)
    independent = estimate_mean([[float(number % 10 < 3)] for number in range(800)])
    assert independent.high - independent.low < 0.5 * (eightfold.high - eightfold.low)


def test_values_beyond_one_have_students_interval_by_hand():
    # Means of clusters 2, 4, 9; standard error of equal clusters = std / sqrt(3).
    estimate = estimate_mean([[1.0, 3.0], [4.0, 4.0], [8.0, 10.0]])
    error = math.sqrt(((2 - 5) ** 2 + (4 - 5) ** 2 + (9 - 5) ** 2) / 2 / 3)
    assert estimate.value == 5.0
    assert estimate.standard_error == pytest.approx(error)
    assert estimate.high - 5 == pytest.approx(4.3027 * error, rel=1e-4)
    skewed = [[1.0], [2.0], [300.0]]  # of values that are not negative the interval is not either
    assert estimate_mean(skewed).low == 0.0
    assert estimate_mean([*skewed, [-1.0]]).low < 0


def test_of_nothing_there_is_no_estimate_and_of_one_prompt_no_standard_error():
    assert math.isnan(estimate_mean([]).value)
    assert math.isnan(estimate_mean([[], []]).low)
    assert math.isnan(estimate_mean([[3.0, 4.0]]).standard_error)
    assert estimate_mean([[3.0, 4.0]]).high == math.inf


@pytest.mark.parametrize(("num_prompts", "n"), [(30, 1), (30, 8)])
def test_intervals_cover_the_truth_about_as_often_as_they_say(num_prompts, n):
    rng = np.random.default_rng(0)
    num_covered = 0
    for _ in range(400):
        abilities = rng.beta(1.0, 1.5, num_prompts)
        right = rng.random((num_prompts, n)) < abilities[:, None]
        estimate = estimate_mean(right.astype(float).tolist())
        num_covered += estimate.low <= 0.4 <= estimate.high
    # Of 400 at 95 %, 363 to 395 are within 4 standard deviations.
    assert 363 <= num_covered <= 396


@pytest.mark.extended
@pytest.mark.parametrize("n", [1, 4])
def test_intervals_of_differences_cover_the_truth(n):
    rng = np.random.default_rng(1)
    num_covered = num_rejected = 0
    for _ in range(300):
        abilities = rng.beta(2.0, 2.0, 40)
        first, second = ((rng.random((40, n)) < abilities[:, None]).mean(1).tolist() for _ in range(2))
        difference = compare_pairs(first, second, unit=1 / n)
        num_covered += difference.low <= 0 <= difference.high
        num_rejected += difference.p_value <= 0.05
    assert num_covered >= 270
    assert num_rejected <= 30, "equal models differ significantly in at most 5 % of evaluations"


def test_pass_at_k_is_the_share_of_subsets_with_a_right_completion():
    for n, c in itertools.product(range(1, 7), range(7)):
        if c > n:
            continue
        right = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(max, subsets)) / len(subsets)), (n, c, k)
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - math.comb(197, 100) / math.comb(200, 100))
    with pytest.raises(ValueError, match="needs at least 9"):
        pass_at_k(8, 1, 9)


def test_majority_votes_by_hand():
    # a a b: the subsets of two are aa, ab, ab; a tie is half right.
    answers, right = [0, 0, 1], [1.0, 1.0, 0.0]
    assert majority_at_k(answers, right, 1, seed="") == pytest.approx(2 / 3)
    assert majority_at_k(answers, right, 2, seed="") == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert majority_at_k(answers, right, 3, seed="") == 1.0
    assert majority_at_k([0, 1, 2], [1.0, 0.0, 0.0], 3, seed="") == pytest.approx(1 / 3)
    # Completions without an answer do not vote.
    assert majority_at_k([None, None, 0], [0.0, 0.0, 1.0], 3, seed="") == 1.0
    assert majority_at_k([None, None], [1.0, 1.0], 2, seed="") == 0.0


def test_random_subsets_estimate_the_vote_over_all_subsets(monkeypatch):
    rng = random.Random(0)
    answers = [rng.choice([0, 0, 1, 2]) for _ in range(12)]
    right = [float(answer == 0) for answer in answers]
    exact = majority_at_k(answers, right, 3, seed="")
    monkeypatch.setattr(statistics, "MAX_SUBSETS", 200)
    drawn = majority_at_k(answers, right, 3, seed="train:1")
    assert drawn == majority_at_k(answers, right, 3, seed="train:1") != exact
    assert drawn == pytest.approx(exact, abs=0.1)


def test_the_p_value_is_about_that_of_mcnemars_exact_test():
    # 9 prompts only the first solves, 2 only the second: 2 * P(Binomial(11, 1/2) <= 2).
    first = [1.0] * 9 + [0.0] * 2 + [1.0] * 30
    second = [0.0] * 9 + [1.0] * 2 + [1.0] * 30
    difference = compare_pairs(first, second, unit=1.0)
    assert difference.p_value == pytest.approx(2 * (1 + 11 + 55) / 2**11, abs=0.01)
    assert (difference.num_better, difference.num_worse, difference.num_prompts) == (9, 2, 41)
    # Bonett and Price (2012): (b - c) / (n + 2) +- t * sqrt(((b + 1) + (c + 1)) / (n + 2) ...).
    b, c, n = 10 / 43, 3 / 43, 43
    half = student_quantile(0.975, 42) * math.sqrt((b + c - (b - c) ** 2) / n)
    assert (difference.low, difference.high) == pytest.approx((b - c - half, b - c + half))


def test_the_p_value_is_about_the_share_of_all_sign_flips():
    differences = [0.25, 0.5, -0.25, 0.75, 0.0, 0.25]
    observed = abs(sum(differences))
    flips = [
        sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in itertools.product((1, -1), repeat=6)
    ]
    expected = sum(abs(total) >= observed - 1e-9 for total in flips) / len(flips)
    assert permutation_test(differences) == pytest.approx(expected, abs=0.01)


def test_equal_results_differ_by_nothing_with_an_interval():
    difference = compare_pairs([1.0] * 20, [1.0] * 20, unit=1.0)
    assert difference.value == 0
    assert difference.p_value == 1.0
    assert difference.low == pytest.approx(-difference.high)
    assert 0.1 < difference.high < 0.2
    assert math.isnan(compare_pairs([], [], unit=1.0).value)


def test_p_values_are_adjusted_for_their_number():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
