"""Partitions of groups over ranks: no rank gets much more work than another, or many new images."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from trigon.data.packing import tokens_of
from trigon.distributed.balance import TOLERANCE, deal, partition_balanced, partition_near
from trigon.distributed.engines import update_costs
from trigon.distributed.rollout_engine import deal_prompts
from trigon.distributed.worker_group import ProcessedMedia
from trigon.rollout.protocol import Until
from trigon.types import (
    Completion,
    EncodedMedia,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Score,
    TrainGroup,
    TrainSequence,
)


def sums(costs, parts):
    return [sum(costs[index] for index in part) for part in parts]


def test_balanced_partitions_by_hand():
    assert partition_balanced([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]  # 16 and 14
    assert sorted(map(len, partition_balanced([5] * 8, 4))) == [2, 2, 2, 2]
    assert partition_balanced([3], 4) == [[0], [], [], []]
    assert partition_balanced([], 2) == [[], []]


def test_the_largest_sum_is_close_to_the_mean_and_at_most_that_of_a_greedy_partition():
    generator = random.Random(0)
    costs = [generator.randint(300, 3000) for _ in range(64)]
    assert max(sums(costs, partition_balanced(costs, 8))) / (sum(costs) / 8) < 1.01
    for _ in range(50):
        costs = [generator.randint(1, 50) for _ in range(12)]
        greedy = [0, 0, 0]
        for cost in sorted(costs, reverse=True):
            greedy[greedy.index(min(greedy))] += cost
        assert max(sums(costs, partition_balanced(costs, 3))) <= max(greedy) + 1


# -- partition_near --


@pytest.mark.parametrize(
    ("costs", "homes", "num_parts", "expected"),
    [
        ([5, 5, 2, 2], [{0}, {0}, {1}, {1}], 2, [[1, 2], [0, 3]]),  # the example of the docstring
        ([6, 9, 8], [{0}, {1}, {1}], 2, [[0, 2], [1]]),  # one index leaves its home, and not two for each other
        ([7] * 6, [{0}, {1}, {2}, {0}, {1}, {2}], 3, [[0, 3], [1, 4], [2, 5]]),  # balanced homes are kept
        ([6, 4, 2], [{0, 1}, {0, 1}, {0, 1}], 3, [[0], [1, 2], []]),  # one of several is chosen by its sum
        ([6, 6, 6], [{0, 1}, {0, 1}, {2}], 3, [[0], [1], [2]]),
        ([6, 3, 3, 3, 6], [{1}, (), (), (), {1}], 2, [[1, 2, 3], [0, 4]]),  # those without fill the parts
    ],
)
def test_partitions_near_homes_by_hand(costs, homes, num_parts, expected):
    assert partition_near(costs, homes, num_parts) == expected


def moved(parts, homes):
    """Return how many indices with homes are elsewhere."""
    return sum(bool(homes[index]) and part not in homes[index] for part, found in enumerate(parts) for index in found)


def test_without_homes_both_partitions_are_the_same():
    costs = [random.Random(1).randint(1, 100) for _ in range(37)]
    assert partition_near(costs, [()] * 37, 4) == partition_balanced(costs, 4)
    assert partition_near([], [], 3) == [[], [], []]


def test_a_partition_that_cannot_keep_homes_is_the_balanced_one_in_the_best_order():
    # The homes have the sums 41 and 64; no move or exchange leads to 53 and 52.
    costs = [24, 26, 13, 14, 22, 6]
    homes = [{1}, {1}, {0}, {1}, {0}, {0}]
    assert partition_balanced(costs, 2) == [[1, 2, 3], [0, 4, 5]]
    parts = partition_near(costs, homes, 2)
    assert parts == [[0, 4, 5], [1, 2, 3]]
    assert moved(parts, homes) == 2


@pytest.mark.parametrize("seed", range(8))
def test_every_index_is_in_one_part_and_the_largest_sum_within_the_tolerance(seed):
    generator = random.Random(seed)
    num_parts = generator.choice([1, 2, 3, 8])
    costs = [generator.choice([1, generator.randint(1, 3000)]) for _ in range(generator.randint(0, 40))]
    homes = [set(generator.sample(range(num_parts), generator.randint(0, min(2, num_parts)))) for _ in costs]
    parts = partition_near(costs, homes, num_parts)
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    assert len(parts) == num_parts
    best = max(sums(costs, partition_balanced(costs, num_parts)))
    assert max(sums(costs, parts)) <= best * (1 + TOLERANCE)
    assert parts == partition_near(costs, [sorted(home, reverse=True) for home in homes], num_parts)


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


def test_a_group_is_where_the_files_of_its_prompt_and_of_all_its_completions_are():
    def with_file(part, name):
        return replace(part, vision=EncodedMedia((name.encode(),), (name,)))

    def ranks_of(prompt, *completions):
        rollouts = tuple(Rollout(each, Score(0.0, {}, "ok", "")) for each in completions)
        return set(processed.ranks_of(RolloutGroup(prompt, rollouts)))

    processed, text = ProcessedMedia(), Prompt("p", (1, 2, 3), None, "", None, {}, ())
    prompt, other = with_file(text, "a"), with_file(text, "other")
    completions = [with_file(Completion((1, 2), (0.0, 0.0), "stop", "", 0), name) for name in ("b", "c")]
    processed.add([prompt, text, *completions], [0, 1])
    processed.add(completions, [2])
    processed.add(completions[:1], [3])
    assert ranks_of(prompt, *completions) == {0, 1}
    assert ranks_of(text, *completions) == {0, 1, 2}
    assert ranks_of(text, completions[0]) == {0, 1, 2, 3}
    assert ranks_of(replace(prompt, prompt_id="another with the same file")) == {0, 1}
    assert ranks_of(text) == ranks_of(other) == set()
    processed.forget()
    assert ranks_of(prompt) == set()


# -- prompts that replicas sample --

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, ignore_eos=False, seed=5)


def begun_row(replica, *, num_tokens=1, num_unfinished=2):
    ended = Completion((1,), (0.0,), "stop", "", 0, replica=1 - replica)
    unfinished = Completion((1,) * num_tokens, (0.0,) * num_tokens, "unfinished", "", 0, replica=replica)
    return (ended,) * (2 - num_unfinished) + (unfinished,) * num_unfinished


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_prompts_that_nothing_has_begun_are_dealt_in_turn(num_replicas):
    until = Until(3, begun=((), begun_row(1, num_tokens=0)))
    for until_or_none in (None, until):
        shares = deal_prompts(8, SAMPLING, until_or_none, range(num_replicas))
        assert shares == [list(range(replica, 8, num_replicas)) for replica in range(num_replicas)]


def test_what_is_begun_stays_with_its_replica_and_the_rest_balances_the_completions():
    until = Until(9, begun=(begun_row(1), begun_row(1, num_unfinished=1), begun_row(0, num_unfinished=1)))
    # Left to sample: 2, 1 and 1 completions, and 2 for each of the others.
    assert deal_prompts(7, SAMPLING, until, range(2)) == [[2, 3, 4, 6], [0, 1, 5]]
    # Replica 1 cannot sample now.
    assert deal_prompts(7, SAMPLING, until, [0, 2]) == [[1, 2, 3, 5], [0, 4, 6]]
    assert deal([1, 1, 1, 1, 1], [1, 1, None, None, None], 2) == [[2, 3, 4], [0, 1]]


@pytest.mark.parametrize("seed", range(12))
def test_the_parts_of_replicas_add_up_and_each_can_be_reached(seed):
    numbers = random.Random(seed)
    num_prompts, num_replicas = numbers.randrange(1, 20), numbers.randrange(1, 5)
    begun = tuple(
        begun_row(numbers.randrange(2), num_tokens=numbers.randrange(2), num_unfinished=numbers.randrange(1, 3))
        for _ in range(numbers.randrange(num_prompts + 1))
    )
    num_required = numbers.randrange(len(begun) + 1)
    until = Until(numbers.randrange(num_required, num_prompts + 1), num_required, begun)
    shares = deal_prompts(num_prompts, SAMPLING, until, range(num_replicas))
    assert sorted(index for share in shares for index in share) == list(range(num_prompts))
    assert all(share == sorted(share) for share in shares)
    parts = until.of_shares(shares)
    assert sum(part.num_groups for part in parts) == until.num_groups
    assert sum(part.num_required for part in parts) == num_required
    for share, part in zip(shares, parts, strict=True):
        assert part.num_required <= part.num_groups <= len(share)
        assert part.num_required == sum(index < num_required for index in share)
        assert part.begun == tuple(begun[index] for index in share if index < len(begun))
        in_proportion = until.num_groups * len(share) / num_prompts
        assert part.num_groups == part.num_required or part.num_groups < in_proportion + 1
        if num_required == 0:
            assert abs(part.num_groups - in_proportion) < 1


def test_parts_of_more_groups_than_there_are_cannot_all_be_reached():
    assert [part.num_groups for part in Until(9).of_shares([[0, 2], [1]])] == [2, 1]
    required = Until(1, num_required=3).of_shares([[0, 2], [1]])
    assert [(part.num_groups, part.num_required) for part in required] == [(2, 2), (1, 1)]
