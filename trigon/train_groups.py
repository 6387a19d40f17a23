"""From scored groups to the groups that an update learns from.

Computes log-probabilities, KL penalties and advantages. prepare_groups is what the training loop
calls between sampling and the update; the other functions are its parts. Uses the train engine and
the reference through their protocols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trigon.algorithms.advantages import RewardBatch, estimate_advantages
from trigon.algorithms.gae import Estimates, estimate_with_values
from trigon.algorithms.kl import AdaptiveKl, kl_per_token
from trigon.config.names import KlEstimator
from trigon.config.schema import AlgorithmConfig
from trigon.errors import RewardError
from trigon.metrics import Mean, Metrics, merge
from trigon.rollout.statistics import describe_critic, describe_learned
from trigon.training.protocol import CriticEngine, LogprobEngine, TrainEngine, TrunkCriticEngine
from trigon.types import Phase, RolloutGroup, TrainGroup, TrainSequence


@dataclass(frozen=True, slots=True, eq=False)
class PreparedGroups:
    """What an update learns from. kl: the coefficient of a KL in the reward, for the next step."""

    groups: list[TrainGroup]
    kl: AdaptiveKl
    metrics: Metrics


def prepare_groups(
    groups: Sequence[RolloutGroup],
    algorithm: AlgorithmConfig,
    *,
    trainer: TrainEngine,
    reference: LogprobEngine | None,
    needs_old_logprobs: bool,
    kl: AdaptiveKl,
    phase: Phase,
    critic: CriticEngine | None = None,
) -> PreparedGroups:
    """Compute what an update needs of a step's groups: log-probabilities, KL and advantages.

    Args:
        reference: None where no term needs its log-probabilities.
        needs_old_logprobs: whether the policy's own log-probabilities are computed before the first
        update: the policy
            changes between sampling and the last update of a step, or the KL in the reward needs
            them.
        phase: times "old", "ref" and "values".
        critic: for the estimator gae; else None. On the policy's trunk it computes values and
            log-probabilities in one pass.
    """
    old = ref = penalties = values = None
    metrics: Metrics = {}
    if needs_old_logprobs:
        with phase("old"):
            if isinstance(critic, TrunkCriticEngine):
                old, values = critic.logprobs_and_values(groups)
            else:
                old = trainer.logprobs(groups)
    if reference is not None:
        with phase("ref"):
            ref = reference.logprobs(groups)
    if algorithm.kl_in_reward is not None:
        with phase("ref"):
            token_kl = kl_of_tokens(groups, algorithm.kl_in_reward, trainer, old=old, ref=ref)
        penalties = [[kl.coefficient * tokens for tokens in group] for group in token_kl]
        mean_kl = mean_over_completions(token_kl)
        metrics = {"actor/kl_penalty": mean_kl, "actor/kl_coef": Mean(kl.coefficient)}
        kl = kl.updated(mean_kl.value, sum(map(len, token_kl)))
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
    return PreparedGroups(
        build_train_groups(groups, advantages, trains, old=old, ref=ref, estimates=estimates),
        kl,
        merge(metrics, describe_learned(groups, rewards.totals(), advantages, rewards.valid)),
    )


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
    """Return the KL of each sampled token, [S] of each completion. The full KL is the trainer's."""
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


def mean_over_completions(token_kl: Sequence[Sequence[Tensor]]) -> Mean:
    """Return the mean over completions of the mean over each one's tokens, as EasyR1 does."""
    means = torch.stack([tokens.mean() for group in token_kl for tokens in group])
    return Mean(float(means.sum()), float(means.numel()))


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
                )
                for i, rollout in enumerate(group.rollouts)
            ),
        )
        for g, group in enumerate(groups)
    ]
