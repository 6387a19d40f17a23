"""What a batch of groups looks like, in numbers. Knows passports only. docs/metrics.md describes every key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trigon.metrics import Max, Mean, Metric, Min, Sum, mean_of, merge
from trigon.types import RolloutGroup


def describe_groups(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    """Describe what was sampled for training, learned from or not."""
    compared = [scores for group in groups if (scores := _scores(group))]
    return {
        **_reward_parts(groups, prefix="reward/", suffix=""),
        **_lengths(groups, prefix=""),
        **_outcomes(groups),
        "group/equal_rewards_fraction": mean_of(float(max(scores) == min(scores)) for scores in compared),
        "group/reward_std": mean_of(_std(scores) for scores in compared),
        **_solved(groups),
    }


def describe_learned(
    groups: Sequence[RolloutGroup], rewards: Tensor, advantages: Sequence[Sequence[Tensor]], graded: Tensor
) -> dict[str, Metric]:
    """Describe what is learned from.

    Args: rewards: [G, N], after a KL penalty if there is one. advantages: [R] of each completion. graded: [G, N] bool;
    the others count in no statistic.
    """
    every = [tokens for group in advantages for tokens in group]
    lengths = torch.tensor([len(tokens) for tokens in every])
    means = torch.segment_reduce(torch.cat(every), "mean", lengths=lengths).view(graded.shape)
    return {
        **_spread("critic/score", (score for group in groups for score in _scores(group))),
        **_spread("critic/rewards", rewards[graded].tolist()),
        **_spread("critic/advantages", means[graded].tolist()),
    }


def describe_validation(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    """Describe a validation, under EasyR1's names: val/reward_score is the mean of overall."""
    parts = _reward_parts(groups, prefix="val/", suffix="_reward")
    overall = parts.get("val/overall_reward", Mean(0.0, 0.0))
    failures = {f"val_{key}": metric for key, metric in _outcomes(groups).items()}
    return {"val/reward_score": overall, **parts, **_lengths(groups, prefix="val_"), **failures}


def _reward_parts(groups: Sequence[RolloutGroup], *, prefix: str, suffix: str) -> dict[str, Metric]:
    """Average each number that the reward function returned over the answers for which it returned it."""
    return merge(
        *(
            {f"{prefix}{key}{suffix}": Mean(value) for key, value in rollout.score.parts.items()}
            for group in groups
            for rollout in group.rollouts
        )
    )


def _lengths(groups: Sequence[RolloutGroup], *, prefix: str) -> dict[str, Metric]:
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    cut = mean_of(float(completion.finish_reason == "length") for completion in completions)
    return {
        **_spread(f"{prefix}response_length", (len(completion.token_ids) for completion in completions)),
        f"{prefix}response_length/clip_ratio": cut,
        **_spread(f"{prefix}prompt_length", (len(group.prompt.token_ids) for group in groups)),
    }


def _scores(group: RolloutGroup) -> list[float]:
    return [rollout.score.overall for rollout in group.rollouts if rollout.score.outcome == "ok"]


def _outcomes(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    outcomes = [rollout.score.outcome for group in groups for rollout in group.rollouts]
    return {
        "grader/failed": Sum(float(outcomes.count("failed"))),
        "grader/timeout": Sum(float(outcomes.count("timeout"))),
    }


def _solved(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    """Tell how many groups are all right or all wrong, where the reward function returns an accuracy."""
    accuracies = [
        [rollout.score.parts["accuracy"] for rollout in group.rollouts if "accuracy" in rollout.score.parts]
        for group in groups
    ]
    known = [group for group in accuracies if group]
    if not known:
        return {}
    return {
        "group/all_right_fraction": mean_of(float(min(group) >= 1.0) for group in known),
        "group/all_wrong_fraction": mean_of(float(max(group) <= 0.0) for group in known),
    }


def _spread(name: str, numbers: Iterable[float]) -> dict[str, Metric]:
    known = [float(number) for number in numbers]
    if not known:
        return {}
    return {f"{name}/mean": mean_of(known), f"{name}/max": Max(max(known)), f"{name}/min": Min(min(known))}


def _std(numbers: Sequence[float]) -> float:
    """Return the population standard deviation: exactly 0 for equal numbers."""
    if max(numbers) == min(numbers):
        return 0.0
    mean = sum(numbers) / len(numbers)
    return float((sum((number - mean) ** 2 for number in numbers) / len(numbers)) ** 0.5)
