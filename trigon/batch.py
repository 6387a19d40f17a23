"""Collects the groups that a step learns from.

One round of sampling, or as many as online filtering takes. With oversampling, the round stops as
soon as enough groups are complete. With a group filter (DAPO's dynamic
sampling, arXiv:2503.14476, section 3.2), groups whose completions are all right or all wrong are
filtered out, and more prompts are sampled. Called while the rollout engine is awake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from trigon.algorithms.group_filter import GroupClass, classify_groups
from trigon.carried import (
    CarriedGroup,
    Oversampling,
    completion_state,
    count_sampled,
    describe_carried,
    load_completion,
)
from trigon.data.stream import PromptStream, with_repeat_id
from trigon.errors import BadRow, DataError, EngineError, RewardError
from trigon.metrics import Metrics, Sum, mean_of, merge
from trigon.report.recorder import ReadImages
from trigon.report.rollouts import RolloutRow, rollout_rows
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect, collect_until
from trigon.rollout.protocol import RolloutEngine, Until
from trigon.rollout.statistics import describe_groups
from trigon.system.suggestions import did_you_mean
from trigon.types import Phase, Prompt, Rollout, RolloutGroup, SamplingParams, Score

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
    carried: groups that have not been sampled to their end, for the next step; oldest first.
    """

    groups: list[RolloutGroup]
    surplus: list[RolloutGroup]
    metrics: Metrics
    num_sampled_tokens: int
    baselines: torch.Tensor | None
    carried: list[CarriedGroup] = field(default_factory=list)


class SamplerReport(Protocol):
    """What a Sampler reports to. Reporter satisfies it."""

    @property
    def phase(self) -> Phase: ...

    def warn(self, text: str) -> None: ...

    def filtered_rollouts(self, step: int, rows: Sequence[RolloutRow], *, read_images: ReadImages) -> None: ...


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws prompts, samples and scores completions.

    with_baselines: also one greedy completion per prompt. total_steps: the number of the last step.
    oversampling: None: none.
    """

    prompts: PromptStream
    rollout: RolloutEngine
    rewards: RewardPool
    sampling: SamplingParams
    report: SamplerReport
    with_baselines: bool
    total_steps: int
    oversampling: Oversampling | None = None

    def collect_batch(
        self,
        num_groups: int,
        *,
        group_filter: GroupFilter | None,
        kept: Sequence[RolloutGroup],
        step: int,
        carried: Sequence[CarriedGroup] = (),
    ) -> Batch:
        """Return a batch of num_groups groups; those kept from the last step come first.

        Fewer only after max_rounds. carried: groups that the last step has not sampled to their
        end, with oversampling.
        Raises: DataError if max_rounds leave no group; RewardError if the scores have no number of
        the filter's key.
        """
        drawn: set[str] = set()
        if self.oversampling is not None:
            assert group_filter is None, "the configuration was checked"
            return self._oversample(num_groups, self.oversampling, kept, carried, step)
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

    def _oversample(
        self,
        num_groups: int,
        settings: Oversampling,
        kept: Sequence[RolloutGroup],
        carried: Sequence[CarriedGroup],
        step: int,
    ) -> Batch:
        """Return a batch of groups that are complete first.

        What was carried is sampled first. All complete groups are learned from, in this step or in
        the next: the first num_groups of those kept, then of those sampled, in the order of their
        prompts, so that what is oldest comes first. No more prompts are drawn than the steps that
        are left learn from, and the last step waits for all, so that none is left in the end.
        Raises: EngineError if no group can be learned from.
        """
        needed = max(0, num_groups - len(kept))
        num_left = num_groups * (self.total_steps - step + 1)
        num_sampled = min(math.ceil(needed * (1.0 + settings.share)), num_left - len(kept))
        num_new = max(0, num_sampled - len(carried))
        drawn = {group.prompt.prompt_id for group in kept} | {group.prompt.prompt_id for group in carried}
        with self.report.phase("data"):
            new = [with_unique_id(prompt, drawn) for prompt in self.prompts.take(num_new)]
        if not needed:  # those kept from the last step suffice
            metrics = merge(
                describe_groups(kept),
                {"rollout/num_set_aside": Sum(0.0)},
                describe_carried(carried),
            )
            batch = self._make_batch(list(kept[:num_groups]), list(kept[num_groups:]), metrics, 0, step)
            return replace(batch, carried=[replace(each, num_steps=each.num_steps + 1) for each in carried])
        prompts = [*(group.prompt for group in carried), *new]
        num_oldest = sum(group.num_steps >= settings.max_carried_steps for group in carried)
        until = Until(
            needed,
            num_required=len(prompts) if step == self.total_steps else num_oldest,
            begun=tuple(group.completions for group in carried),
        )
        collected = collect_until(
            prompts, self.rollout, self.rewards, self.sampling, until, step=step, phase=self.report.phase
        )
        groups = collected.groups
        if step == 1:
            warn_if_rewards_are_equal(groups, self.report.warn)
        nums_carried = {group.prompt.prompt_id: group.num_steps for group in carried}
        left = [
            CarriedGroup(prompt, completions, nums_carried.get(prompt.prompt_id, 0) + 1)
            for prompt, completions in collected.unfinished
        ]
        left.sort(key=lambda group: -group.num_steps)
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        unfinished = [completion for _, row in collected.unfinished for completion in row]
        # Not of a group that failed, whose new tokens are not known either.
        returned = {prompt.prompt_id for prompt, _ in collected.unfinished}
        returned |= {group.prompt.prompt_id for group in groups}
        before = (each for group in carried if group.prompt.prompt_id in returned for each in group.completions)
        num_tokens = count_sampled([*completions, *unfinished]) - count_sampled(before)
        everything = [*kept, *groups]
        used = everything[:num_groups]
        if not used:  # several replicas: some failed, and the others had none to complete
            raise EngineError(
                f"The rollout engine completed none of {len(prompts)} groups: each failed twice, or is unfinished. See "
                "the engine's log."
            )
        num_failed = len(prompts) - len(groups) - len(collected.unfinished)
        metrics = merge(
            describe_groups(groups),
            {"rollout/num_set_aside": Sum(float(num_failed))},
            describe_carried(left),
        )
        batch = self._make_batch(used, everything[num_groups:], metrics, num_tokens, step)
        return replace(batch, carried=left)

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
            prompts = [with_unique_id(prompt, drawn) for prompt in self.prompts.take(num_prompts)]
        groups = collect(prompts, self.rollout, self.rewards, self.sampling, step=step, phase=self.report.phase)
        if is_first_round:
            warn_if_rewards_are_equal(groups, self.report.warn)
        skipped = {"rollout/num_set_aside": Sum(float(len(prompts) - len(groups)))}
        return groups, merge(describe_groups(groups), skipped)

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


def warn_if_rewards_are_equal(groups: Sequence[RolloutGroup], warn: Callable[[str], None]) -> None:
    """Warn if the rewards of several completions, those of the first step, are all equal."""
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


def count_response_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Return the number of sampled tokens of all completions."""
    return sum(rollout.completion.num_sampled for group in groups for rollout in group.rollouts)


def with_unique_id(prompt: Prompt, drawn: set[str]) -> Prompt:
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
                    **completion_state(rollout.completion),
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
    return Rollout(load_completion(state), Score(state["overall"], state["parts"], state["outcome"], state["error"]))
