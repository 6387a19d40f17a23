"""What a step learns from: rounds of sampling, until enough groups are worth learning from.

Without a selection one round is all. With one (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2) groups whose
answers are all right or all wrong are set aside, and more prompts are drawn for them. Knows protocols and passports
only. To be called while the rollout engine is awake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

from trigon.algorithms.select import verdicts
from trigon.data.stream import PromptStream
from trigon.errors import DataError, RewardError
from trigon.metrics import Metrics, Sum, mean_of, merge
from trigon.report.reporter import Reporter
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.statistics import describe_groups
from trigon.types import Completion, Rollout, RolloutGroup, SamplingParams, Score


@dataclass(frozen=True, slots=True)
class Selection:
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
    """groups: to be learned from. surplus: kept for the next step. metrics: of everything that was sampled."""

    groups: list[RolloutGroup]
    surplus: list[RolloutGroup]
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws prompts, samples and scores them."""

    prompts: PromptStream
    rollout: RolloutEngine
    rewards: RewardPool
    sampling: SamplingParams
    report: Reporter

    def fill(self, *, wanted: int, selection: Selection | None, kept: Sequence[RolloutGroup], step: int) -> Batch:
        """Return a batch of `wanted` groups, those kept from the step before first; fewer only after max_rounds.

        Raises: DataError if after max_rounds there is none; RewardError if no reply has the selection's key.
        """
        if selection is None:
            groups, metrics = self._round(wanted, step)
            return Batch(groups, [], metrics)
        found = list(kept)
        metrics = {}
        rounds = 0
        while len(found) < wanted and not 0 < selection.max_rounds <= rounds:
            rounds += 1
            groups, of_round = self._round(selection.prompts_per_round, step)
            chosen, shares = _select(groups, selection)
            found += chosen
            metrics = merge(metrics, of_round, shares)
        metrics = merge(metrics, {"filter/rounds": Sum(float(rounds)), "filter/groups": Sum(float(len(found)))})
        if len(found) < wanted:
            self._report_shortage(len(found), wanted, rounds, metrics)
        surplus = found[wanted:] if selection.keep_surplus else []
        return Batch(found[:wanted], surplus, metrics)

    def greedy_scores(self, groups: Sequence[RolloutGroup], *, step: int) -> torch.Tensor:
        """Return the reward of each prompt's likeliest completion: [G] float32, nan where it could not be graded."""
        greedy = replace(self.sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1)
        prompts = [group.prompt for group in groups]
        answers = collect(prompts, self.rollout, self.rewards, greedy, step=step, phase=self.report.phase)
        scores = {answer.prompt.prompt_id: answer.rollouts[0].score for answer in answers}
        return torch.tensor(
            [
                scores[prompt.prompt_id].overall
                if prompt.prompt_id in scores and scores[prompt.prompt_id].outcome == "ok"
                else torch.nan
                for prompt in prompts
            ]
        )

    def _round(self, num_prompts: int, step: int) -> tuple[list[RolloutGroup], Metrics]:
        with self.report.phase("data"):
            prompts = self.prompts.take(num_prompts)
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


def _select(groups: Sequence[RolloutGroup], selection: Selection) -> tuple[list[RolloutGroup], Metrics]:
    """Return the groups that are worth learning from, and the shares of those that are not."""
    values = torch.tensor(
        [[rollout.score.parts.get(selection.key, torch.nan) for rollout in group.rollouts] for group in groups]
    )
    graded = [[rollout.score.outcome == "ok" for rollout in group.rollouts] for group in groups]
    valid = torch.tensor(graded)
    if bool((valid & values.isnan()).any()):
        raise RewardError(_unknown_key(groups, selection.key))
    judged = verdicts(values, valid, low=selection.low, high=selection.high)
    return [group for group, verdict in zip(groups, judged, strict=True) if verdict == "kept"], {
        "filter/kept_fraction": mean_of(float(verdict == "kept") for verdict in judged),
        "filter/low_fraction": mean_of(float(verdict == "low") for verdict in judged),
        "filter/high_fraction": mean_of(float(verdict == "high") for verdict in judged),
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


def surplus_from(state: Sequence[dict[str, Any]], prompts: PromptStream) -> list[RolloutGroup]:
    """Return the groups of surplus_state, their prompts built anew. Raises: as PromptStream.rebuilt."""
    return [
        RolloutGroup(
            prompts.rebuilt(group["prompt_id"]),
            tuple(
                Rollout(
                    Completion(
                        token_ids=tuple(rollout["token_ids"]),
                        sampling_logprobs=tuple(rollout["sampling_logprobs"]),
                        finish_reason=rollout["finish_reason"],
                        text=rollout["text"],
                        policy_version=rollout["policy_version"],
                    ),
                    Score(rollout["overall"], rollout["parts"], rollout["outcome"], rollout["error"]),
                )
                for rollout in group["rollouts"]
            ),
        )
        for group in state
    ]
