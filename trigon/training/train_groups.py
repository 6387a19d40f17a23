"""From scored groups to the groups that an update learns from.

Computes log-probabilities, KL penalties and advantages, between sampling and the update. Uses the
train engine and the reference through their protocols.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trigon.algorithms.advantages import (
    Estimates,
    RewardBatch,
    estimate_advantages,
    estimate_with_values,
    explained_variance,
)
from trigon.algorithms.losses import AdaptiveKl, kl_per_token
from trigon.config.names import KlEstimator
from trigon.config.schema import AlgorithmConfig
from trigon.errors import RewardError
from trigon.metrics import Mean, Metric, Metrics, mean_max_min, merge
from trigon.training.protocol import CriticEngine, LogprobEngine, TrainEngine, TrunkCriticEngine
from trigon.types import Phase, RolloutGroup, TrainGroup, TrainSequence


class GroupPreparation:
    """Computes what an update needs of a step's groups: log-probabilities, KL and advantages."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        trainer: TrainEngine,
        *,
        reference: LogprobEngine | None,
        critic: CriticEngine | None,
        needs_old_logprobs: bool,
        phase: Phase,
    ) -> None:
        """Begin with the first step.

        Args:
            reference: None where no term needs its log-probabilities.
            critic: the critic of the estimator gae; None with other estimators. On the policy's
                trunk it computes values and log-probabilities in one pass.
            needs_old_logprobs: whether the policy's own log-probabilities are computed before the
                first update: the policy changes between sampling and the last update of a step, or
                the KL in the reward needs them.
            phase: times "old", "ref" and "values".
        """
        self._algorithm, self._trainer, self._reference, self._critic = algorithm, trainer, reference, critic
        self._needs_old_logprobs, self._phase = needs_old_logprobs, phase
        horizon = algorithm.kl_horizon if algorithm.kl_type == "adaptive" else 0.0
        self._kl = AdaptiveKl(algorithm.kl_coef, algorithm.kl_target, horizon)

    def prepare(self, groups: Sequence[RolloutGroup]) -> tuple[list[TrainGroup], Metrics]:
        """Return what an update learns from these groups, and its metrics.

        An adaptive coefficient of the KL is updated for the next step.
        """
        algorithm, critic, phase = self._algorithm, self._critic, self._phase
        old = ref = penalties = values = None
        metrics: Metrics = {}
        if self._needs_old_logprobs:
            with phase("old"):
                if isinstance(critic, TrunkCriticEngine):
                    old, values = critic.logprobs_and_values(groups)
                else:
                    old = self._trainer.logprobs(groups)
        if self._reference is not None:
            with phase("ref"):
                ref = self._reference.logprobs(groups)
        if algorithm.kl_in_reward is not None:
            with phase("ref"):
                token_kl = kl_of_tokens(groups, algorithm.kl_in_reward, self._trainer, old=old, ref=ref)
            penalties = [[self._kl.coefficient * tokens for tokens in group] for group in token_kl]
            # The mean over completions of the mean over each one's tokens, as EasyR1 does.
            means = torch.stack([tokens.mean() for group in token_kl for tokens in group])
            mean_kl = Mean(float(means.sum()), float(means.numel()))
            metrics = {"actor/kl_penalty": mean_kl, "actor/kl_coef": Mean(self._kl.coefficient)}
            self._kl = self._kl.updated(mean_kl.value, sum(map(len, token_kl)))
        rewards = build_reward_batch(groups, algorithm, penalties=penalties, baselines=baselines_of(groups))
        estimates = None
        if algorithm.adv_estimator == "gae":
            assert critic is not None, "gae needs a critic"
            if values is None:
                with phase("values"):
                    values = critic.values(groups)
            estimates = estimate_with_values(rewards, values, algorithm, cut=is_cut(groups))
            metrics = merge(metrics, describe_critic(estimates.values, estimates.returns, rewards.valid))
            advantages = estimates.advantages
        else:
            advantages = estimate_advantages(
                rewards, algorithm.adv_estimator, gamma=algorithm.gamma, weights=algorithm.reward_weights or None
            )
        trains = rewards.valid & ~is_cut(groups) if algorithm.overlong_filtering else rewards.valid  # [G, N]
        learned = build_train_groups(groups, advantages, trains, old=old, ref=ref, estimates=estimates)
        return learned, merge(metrics, describe_learned(groups, rewards.totals(), advantages, rewards.valid))

    def state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint, as JSON. Read by load_state."""
        return {"kl_coefficient": self._kl.coefficient}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with the adaptive coefficient of a saved run.

        A fixed coefficient, and the target, come from the configuration.
        """
        if self._kl.horizon > 0:
            self._kl = replace(self._kl, coefficient=state["kl_coefficient"])


def baselines_of(groups: Sequence[RolloutGroup]) -> Tensor | None:
    """Return the rewards of the greedy completions, [G] float32; nan where one is not scored.

    None if there are none.
    """
    if all(group.baseline is None for group in groups):
        return None
    scores = [None if group.baseline is None else group.baseline.score for group in groups]
    return torch.tensor([torch.nan if score is None or score.outcome != "ok" else score.overall for score in scores])


def build_reward_batch(
    groups: Sequence[RolloutGroup],
    algorithm: AlgorithmConfig,
    *,
    penalties: Sequence[Sequence[Tensor]] | None,
    baselines: Tensor | None,
) -> RewardBatch:
    """Return the groups' rewards as tensors.

    Raises: RewardError if a part of the reward that gdpo needs is missing.
    """
    rollouts = [group.rollouts for group in groups]
    valid = torch.tensor([[rollout.score.outcome == "ok" for rollout in row] for row in rollouts])
    if baselines is not None:  # without a baseline to compare with, a completion counts as not scored
        valid &= baselines.isfinite()[:, None]
    return RewardBatch(
        rewards=torch.tensor([[rollout.score.overall for rollout in row] for row in rollouts]),
        valid=valid,
        lengths=torch.tensor([[rollout.completion.num_sampled for rollout in row] for row in rollouts]),
        penalties=penalties,
        parts=reward_parts(groups, algorithm.reward_weights or None) if algorithm.adv_estimator == "gdpo" else {},
        baselines=baselines,
    )


def reward_parts(groups: Sequence[RolloutGroup], weights: Mapping[str, float] | None) -> dict[str, Tensor]:
    """Return the parts of the rewards that weights names, each [G, N] float32.

    weights: None selects all parts but overall.
    Completions that could not be scored get 0. Raises: RewardError if there is no part, or if a
    score lacks one.
    """
    scores = [[rollout.score for rollout in group.rollouts] for group in groups]
    scored = [score.parts for row in scores for score in row if score.outcome == "ok"]
    names = sorted({name for parts in scored for name in parts} - {"overall"} if weights is None else weights)
    missing = sorted({name for name in names for parts in scored if name not in parts})
    if missing or (scored and not names):
        lacking = f"some scores lack {', '.join(missing)}" if missing else "there is nothing but overall"
        found = ", ".join(sorted({name for parts in scored for name in parts}))
        raise RewardError(
            f"algorithm.adv_estimator=gdpo normalizes each part of the reward, but {lacking} (found: {found}); return "
            "them from the reward function, or name others in algorithm.reward_weights"
        )
    return {name: torch.tensor([[score.parts.get(name, 0.0) for score in row] for row in scores]) for name in names}


def is_cut(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return [G, N] bool: whether each completion was cut at the length limit."""
    return torch.tensor(
        [[rollout.completion.finish_reason == "length" for rollout in group.rollouts] for group in groups]
    )


def kl_of_tokens(
    groups: Sequence[RolloutGroup],
    estimator: KlEstimator,
    trainer: TrainEngine,
    *,
    old: Sequence[Sequence[Tensor]] | None,
    ref: Sequence[Sequence[Tensor]] | None,
) -> Sequence[Sequence[Tensor]]:
    """Return the KL of each sampled token, [S] for each completion.

    The trainer computes the full KL.
    """
    if estimator == "full":
        return trainer.full_kl(groups)
    assert old is not None, "a KL in the reward needs the policy's own log-probabilities"
    assert ref is not None, "a KL in the reward needs a reference"
    return [
        [
            kl_per_token(logprobs, ref_logprobs, estimator)
            for logprobs, ref_logprobs in zip(old_group, ref_group, strict=True)
        ]
        for old_group, ref_group in zip(old, ref, strict=True)
    ]


def build_train_groups(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[Sequence[Tensor]],
    trains: Tensor,
    *,
    old: Sequence[Sequence[Tensor]] | None,
    ref: Sequence[Sequence[Tensor]] | None,
    estimates: Estimates | None = None,
) -> list[TrainGroup]:
    """Return each completion with what the loss needs.

    trains: [G, N] bool; the loss leaves the others out. estimates: what a critic learns from.
    """
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    lengths = [completion.num_sampled for completion in completions]
    sampling_logprobs = torch.tensor([value for completion in completions for value in completion.sampling_logprobs])
    # One tensor for the whole step and views of it: a tensor of its own for each completion costs
    # ten times as much.
    each_mask = iter(trains.float().flatten().repeat_interleave(torch.tensor(lengths)).split_with_sizes(lengths))
    each_logprobs = iter(sampling_logprobs.split_with_sizes(lengths))
    return [
        TrainGroup(
            prompt=group.prompt,
            sequences=tuple(
                TrainSequence(
                    token_ids=rollout.completion.token_ids,
                    loss_mask=next(each_mask),
                    advantages=advantages[g][i],
                    sampling_logprobs=next(each_logprobs),
                    old_logprobs=None if old is None else old[g][i],
                    ref_logprobs=None if ref is None else ref[g][i],
                    sampled=rollout.completion.sampled,
                    vision=rollout.completion.vision,
                    values=None if estimates is None else estimates.values[g][i],
                    returns=None if estimates is None else estimates.returns[g][i],
                    routed_experts=rollout.completion.routed_experts,
                )
                for i, rollout in enumerate(group.rollouts)
            ),
        )
        for g, group in enumerate(groups)
    ]


def describe_learned(
    groups: Sequence[RolloutGroup], rewards: Tensor, advantages: Sequence[Sequence[Tensor]], valid: Tensor
) -> dict[str, Metric]:
    """Return metrics of the groups that the policy learns from.

    Args:
        rewards: [G, N] float, after the KL penalty if there is one.
        advantages: [S] float for each completion of each group.
        valid: [G, N] bool, whether a completion was scored; others are in no metric.
    """
    scores = (each.score.overall for group in groups for each in group.rollouts if each.score.outcome == "ok")
    completions = [tokens for group in advantages for tokens in group]
    lengths = torch.tensor([len(tokens) for tokens in completions])
    means = torch.segment_reduce(torch.cat(completions), "mean", lengths=lengths).view(valid.shape)
    return {
        **mean_max_min("critic/score", scores),
        **mean_max_min("critic/rewards", rewards[valid].tolist()),
        **mean_max_min("critic/advantages", means[valid].tolist()),
    }


def describe_critic(
    values: Sequence[Sequence[Tensor]], returns: Sequence[Sequence[Tensor]], valid: Tensor
) -> dict[str, Metric]:
    """Return metrics of a critic's values before the update, and of their targets.

    Args: values, returns: [S] float for each completion of each group; valid: see describe_learned.
    """
    scored = valid.flatten().tolist()
    if not any(scored):
        return {}
    before, targets = (
        torch.cat(list(itertools.compress((tokens for group in each for tokens in group), scored)))
        for each in (values, returns)
    )
    return {
        **mean_max_min("critic/values", before.tolist()),
        **mean_max_min("critic/returns", targets.tolist()),
        "critic/vf_explained_var": Mean(explained_variance(before, targets)),
    }


def has_gradient(group: TrainGroup, *, regularized: bool) -> bool:
    """Return whether any trainable token of the group can have a gradient.

    regularized: see Config.learns_without_advantage. If False, only tokens whose advantage is not
    zero have a gradient.
    """
    return regularized or any(bool(((part.loss_mask > 0) & (part.advantages != 0)).any()) for part in group.sequences)
