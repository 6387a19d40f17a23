"""Metrics of a batch of groups. docs/metrics.md describes every key."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from trigon.metrics import Max, Mean, Metric, Metrics, Sum, mean_max_min, mean_of, merge
from trigon.rewards.contract import APPLIES
from trigon.rollout.protocol import Work
from trigon.types import Completion, RolloutGroup

OLDEST_AGE = 3
"""Tokens of this age and older are counted together in staleness/fraction_age_*."""


def describe_groups(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    """Return metrics of the groups that were sampled for training, filtered ones included."""
    group_scores = [scores for group in groups if (scores := _scores(group))]
    return {
        **_reward_metrics(groups, prefix="reward/", suffix=""),
        **_length_metrics(groups, prefix=""),
        **_failure_counts(groups),
        "group/equal_rewards_fraction": mean_of(float(max(scores) == min(scores)) for scores in group_scores),
        "group/reward_std": mean_of(_std(scores) for scores in group_scores),
        **_solved_fractions(groups),
    }


def describe_validation(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    """Return metrics of a validation under EasyR1's keys.

    val/reward_score is the mean of overall, over all groups. If they are of several datasets, there
    are the same keys for each of them, val/<dataset>/reward_score.
    """
    failures = {f"val_{key}": metric for key, metric in _failure_counts(groups).items()}
    metrics = {**_score_metrics(groups, prefix="val/"), **_length_metrics(groups, prefix="val_"), **failures}
    by_dataset: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        by_dataset.setdefault(group.prompt.prompt_id.rpartition(":")[0], []).append(group)
    if len(by_dataset) > 1:
        for name, part in by_dataset.items():
            # The second dataset of a name is named train~2, and MLflow rejects a ~ in a key.
            key = re.sub(r"[^\w.-]", "-", name)
            metrics |= _score_metrics(part, prefix=f"val/{key}/")
    return metrics


def _score_metrics(groups: Sequence[RolloutGroup], *, prefix: str) -> dict[str, Metric]:
    """Return the mean scores of a validation. prefix: the prefix of their keys."""
    parts = _reward_metrics(groups, prefix=prefix, suffix="_reward")
    return {f"{prefix}reward_score": parts.get(f"{prefix}overall_reward", Mean(0.0, 0.0)), **parts}


def _reward_metrics(groups: Sequence[RolloutGroup], *, prefix: str, suffix: str) -> dict[str, Metric]:
    """Return the mean of each number of the reward function, over the completions that have it.

    The fraction of completions to which a function applies is over all scored completions.
    """
    scores = [rollout.score.parts for group in groups for rollout in group.rollouts if rollout.score.parts]
    applies = {key: 1.0 for parts in scores for key in parts if key.endswith(APPLIES)}
    return merge(
        *({f"{prefix}{key}{suffix}": Mean(value) for key, value in {**applies, **parts}.items()} for parts in scores)
    )


def _length_metrics(groups: Sequence[RolloutGroup], *, prefix: str) -> dict[str, Metric]:
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    cut = mean_of(float(completion.finish_reason == "length") for completion in completions)
    return {
        **mean_max_min(f"{prefix}response_length", (completion.num_sampled for completion in completions)),
        f"{prefix}response_length/clip_ratio": cut,
        **mean_max_min(f"{prefix}prompt_length", (len(group.prompt.token_ids) for group in groups)),
    }


def _scores(group: RolloutGroup) -> list[float]:
    return [rollout.score.overall for rollout in group.rollouts if rollout.score.outcome == "ok"]


def _failure_counts(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    outcomes = [rollout.score.outcome for group in groups for rollout in group.rollouts]
    return {
        "reward_function/num_failed": Sum(float(outcomes.count("failed"))),
        "reward_function/num_timed_out": Sum(float(outcomes.count("timeout"))),
        "reward_function/failed_fraction": mean_of(float(outcome != "ok") for outcome in outcomes),
    }


def _solved_fractions(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    """Return the fractions of all-right and all-wrong groups; {} if no score has an accuracy."""
    accuracies = [
        [rollout.score.parts["accuracy"] for rollout in group.rollouts if "accuracy" in rollout.score.parts]
        for group in groups
    ]
    non_empty = [group for group in accuracies if group]
    if not non_empty:
        return {}
    return {
        "group/all_right_fraction": mean_of(float(min(group) >= 1.0) for group in non_empty),
        "group/all_wrong_fraction": mean_of(float(max(group) <= 0.0) for group in non_empty),
    }


def _std(numbers: Sequence[float]) -> float:
    """Return the population standard deviation, exactly 0 for equal numbers."""
    if max(numbers) == min(numbers):
        return 0.0
    mean = sum(numbers) / len(numbers)
    return float((sum((number - mean) ** 2 for number in numbers) / len(numbers)) ** 0.5)


def describe_staleness(groups: Sequence[RolloutGroup], *, version: int) -> Metrics:
    """Return the ages of the sampled tokens: how many steps older their weights are than today's.

    version: the policy version of the weights that learn from the groups; they have age 0.
    """
    ages: Counter[int] = Counter()
    for group in groups:
        for rollout in group.rollouts:
            for sampled_by, count in rollout.completion.version_runs:
                ages[version - sampled_by] += count
    total = float(ages.total())
    metrics: dict[str, Metric] = {
        "staleness/mean": Mean(float(sum(age * count for age, count in ages.items())), total),
        "staleness/max": Max(float(max(ages, default=0))),
    }
    for age in range(OLDEST_AGE):
        metrics[f"staleness/fraction_age_{age}"] = Mean(float(ages[age]), total)
    oldest = sum(count for age, count in ages.items() if age >= OLDEST_AGE)
    metrics[f"staleness/fraction_age_{OLDEST_AGE}_or_more"] = Mean(float(oldest), total)
    return metrics


def describe_carried(carried: Sequence[Work]) -> Metrics:
    """Return how much a step leaves unfinished."""
    tokens = count_sampled(completion for group in carried for completion in group.completions)
    return {
        "rollout/carried_groups": Sum(float(len(carried))),
        "rollout/carried_tokens": Sum(float(tokens)),
    }


def count_sampled(completions: Iterable[Completion]) -> int:
    """Return the number of tokens that were sampled, of all completions."""
    return sum(completion.num_sampled for completion in completions)


def count_new(completions: Sequence[Completion], work: Work) -> int:
    """Return how many tokens of these completions were sampled since work was begun.

    Not fewer than none: an episode that began again may have fewer tokens than before.
    """
    return max(0, count_sampled(completions) - count_sampled(work.completions))


def find_oldest_version(completions: Iterable[Completion], version: int) -> int:
    """Return the version of the oldest sampled token. version: what to return if there is none."""
    versions = [run for completion in completions for run, count in completion.version_runs if count]
    return min(versions, default=version)


def warn_if_rewards_are_equal(groups: Sequence[RolloutGroup], warn: Callable[[str], None]) -> None:
    """Warn if the rewards of the first step's completions, more than one, are all equal."""
    scored = [(group.prompt, r) for group in groups for r in group.rollouts if r.score.outcome == "ok"]
    rewards = {rollout.score.overall for _, rollout in scored}
    if len(scored) < 2 or len(rewards) > 1:
        return
    prompt, rollout = scored[0]
    ground_truth = f"{repr(prompt.ground_truth)[:100]} (a {type(prompt.ground_truth).__name__})"
    warn(
        f"ALL REWARDS ARE EQUAL: each of the {len(scored)} completions of the first step got {rewards.pop():g}, "
        f"and nothing can be learned from equal rewards. Either the task is too hard or too easy for the model, "
        "or the reward function does not see what it expects: compare the ground truth with the completions. "
        f"{prompt.prompt_id} has the ground truth {ground_truth} and the completion "
        f"{rollout.completion.text[-200:]!r}; rollouts/ in the run folder will hold all of them"
    )
