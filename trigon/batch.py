"""Collects the groups that a step learns from.

One round of sampling, or as many as online filtering takes. With a group filter (DAPO's dynamic
sampling, arXiv:2503.14476, section 3.2), groups whose completions are all right or all wrong are
filtered out, and more prompts are sampled. Called while the rollout engine is awake.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

import torch

from trigon.algorithms.group_filter import GroupClass, classify_groups
from trigon.data.stream import PromptStream, with_repeat_id
from trigon.errors import BadRow, DataError, RewardError
from trigon.metrics import Metrics, Sum, mean_of, merge
from trigon.records.rollouts import RolloutRow, rollout_rows
from trigon.report.reporter import Reporter
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.statistics import describe_groups
from trigon.suggestions import did_you_mean
from trigon.types import (
    Completion,
    EncodedMedia,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Score,
    Turn,
    Vision,
)

_FILTERED: tuple[Literal["low", "high", "unscored"], ...] = ("low", "high", "unscored")


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Keeps groups whose mean score `key` lies strictly between low and high.

    prompts_per_round: prompts sampled at a time. max_rounds: per step; 0: no limit.
    keep_surplus: use groups beyond the batch size in the next step; otherwise they are dropped.
    """

    key: str
    low: float
    high: float
    prompts_per_round: int
    max_rounds: int
    keep_surplus: bool


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The groups that a step learns from, and what else was sampled for it.

    surplus: groups kept for the next step. metrics: over everything that was sampled, filtered out
    or not.
    num_sampled_tokens: of all completions, filtered out or not. baselines: [G] float32, the reward
    of each prompt's greedy completion, nan where it could not be scored; None if not asked for.
    """

    groups: list[RolloutGroup]
    surplus: list[RolloutGroup]
    metrics: Metrics
    num_sampled_tokens: int
    baselines: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws prompts, samples and scores completions.

    with_baselines: also one greedy completion per prompt.
    """

    prompts: PromptStream
    rollout: RolloutEngine
    rewards: RewardPool
    sampling: SamplingParams
    report: Reporter
    with_baselines: bool

    def collect_batch(
        self, num_groups: int, *, group_filter: GroupFilter | None, kept: Sequence[RolloutGroup], step: int
    ) -> Batch:
        """Return a batch of num_groups groups; those kept from the last step come first.

        Fewer only after max_rounds.
        Raises: DataError if max_rounds leave no group; RewardError if the scores have no number of
        the filter's key.
        """
        drawn: set[str] = set()
        if group_filter is None:
            groups, metrics = self._sample_round(num_groups, step, drawn)
            return self._make_batch(groups, [], metrics, count_response_tokens(groups), step)
        kept_groups = list(kept)
        metrics = {}
        filtered: list[RolloutRow] = []  # not the groups, whose images would stay in memory
        rounds = num_sampled_tokens = 0
        while len(kept_groups) < num_groups and not 0 < group_filter.max_rounds <= rounds:
            rounds += 1
            groups, round_metrics = self._sample_round(group_filter.prompts_per_round, step, drawn)
            num_sampled_tokens += count_response_tokens(groups)
            by_label, fractions = _filter(groups, group_filter)
            kept_groups += by_label["kept"]
            for label in _FILTERED:
                filtered += rollout_rows(by_label[label], filtered=label)
            metrics = merge(metrics, round_metrics, fractions)
        # No more than the next step uses, so that no group becomes older than one step.
        surplus = kept_groups[num_groups : 2 * num_groups] if group_filter.keep_surplus else []
        used = min(len(kept_groups), num_groups) + len(surplus)
        filtered += rollout_rows(kept_groups[used:], filtered="surplus")
        self.report.filtered_rollouts(step, filtered, read_images=self.prompts.image_files)
        counts = {
            "filter/rounds": Sum(float(rounds)),
            "filter/groups": Sum(float(len(kept_groups))),
            "filter/dropped_groups": Sum(float(len(kept_groups) - used)),
        }
        metrics = merge(metrics, counts)
        if len(kept_groups) < num_groups:
            self._report_shortage(len(kept_groups), num_groups, rounds, metrics)
        return self._make_batch(kept_groups[:num_groups], surplus, metrics, num_sampled_tokens, step)

    def _make_batch(
        self, groups: list[RolloutGroup], surplus: list[RolloutGroup], metrics: Metrics, num_tokens: int, step: int
    ) -> Batch:
        baselines = self._greedy_scores(groups, step) if self.with_baselines else None
        if baselines is not None:
            metrics = merge(metrics, {"grader/baselines_missing": Sum(float(baselines.isnan().sum()))})
        return Batch(groups, surplus, metrics, num_tokens, baselines)

    def _greedy_scores(self, groups: Sequence[RolloutGroup], step: int) -> torch.Tensor:
        greedy = replace(self.sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1)
        prompts = [group.prompt for group in groups]
        greedy_groups = collect(prompts, self.rollout, self.rewards, greedy, step=step, phase=self.report.phase)
        scores = {group.prompt.prompt_id: group.rollouts[0].score for group in greedy_groups}
        scored = {name: score.overall for name, score in scores.items() if score.outcome == "ok"}
        return torch.tensor([scored.get(prompt.prompt_id, torch.nan) for prompt in prompts])

    def _sample_round(self, num_prompts: int, step: int, drawn: set[str]) -> tuple[list[RolloutGroup], Metrics]:
        """Sample and score one round.

        drawn: ids of this step's prompts so far; those of this round are added.
        """
        is_first_round = step == 1 and not drawn
        with self.report.phase("data"):
            prompts = [_with_unique_id(prompt, drawn) for prompt in self.prompts.take(num_prompts)]
        groups = collect(prompts, self.rollout, self.rewards, self.sampling, step=step, phase=self.report.phase)
        if is_first_round:
            self._warn_if_rewards_are_equal(groups)
        skipped = {"rollout/num_set_aside": Sum(float(len(prompts) - len(groups)))}
        return groups, merge(describe_groups(groups), skipped)

    def _warn_if_rewards_are_equal(self, groups: Sequence[RolloutGroup]) -> None:
        scored = [(group.prompt, r) for group in groups for r in group.rollouts if r.score.outcome == "ok"]
        rewards = {rollout.score.overall for _, rollout in scored}
        if len(scored) < 2 or len(rewards) > 1:
            return
        prompt, rollout = scored[0]
        ground_truth = f"{repr(prompt.ground_truth)[:100]} (a {type(prompt.ground_truth).__name__})"
        self.report.warn(
            f"ALL REWARDS ARE EQUAL: each of the {len(scored)} completions of the first step got {rewards.pop():g}, "
            f"and nothing can be learned from equal rewards. Either the task is too hard or too easy for the model, "
            "or the reward function does not see what it expects: compare the ground truth with the completions. "
            f"{prompt.prompt_id} has the ground truth {ground_truth} and the completion "
            f"{rollout.completion.text[-200:]!r}; rollouts/ in the run folder will hold all of them"
        )

    def _report_shortage(self, num_found: int, num_groups: int, rounds: int, metrics: Metrics) -> None:
        low, high = (metrics[f"filter/{name}_fraction"].value for name in ("low", "high"))
        problem = (
            f"online filtering found {num_found} of {num_groups} groups in {rounds} rounds "
            f"(trainer.max_try_make_batch): {low:.0%} of those sampled were at or below algorithm.filter_low, "
            f"{high:.0%} at or above filter_high"
        )
        if num_found == 0:
            raise DataError(
                f"{problem}; use data or a prompt template for which the model is sometimes right, raise "
                "worker.rollout.n, or set algorithm.online_filtering=false"
            )
        self.report.warn(f"{problem}; the step learns from {num_found}")


def count_response_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Return the number of sampled tokens of all completions."""
    return sum(rollout.completion.num_sampled for group in groups for rollout in group.rollouts)


def _with_unique_id(prompt: Prompt, drawn: set[str]) -> Prompt:
    """Return the prompt with an id that is not in drawn, and add the id to drawn.

    A step that crosses the end of an epoch can draw a prompt twice; the stream, which counts by
    epoch, cannot see it.
    """
    occurrence = 1
    while prompt.prompt_id in drawn:
        occurrence += 1
        prompt = with_repeat_id(prompt, occurrence)
    drawn.add(prompt.prompt_id)
    return prompt


def _filter(
    groups: Sequence[RolloutGroup], group_filter: GroupFilter
) -> tuple[dict[GroupClass, list[RolloutGroup]], Metrics]:
    """Return the groups by class ("kept" ones pass the filter), and the fraction of each."""
    values = torch.tensor(
        [[rollout.score.parts.get(group_filter.key, torch.nan) for rollout in group.rollouts] for group in groups],
        dtype=torch.float64,  # so that a bound of 0.1 equals the 0.1 that a reward function returns
    )
    scored = [[rollout.score.outcome == "ok" for rollout in group.rollouts] for group in groups]
    valid = torch.tensor(scored)
    if bool((valid & values.isnan()).any()):
        raise RewardError(_unknown_key(groups, group_filter.key))
    labels = classify_groups(values, valid, low=group_filter.low, high=group_filter.high)
    by_label: dict[GroupClass, list[RolloutGroup]] = {"kept": [], "low": [], "high": [], "unscored": []}
    for group, label in zip(groups, labels, strict=True):
        by_label[label].append(group)
    return by_label, {
        "filter/kept_fraction": mean_of(float(label == "kept") for label in labels),
        "filter/low_fraction": mean_of(float(label == "low") for label in labels),
        "filter/high_fraction": mean_of(float(label == "high") for label in labels),
        "filter/ungraded_fraction": mean_of(float(label == "unscored") for label in labels),
    }


def _unknown_key(groups: Sequence[RolloutGroup], key: str) -> str:
    scored = [r.score.parts for group in groups for r in group.rollouts if r.score.outcome == "ok"]
    names = sorted(next(parts for parts in scored if key not in parts))
    hint = did_you_mean(key, names)
    found = ", ".join(names)
    return f"algorithm.filter_key={key}: the reward function returned no number of that name, only {found}{hint}"


# -- groups kept for the next step, in checkpoints --


def surplus_state(groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
    """Return groups as JSON values: prompts by id, completions and scores in full."""
    return [
        {
            "prompt_id": group.prompt.prompt_id,
            "rollouts": [
                {
                    "token_ids": list(rollout.completion.token_ids),
                    "sampling_logprobs": list(rollout.completion.sampling_logprobs),
                    "finish_reason": rollout.completion.finish_reason,
                    "text": rollout.completion.text,
                    "policy_version": rollout.completion.policy_version,
                    **_episode_state(rollout.completion),
                    "overall": rollout.score.overall,
                    "parts": dict(rollout.score.parts),
                    "outcome": rollout.score.outcome,
                    "error": rollout.score.error,
                }
                for rollout in group.rollouts
            ],
        }
        for group in groups
    ]


def load_surplus(
    state: Sequence[dict[str, Any]], prompts: PromptStream, *, n: int, warn: Callable[[str], None]
) -> list[RolloutGroup]:
    """Return the groups that surplus_state wrote, with their prompts built again from the dataset.

    n: completions per group; groups of another size, and those whose row can no longer be used, are
    dropped with a warning. Raises: as PromptStream.rebuilt.
    """
    groups = []
    for group in state:
        if len(group["rollouts"]) != n:
            warn(
                f"{group['prompt_id']}: its {len(group['rollouts'])} completions, kept from the last step, are "
                f"dropped, because worker.rollout.n is now {n}"
            )
            continue
        try:
            prompt = prompts.rebuild(group["prompt_id"])
        except BadRow as problem:
            warn(f"its completions, kept from the last step, are dropped: {problem}")
            continue
        groups.append(RolloutGroup(prompt, tuple(map(_load_rollout, group["rollouts"]))))
    return groups


def _load_rollout(state: dict[str, Any]) -> Rollout:
    return Rollout(
        Completion(
            token_ids=tuple(state["token_ids"]),
            sampling_logprobs=tuple(state["sampling_logprobs"]),
            finish_reason=state["finish_reason"],
            text=state["text"],
            policy_version=state["policy_version"],
            turns=tuple(Turn(*turn) for turn in state.get("turns", ())),
            vision=_load_observed(state.get("images", ())),
            error=state.get("episode_error", ""),
        ),
        Score(state["overall"], state["parts"], state["outcome"], state["error"]),
    )


def _episode_state(completion: Completion) -> dict[str, Any]:
    """Return what a completion has beyond one turn; {} for one turn without an error."""
    if len(completion.turns) == 1 and completion.num_sampled == len(completion.token_ids) and not completion.error:
        return {}
    assert not isinstance(completion.vision, Vision), "pixels are not written; use EncodedMedia"
    files = () if completion.vision is None else completion.vision.encoded
    return {
        "turns": [astuple(turn) for turn in completion.turns],
        "images": [base64.b64encode(file).decode("ascii") for file in files],
        "episode_error": completion.error,
    }


def _load_observed(images: Sequence[str]) -> EncodedMedia | None:
    files = tuple(map(base64.b64decode, images))
    return EncodedMedia(files, tuple(hashlib.sha256(file).hexdigest() for file in files)) if files else None
