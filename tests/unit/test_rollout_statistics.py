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
ALGORITHM = [
    [torch.full((len(r.completion.token_ids),), value) for r, value in zip(group.rollouts, row, strict=True)]
    for group, row in zip(GROUPS, [[0.7, -0.7], [0.0, 0.0], [0.0, 0.0]], strict=True)
]


VALID = torch.tensor([[True, True], [True, False], [False, False]])


def test_the_metrics_of_a_batch_by_hand():
    numbers = values({**describe_groups(GROUPS), **describe_learned(GROUPS, REWARDS, ALGORITHM, VALID)})
    expected = {
        "reward/overall": 0.5,  # of three scored completions
        "reward/accuracy": 2 / 3,
        "reward/extra": 4.0,  # of the one that has it
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        # The first group has rewards 1 and 0, the second has one reward, the third none.
        "group/equal_rewards_fraction": 0.5,
        "group/reward_std": 0.25,
        "group/all_right_fraction": 0.5,
        "group/all_wrong_fraction": 0.0,
        "reward_function/num_failed": 2.0,
        "reward_function/num_timed_out": 1.0,
        # Lengths count all completions, and each prompt once.
        "response_length/mean": 4.0,
        "response_length/max": 8.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 2 / 6,
        "prompt_length/mean": 20.0,
        "prompt_length/max": 30.0,
        "prompt_length/min": 10.0,
        "critic/advantages/max": 0.7,
        "critic/advantages/mean": 0.0,
    }
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, abs=1e-7)


def test_a_batch_without_scores_has_no_reward_metrics():
    numbers = values(
        {**describe_groups(GROUPS[2:]), **describe_learned(GROUPS[2:], REWARDS[2:], ALGORITHM[2:], VALID[2:])}
    )
    assert not any(key.startswith(("reward/", "critic/score/")) for key in numbers)
    assert math.isnan(numbers["group/equal_rewards_fraction"])
    assert math.isnan(numbers["group/reward_std"])
    for groups in ([], GROUPS[2:]):
        assert math.isnan(values(describe_validation(groups))["val/reward_score"])
    assert numbers["reward_function/num_failed"] == 2.0


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
        "val_reward_function/num_failed": 2.0,
        "val_reward_function/failed_fraction": 0.5,
        "val_reward_function/num_timed_out": 1.0,
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
