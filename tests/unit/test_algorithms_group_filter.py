"""Classification of groups by their mean score."""

import torch

from trigon.algorithms.group_filter import classify_groups


def classes_of(values, valid=None, low=0.01, high=0.99):
    values = torch.tensor(values)
    valid = torch.ones_like(values, dtype=torch.bool) if valid is None else torch.tensor(valid)
    return classify_groups(values, valid, low=low, high=high)


def test_groups_between_the_bounds_are_kept():
    assert classes_of([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]]) == ["low", "kept", "high"]


def test_the_bounds_themselves_are_outside():
    assert classes_of([[0.25, 0.25], [0.5, 0.5], [0.75, 0.75]], low=0.25, high=0.75) == ["low", "kept", "high"]


def test_the_mean_of_equal_numbers_is_exactly_that_number():
    # in float64 the mean of three 0.1 is above 0.1
    for number in (0.1, 0.2, 0.3, 0.7, 0.9):
        for count in (2, 3, 5, 7, 10):
            values = torch.full((1, count), number, dtype=torch.float64)
            assert classify_groups(values, torch.ones(1, count, dtype=torch.bool), low=number, high=1.0) == ["low"]
            assert classify_groups(values, torch.ones(1, count, dtype=torch.bool), low=0.0, high=number) == ["high"]


def test_unscored_completions_do_not_count():
    assert classes_of([[0.0, 9.0], [1.0, 0.0]], [[True, False], [False, False]]) == ["low", "unscored"]
