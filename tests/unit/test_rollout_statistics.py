"""Metrics of a batch of groups, computed by hand."""

import math
from dataclasses import replace

import pytest
import torch

from trigon.metrics import values
from trigon.rollout.statistics import describe_groups, describe_validation
from trigon.training.train_groups import describe_learned
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score


def rollout(length, parts, *, outcome="ok", finish_reason="stop"):
    score = Score(parts.get("overall", 0.0), parts, outcome, "" if outcome == "ok" else "why")
    return Rollout(Completion((7,) * length, (-1.0,) * length, finish_reason, "", 0), score)


def group(prompt_length, *rollouts):
    return RolloutGroup(Prompt("train:0", (1,) * prompt_length, None, "", "", {}, ()), rollouts)


def parts(overall, **others):
    return {"overall": overall, **others}


GROUPS = [
    group(10, rollout(2, parts(1.0, accuracy=1.0)), rollout(4, parts(0.0, accuracy=0.0), finish_reason="length")),
    group(30, rollout(3, parts(0.5, accuracy=1.0, extra=4.0)), rollout(1, {}, outcome="timeout")),
    group(20, rollout(6, {}, outcome="failed"), rollout(8, {}, outcome="failed", finish_reason="length")),
]
REWARDS = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.0, 0.0]])
ADVANTAGES = [
    [torch.full((len(r.completion.token_ids),), value) for r, value in zip(group.rollouts, row, strict=True)]
    for group, row in zip(GROUPS, [[0.7, -0.7], [0.0, 0.0], [0.0, 0.0]], strict=True)
]


VALID = torch.tensor([[True, True], [True, False], [False, False]])


def metrics():
    return values({**describe_groups(GROUPS), **describe_learned(GROUPS, REWARDS, ADVANTAGES, VALID)})


def test_rewards_are_averaged_over_the_completions_that_have_them():
    numbers = metrics()
    assert numbers["reward/overall"] == 0.5  # of three scored completions
    assert numbers["reward/accuracy"] == pytest.approx(2 / 3)
    assert numbers["reward/extra"] == 4.0  # of the one that has it
    assert [numbers[f"critic/score/{figure}"] for figure in ("mean", "max", "min")] == [0.5, 1.0, 0.0]


def test_how_often_a_function_applies_is_over_all_scored_completions():
    groups = [
        group(3, rollout(1, parts(1.0, exact=1.0)), rollout(1, {}, outcome="failed")),
        group(3, rollout(1, parts(1.0, exact=1.0, **{"exact/applies": 1.0, "judge/applies": 0.0}))),
    ]
    numbers = values(describe_groups(groups))
    assert (numbers["reward/exact/applies"], numbers["reward/judge/applies"]) == (1.0, 0.5)
    assert "reward/judge" not in numbers


def test_group_metrics_compare_the_rewards_within_a_group():
    numbers = metrics()
    # The first group has rewards 1 and 0, the second has one reward, the third none.
    assert numbers["group/equal_rewards_fraction"] == 0.5
    assert numbers["group/reward_std"] == 0.25
    assert numbers["group/all_right_fraction"] == 0.5
    assert numbers["group/all_wrong_fraction"] == 0.0


def test_failures_of_the_reward_function_are_counted():
    numbers = metrics()
    assert (numbers["grader/failed"], numbers["grader/timeout"]) == (2.0, 1.0)


def test_lengths_count_all_completions_and_each_prompt_once():
    numbers = metrics()
    assert [numbers[f"response_length/{figure}"] for figure in ("mean", "max", "min")] == [4.0, 8.0, 1.0]
    assert numbers["response_length/clip_ratio"] == pytest.approx(2 / 6)
    assert [numbers[f"prompt_length/{figure}"] for figure in ("mean", "max", "min")] == [20.0, 30.0, 10.0]


def test_advantages_have_metrics():
    numbers = metrics()
    assert numbers["critic/advantages/max"] == pytest.approx(0.7)
    assert numbers["critic/advantages/mean"] == pytest.approx(0.0)


def test_a_batch_without_scores_has_no_reward_metrics():
    numbers = values(
        {**describe_groups(GROUPS[2:]), **describe_learned(GROUPS[2:], REWARDS[2:], ADVANTAGES[2:], VALID[2:])}
    )
    assert not any(key.startswith(("reward/", "critic/score/")) for key in numbers)
    assert math.isnan(numbers["group/equal_rewards_fraction"])
    assert math.isnan(numbers["group/reward_std"])
    assert numbers["grader/failed"] == 2.0


def test_without_an_accuracy_there_are_no_all_right_and_all_wrong_fractions():
    groups = [group(1, rollout(1, parts(0.25)), rollout(1, parts(0.25)))]
    numbers = values(describe_groups(groups))
    assert "group/all_right_fraction" not in numbers
    assert "group/all_wrong_fraction" not in numbers
    assert numbers["group/equal_rewards_fraction"] == 1.0
    assert numbers["group/reward_std"] == 0.0


def test_equal_rewards_have_a_standard_deviation_of_exactly_zero():
    reward = 0.1  # in floating point, 0.1 + 0.1 + 0.1 is not 0.3
    groups = [group(1, *(rollout(1, parts(reward)) for _ in range(3)))]
    numbers = values(describe_groups(groups))
    assert numbers["group/reward_std"] == 0.0


def test_validation_metrics_have_their_own_keys():
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
        "val_grader/failed_fraction": 0.5,
        "val_grader/timeout": 1.0,
    }


def test_several_validation_datasets_have_scores_of_their_own_and_together():
    def of(dataset, *rollouts):
        return RolloutGroup(replace(GROUPS[0].prompt, prompt_id=f"{dataset}:0"), rollouts)

    groups = [
        of("geo:x", rollout(2, parts(1.0, accuracy=1.0)), rollout(2, parts(0.5, accuracy=0.0))),
        of("test~2", rollout(2, parts(0.0, accuracy=0.0)), rollout(2, {}, outcome="failed")),
    ]
    metrics = {key: value for key, value in values(describe_validation(groups)).items() if key.startswith("val/")}
    assert metrics == {
        "val/reward_score": 0.5,
        "val/overall_reward": 0.5,
        "val/accuracy_reward": pytest.approx(1 / 3),
        "val/geo-x/reward_score": 0.75,
        "val/geo-x/overall_reward": 0.75,
        "val/geo-x/accuracy_reward": 0.5,
        "val/test-2/reward_score": 0.0,
        "val/test-2/overall_reward": 0.0,
        "val/test-2/accuracy_reward": 0.0,
    }


@pytest.mark.parametrize("groups", [[], GROUPS[2:]], ids=["no completions", "no scores"])
def test_the_score_of_a_validation_without_scores_is_nan(groups):
    assert math.isnan(values(describe_validation(groups))["val/reward_score"])
