"""What a step learns from: rounds of sampling, until enough groups are worth learning from.

Without a selection one round is all. With one (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2) groups whose
answers are all right or all wrong are set aside, and more prompts are drawn for them. Knows protocols and passports
only. To be called while the rollout engine is awake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

from trigon.algorithms.group_filter import classify_groups
from trigon.data.stream import PromptStream, with_repeat_id
from trigon.errors import BadRow, DataError, RewardError
from trigon.metrics import Metrics, Sum, mean_of, merge
from trigon.report.reporter import Reporter
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.statistics import describe_groups
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, SamplingParams, Score


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which groups are learned from: those whose mean `key` lies strictly between low and high.

    prompts_per_round: drawn at a time. max_rounds: of a step; 0: no limit. keep_surplus: whether groups beyond those
    wanted are used in the next step, or dropped.
    """

    key: str
    low: float
    high: float
    prompts_per_round: int
    max_rounds: int
    keep_surplus: bool


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """groups: to be learned from. surplus: kept for the next step. metrics: of everything that was sampled.

    num_sampled_tokens: of all responses, learned from or not. baselines: [G] float32, the reward of each prompt's
    likeliest completion, nan where it could not be graded; None where they are not wanted.
    """

    groups: list[RolloutGroup]
    surplus: list[RolloutGroup]
    metrics: Metrics
    num_sampled_tokens: int
    baselines: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws prompts, samples and scores them. with_baselines: once more, greedily."""

    prompts: PromptStream
    rollout: RolloutEngine
    rewards: RewardPool
    sampling: SamplingParams
    report: Reporter
    with_baselines: bool

    def collect_batch(
        self, *, wanted: int, group_filter: GroupFilter | None, kept: Sequence[RolloutGroup], step: int
    ) -> Batch:
        """Return a batch of `wanted` groups, those kept from the step before first; fewer only after max_rounds.

        Raises: DataError if after max_rounds there is none; RewardError if no reply has the selection's key.
        """
        drawn: set[str] = set()
        if group_filter is None:
            groups, metrics = self._round(wanted, step, drawn)
            return self._batch(groups, [], metrics, count_response_tokens(groups), step)
        found = list(kept)
        metrics = {}
        rounds = num_sampled_tokens = 0
        while len(found) < wanted and not 0 < group_filter.max_rounds <= rounds:
            rounds += 1
            groups, of_round = self._round(group_filter.prompts_per_round, step, drawn)
            num_sampled_tokens += count_response_tokens(groups)
            chosen, shares = _select(groups, group_filter)
            found += chosen
            metrics = merge(metrics, of_round, shares)
        # No more than the next step takes, so that nothing grows older than one step.
        surplus = found[wanted : 2 * wanted] if group_filter.keep_surplus else []
        used = min(len(found), wanted) + len(surplus)
        counts = {
            "filter/rounds": Sum(float(rounds)),
            "filter/groups": Sum(float(len(found))),
            "filter/dropped_groups": Sum(float(len(found) - used)),
        }
        metrics = merge(metrics, counts)
        if len(found) < wanted:
            self._report_shortage(len(found), wanted, rounds, metrics)
        return self._batch(found[:wanted], surplus, metrics, num_sampled_tokens, step)

    def _batch(
        self, groups: list[RolloutGroup], surplus: list[RolloutGroup], metrics: Metrics, num_tokens: int, step: int
    ) -> Batch:
        baselines = self._greedy_scores(groups, step) if self.with_baselines else None
        if baselines is not None:
            metrics = merge(metrics, {"grader/baselines_missing": Sum(float(baselines.isnan().sum()))})
        return Batch(groups, surplus, metrics, num_tokens, baselines)

    def _greedy_scores(self, groups: Sequence[RolloutGroup], step: int) -> torch.Tensor:
        greedy = replace(self.sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1)
        prompts = [group.prompt for group in groups]
        answers = collect(prompts, self.rollout, self.rewards, greedy, step=step, phase=self.report.phase)
        scores = {answer.prompt.prompt_id: answer.rollouts[0].score for answer in answers}
        graded = {name: score.overall for name, score in scores.items() if score.outcome == "ok"}
        return torch.tensor([graded.get(prompt.prompt_id, torch.nan) for prompt in prompts])

    def _round(self, num_prompts: int, step: int, drawn: set[str]) -> tuple[list[RolloutGroup], Metrics]:
        """drawn: the names of this step's prompts so far, to which those of this round are added."""
        with self.report.phase("data"):
            prompts = [_renamed(prompt, drawn) for prompt in self.prompts.take(num_prompts)]
        groups = collect(prompts, self.rollout, self.rewards, self.sampling, step=step, phase=self.report.phase)
        set_aside = {"rollout/num_set_aside": Sum(float(len(prompts) - len(groups)))}
        return groups, merge(describe_groups(groups), set_aside)

    def _report_shortage(self, found: int, wanted: int, rounds: int, metrics: Metrics) -> None:
        low, high = (metrics[f"filter/{name}_fraction"].value for name in ("low", "high"))
        problem = (
            f"online filtering found {found} of {wanted} groups in {rounds} rounds (trainer.max_try_make_batch): "
            f"{low:.0%} of those sampled were at or below algorithm.filter_low, {high:.0%} at or above filter_high"
        )
        if found == 0:
            raise DataError(
                f"{problem}; use data or a prompt that the model gets right now and then, raise worker.rollout.n, or "
                "set algorithm.online_filtering=false"
            )
        self.report.warn(f"{problem}; the step learns from {found}")


def count_response_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Return the tokens of all completions."""
    return sum(len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts)


def _renamed(prompt: Prompt, drawn: set[str]) -> Prompt:
    """Return a prompt under a name that is not among those drawn, and add it to them.

    A step that comes to the end of the data can draw a prompt again, which the stream, counting by epoch, does not see.
    """
    time = 1
    while prompt.prompt_id in drawn:
        time += 1
        prompt = with_repeat_id(prompt, time)
    drawn.add(prompt.prompt_id)
    return prompt


def _select(groups: Sequence[RolloutGroup], group_filter: GroupFilter) -> tuple[list[RolloutGroup], Metrics]:
    """Return the groups that are worth learning from, and the shares of those that are not."""
    values = torch.tensor(
        [[rollout.score.parts.get(group_filter.key, torch.nan) for rollout in group.rollouts] for group in groups],
        dtype=torch.float64,  # in which a bound of 0.1 is the very number that a reward function returns
    )
    graded = [[rollout.score.outcome == "ok" for rollout in group.rollouts] for group in groups]
    valid = torch.tensor(graded)
    if bool((valid & values.isnan()).any()):
        raise RewardError(_unknown_key(groups, group_filter.key))
    judged = classify_groups(values, valid, low=group_filter.low, high=group_filter.high)
    return [group for group, label in zip(groups, judged, strict=True) if label == "kept"], {
        "filter/kept_fraction": mean_of(float(label == "kept") for label in judged),
        "filter/low_fraction": mean_of(float(label == "low") for label in judged),
        "filter/high_fraction": mean_of(float(label == "high") for label in judged),
        "filter/ungraded_fraction": mean_of(float(label == "ungraded") for label in judged),
    }


def _unknown_key(groups: Sequence[RolloutGroup], key: str) -> str:
    replies = [r.score.parts for group in groups for r in group.rollouts if r.score.outcome == "ok"]
    names = sorted(next(parts for parts in replies if key not in parts))
    near = get_close_matches(key, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"algorithm.filter_key={key}: the reward function's reply has no such number, only {', '.join(names)}{hint}"


# -- what a checkpoint remembers of a surplus -------------------------------------------------------------------------


def surplus_state(groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
    """Return groups as JSON can hold them: prompts by their ids, completions and scores whole."""
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


def surplus_from(
    state: Sequence[dict[str, Any]], prompts: PromptStream, *, n: int, warn: Callable[[str], None]
) -> list[RolloutGroup]:
    """Return the groups of surplus_state, their prompts built anew. warn: hears of those that can no longer be used.

    n: completions of a group. Raises: as PromptStream.rebuilt.
    """
    groups = []
    for group in state:
        if len(group["rollouts"]) != n:
            warn(
                f"{group['prompt_id']}: its {len(group['rollouts'])} answers, kept from the step before, are dropped, "
                f"since worker.rollout.n is {n} now"
            )
            continue
        try:
            prompt = prompts.rebuild(group["prompt_id"])
        except BadRow as problem:
            warn(f"its answers, kept from the step before, are dropped: {problem}")
            continue
        groups.append(RolloutGroup(prompt, tuple(map(_rollout_from, group["rollouts"]))))
    return groups


def _rollout_from(state: dict[str, Any]) -> Rollout:
    return Rollout(
        Completion(
            token_ids=tuple(state["token_ids"]),
            sampling_logprobs=tuple(state["sampling_logprobs"]),
            finish_reason=state["finish_reason"],
            text=state["text"],
            policy_version=state["policy_version"],
        ),
        Score(state["overall"], state["parts"], state["outcome"], state["error"]),
    )
