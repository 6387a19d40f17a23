"""Metrics merge by their own reduction, in any order and grouping."""

import itertools
import math

import pytest

from trigon.metrics import Max, Mean, Min, Sum, mean_of, merge, values


def test_a_mean_is_weighted_by_what_it_counts():
    assert Mean(6.0, 4.0).value == 1.5
    assert merge({"a": Mean(6.0, 4.0)}, {"a": Mean(1.0)})["a"] == Mean(7.0, 5.0)
    assert values(merge({"a": Mean(6.0, 4.0)}, {"a": Mean(1.0)})) == {"a": 1.4}  # the mean of means would be 1.25


def test_an_empty_mean_is_nan_and_does_not_change_others():
    assert mean_of(iter([1.0, 2.0, 6.0])) == Mean(9.0, 3.0)
    assert math.isnan(mean_of([]).value)
    assert merge({"a": Mean(0.0, 0.0)}, {"a": Mean(3.0, 2.0)})["a"].value == 1.5


def test_each_reduction_is_the_same_in_any_order():
    parts = [{"a": Mean(1.0, 2.0), "b": Max(1.0), "d": Min(3.0)}, {"a": Mean(4.0, 4.0), "c": Sum(2.0)}]
    parts.append({"d": Min(-3.0), "b": Max(7.0), "c": Sum(1.0)})
    for order in itertools.permutations(parts):
        assert list(values(merge(*order)).items()) == [("a", 5.0 / 6.0), ("b", 7.0), ("c", 3.0), ("d", -3.0)]
    assert parts[0]["b"] == Max(1.0)  # arguments are not modified
    assert merge() == {}


def test_a_key_with_two_reductions_is_an_error():
    with pytest.raises(TypeError, match="'a' is both a Mean and a Max"):
        merge({"a": Mean(1.0)}, {"a": Max(1.0)})
