"""Classification of groups by their mean score."""

import pytest
import torch

from trigon.rollout.filtering import classify_groups

# Groups between the bounds are kept; the bounds are outside; unscored completions do not count.
CASES = [
    ([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [[True, True]] * 3, (0.01, 0.99), ["low", "kept", "high"]),
    ([[0.25, 0.25], [0.5, 0.5], [0.75, 0.75]], [[True, True]] * 3, (0.25, 0.75), ["low", "kept", "high"]),
    ([[0.0, 9.0], [1.0, 0.0]], [[True, False], [False, False]], (0.01, 0.99), ["low", "unscored"]),
]


@pytest.mark.parametrize(("scores", "valid", "bounds", "expected"), CASES)
def test_groups_are_classified_by_their_mean(scores, valid, bounds, expected):
    low, high = bounds
    assert classify_groups(torch.tensor(scores), torch.tensor(valid), low=low, high=high) == expected


def test_the_mean_of_equal_numbers_is_exactly_that_number():
    # in float64 the mean of three 0.1 is above 0.1
    for number in (0.1, 0.3, 0.7):
        for count in (2, 3, 7, 10):
            values = torch.full((1, count), number, dtype=torch.float64)
            valid = torch.ones(1, count, dtype=torch.bool)
            assert classify_groups(values, valid, low=number, high=1.0) == ["low"]
            assert classify_groups(values, valid, low=0.0, high=number) == ["high"]
