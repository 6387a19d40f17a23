"""partition_balanced and the costs it is used with: no rank gets much more work than another."""

from __future__ import annotations

import random

import pytest
import torch

from trigon.data.packing import tokens_of
from trigon.distributed.balance import partition_balanced
from trigon.distributed.engines import update_costs
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score, TrainGroup, TrainSequence


def sums(costs, parts):
    return [sum(costs[index] for index in part) for part in parts]


def test_the_example_of_the_docstring():
    assert partition_balanced([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]  # 16 and 14


def test_equal_costs_give_parts_of_equal_length():
    assert sorted(map(len, partition_balanced([5] * 8, 4))) == [2, 2, 2, 2]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_every_index_is_in_exactly_one_part(num_parts):
    costs = [random.Random(1).randint(1, 100) for _ in range(37)]
    parts = partition_balanced(costs, num_parts)
    assert len(parts) == num_parts
    assert sorted(index for part in parts for index in part) == list(range(37))
    assert all(part == sorted(part) for part in parts)


def test_fewer_items_than_parts_give_empty_parts():
    assert partition_balanced([3], 4) == [[0], [], [], []]
    assert partition_balanced([], 2) == [[], []]


def test_the_largest_sum_is_close_to_the_mean():
    generator = random.Random(0)
    costs = [generator.randint(300, 3000) for _ in range(64)]
    heaviest = max(sums(costs, partition_balanced(costs, 8)))
    assert heaviest / (sum(costs) / 8) < 1.01


def test_the_largest_sum_is_at_most_that_of_a_greedy_partition():
    generator = random.Random(2)
    for _ in range(50):
        costs = [generator.randint(1, 50) for _ in range(12)]
        greedy = [0, 0, 0]
        for cost in sorted(costs, reverse=True):
            greedy[greedy.index(min(greedy))] += cost
        assert max(sums(costs, partition_balanced(costs, 3))) <= max(greedy) + 1


def test_the_tokens_of_a_group_are_its_prompt_once_and_every_completion():
    prompt = Prompt("p", (1, 2, 3), None, "", None, {}, ())
    rollouts = tuple(
        Rollout(Completion((1,) * length, (0.0,) * length, "stop", "", 0), Score(0.0, {}, "ok", ""))
        for length in (2, 4)
    )
    sequences = tuple(TrainSequence((1,) * length, *[torch.zeros(length)] * 3, None, None) for length in (2, 4))
    assert tokens_of(RolloutGroup(prompt, rollouts)) == 9
    assert tokens_of(TrainGroup(prompt, sequences)) == 9


def test_a_group_without_a_gradient_costs_one():
    prompt = Prompt("p", (1, 2, 3), None, "", None, {}, ())

    def group(advantage: float, mask: float) -> TrainGroup:
        ones = torch.ones(4)
        return TrainGroup(prompt, (TrainSequence((1,) * 4, mask * ones, advantage * ones, ones, None, None),))

    groups = [group(0.5, 1.0), group(0.0, 1.0), group(0.5, 0.0)]
    assert update_costs(groups, regularized=False) == [7, 1, 1]
    assert update_costs(groups, regularized=True) == [7, 7, 7]
