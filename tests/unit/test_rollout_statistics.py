"""What a batch looks like in numbers, counted by hand."""

import math

import pytest
import torch

from trigon.metrics import values
from trigon.rollout.statistics import describe_groups, describe_learned, describe_validation
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score


def rollout(length, parts, *, outcome="ok", finish_reason="stop"):
    score = Score(parts.get("overall", 0.0), parts, outcome, "" if outcome == "ok" else "why")
    return Rollout(Completion((7,) * length, (-1.0,) * length, finish_reason, "", 0), score)


def group(prompt_length, *rollouts):
    return RolloutGroup(Prompt("train:0", (1,) * prompt_length, None, "", "", {}, ()), rollouts)


def graded(overall, **parts):
    return {"overall": overall, **parts}


GROUPS = [
    group(10, rollout(2, graded(1.0, accuracy=1.0)), rollout(4, graded(0.0, accuracy=0.0), finish_reason="length")),
    group(30, rollout(3, graded(0.5, accuracy=1.0, extra=4.0)), rollout(1, {}, outcome="timeout")),
    group(20, rollout(6, {}, outcome="failed"), rollout(8, {}, outcome="failed", finish_reason="length")),
]
REWARDS = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.0, 0.0]])
ADVANTAGES = [
    [torch.full((len(r.completion.token_ids),), value) for r, value in zip(group.rollouts, row, strict=True)]
    for group, row in zip(GROUPS, [[0.7, -0.7], [0.0, 0.0], [0.0, 0.0]], strict=True)
]


GRADED = torch.tensor([[True, True], [True, False], [False, False]])


def described():
    return values({**describe_groups(GROUPS), **describe_learned(GROUPS, REWARDS, ADVANTAGES, GRADED)})


def test_rewards_are_averaged_over_the_answers_that_have_them():
    numbers = described()
    assert numbers["reward/overall"] == 0.5  # of three graded answers
    assert numbers["reward/accuracy"] == pytest.approx(2 / 3)
    assert numbers["reward/extra"] == 4.0  # of the one that has it
    assert [numbers[f"critic/score/{figure}"] for figure in ("mean", "max", "min")] == [0.5, 1.0, 0.0]


def test_groups_are_compared_within_themselves():
    numbers = described()
    # The first group's rewards are 1 and 0, the second's is alone, the third has none.
    assert numbers["group/equal_rewards_fraction"] == 0.5
    assert numbers["group/reward_std"] == 0.25
    assert numbers["group/all_right_fraction"] == 0.5
    assert numbers["group/all_wrong_fraction"] == 0.0


def test_failures_of_the_grader_are_counted():
    numbers = described()
    assert (numbers["grader/failed"], numbers["grader/timeout"]) == (2.0, 1.0)


def test_lengths_are_of_all_answers_and_of_each_prompt_once():
    numbers = described()
    assert [numbers[f"response_length/{figure}"] for figure in ("mean", "max", "min")] == [4.0, 8.0, 1.0]
    assert numbers["response_length/clip_ratio"] == pytest.approx(2 / 6)
    assert [numbers[f"prompt_length/{figure}"] for figure in ("mean", "max", "min")] == [20.0, 30.0, 10.0]


def test_advantages_are_described():
    numbers = described()
    assert numbers["critic/advantages/max"] == pytest.approx(0.7)
    assert numbers["critic/advantages/mean"] == pytest.approx(0.0)


def test_a_whole_batch_without_grades_has_no_rewards():
    numbers = values(
        {**describe_groups(GROUPS[2:]), **describe_learned(GROUPS[2:], REWARDS[2:], ADVANTAGES[2:], GRADED[2:])}
    )
    assert not any(key.startswith(("reward/", "critic/score/")) for key in numbers)
    assert math.isnan(numbers["group/equal_rewards_fraction"])
    assert math.isnan(numbers["group/reward_std"])
    assert numbers["grader/failed"] == 2.0


def test_without_an_accuracy_nothing_is_said_of_right_and_wrong():
    groups = [group(1, rollout(1, graded(0.25)), rollout(1, graded(0.25)))]
    numbers = values(describe_groups(groups))
    assert "group/all_right_fraction" not in numbers
    assert "group/all_wrong_fraction" not in numbers
    assert numbers["group/equal_rewards_fraction"] == 1.0
    assert numbers["group/reward_std"] == 0.0


def test_rewards_that_float_sums_would_tell_apart_are_equal():
    third = 0.1  # 0.1 + 0.1 + 0.1 is not 0.3
    groups = [group(1, *(rollout(1, graded(third)) for _ in range(3)))]
    numbers = values(describe_groups(groups))
    assert numbers["group/reward_std"] == 0.0


def test_validation_speaks_under_its_own_names():
    assert values(describe_validation(GROUPS)) == {
        "val/reward_score": 0.5,
        "val/overall_reward": 0.5,
        "val/accuracy_reward": pytest.approx(2 / 3),
        "val/extra_reward": 4.0,
        "val_response_length/mean": 4.0,
        "val_response_length/max": 8.0,
        "val_response_length/min": 1.0,
        "val_response_length/clip_ratio": pytest.approx(2 / 6),
        "val_prompt_length/mean": 20.0,
        "val_prompt_length/max": 30.0,
        "val_prompt_length/min": 10.0,
        "val_grader/failed": 2.0,
        "val_grader/timeout": 1.0,
    }


@pytest.mark.parametrize("groups", [[], GROUPS[2:]], ids=["no answers", "no grades"])
def test_a_validation_without_grades_has_a_score_that_is_no_number(groups):
    assert math.isnan(values(describe_validation(groups))["val/reward_score"])
