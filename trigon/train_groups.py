"""From scored groups to what the loss needs of each token.

Knows passports, and what algorithms/advantages.py wants to hear. Refuses to know engines, but for one question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trigon.algorithms.advantages import RewardBatch
from trigon.algorithms.kl import kl_per_token
from trigon.errors import RewardError
from trigon.metrics import Mean
from trigon.names import AdvantageEstimator, KlEstimator
from trigon.training.protocol import TrainEngine
from trigon.types import RolloutGroup, TrainGroup, TrainSequence


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages.

    gamma: as in estimate_advantages. weights: of the parts of the reward, for gdpo; None: 1 for all but overall.
    kl_in_reward: None where the KL is in the loss, or off. mask_overlong: leave answers that were cut out of the loss.
    """

    estimator: AdvantageEstimator
    gamma: float
    weights: Mapping[str, float] | None
    kl_in_reward: KlEstimator | None
    mask_overlong: bool


def build_reward_batch(
    groups: Sequence[RolloutGroup],
    advantage_settings: AdvantageSettings,
    *,
    penalties: Sequence[Sequence[Tensor]] | None,
    baselines: Tensor | None,
) -> RewardBatch:
    """Return what the groups' completions were worth. Raises: RewardError if gdpo misses a part of a reward."""
    rollouts = [group.rollouts for group in groups]
    valid = torch.tensor([[rollout.score.outcome == "ok" for rollout in row] for row in rollouts])
    if baselines is not None:  # an answer that has nothing to be compared with is as good as ungraded
        valid &= baselines.isfinite()[:, None]
    return RewardBatch(
        rewards=torch.tensor([[rollout.score.overall for rollout in row] for row in rollouts]),
        valid=valid,
        lengths=torch.tensor([[len(rollout.completion.token_ids) for rollout in row] for row in rollouts]),
        penalties=penalties,
        parts=reward_parts(groups, advantage_settings.weights) if advantage_settings.estimator == "gdpo" else {},
        baselines=baselines,
    )


def reward_parts(groups: Sequence[RolloutGroup], weights: Mapping[str, float] | None) -> dict[str, Tensor]:
    """Return the named parts of the rewards, or all but overall, [G, N] each, with 0 where there is no reply.

    Raises: RewardError if there is none, or if a reply lacks one.
    """
    scores = [[rollout.score for rollout in group.rollouts] for group in groups]
    replies = [score.parts for row in scores for score in row if score.outcome == "ok"]
    names = sorted({name for parts in replies for name in parts} - {"overall"} if weights is None else weights)
    missing = sorted({name for name in names for parts in replies if name not in parts})
    if missing or (replies and not names):
        lacking = f"some replies lack {', '.join(missing)}" if missing else "there is nothing but overall"
        found = ", ".join(sorted({name for parts in replies for name in parts}))
        raise RewardError(
            f"algorithm.adv_estimator=gdpo normalizes each part of the reward, but {lacking} (found: {found}); return "
            "them from the reward function, or name others in algorithm.reward_weights"
        )
    return {name: torch.tensor([[score.parts.get(name, 0.0) for score in row] for row in scores]) for name in names}


def overlong(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return [G, N] bool: which completions were cut at their limit."""
    return torch.tensor(
        [[rollout.completion.finish_reason == "length" for rollout in group.rollouts] for group in groups]
    )


def kl_of(
    groups: Sequence[RolloutGroup],
    estimator: KlEstimator,
    trainer: TrainEngine,
    *,
    old: Sequence[Sequence[Tensor]] | None,
    ref: Sequence[Sequence[Tensor]] | None,
) -> Sequence[Sequence[Tensor]]:
    """Return the KL of each token of each completion: [R] each. The trainer is asked for the full one only."""
    if estimator == "full":
        return trainer.full_kl(groups)
    assert old is not None, "a KL in the reward needs the policy's own log-probabilities"
    assert ref is not None, "a KL in the reward needs a reference"
    return [
        [kl_per_token(ours, theirs, estimator) for ours, theirs in zip(row, ref_row, strict=True)]
        for row, ref_row in zip(old, ref, strict=True)
    ]


def mean_of_tokens(numbers: Sequence[Sequence[Tensor]]) -> Mean:
    """Return the mean over all tokens of all completions."""
    every = torch.cat([tokens for row in numbers for tokens in row])
    return Mean(float(every.sum()), float(every.numel()))


def build_train_groups(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[Sequence[Tensor]],
    trains: Tensor,
    *,
    old: Sequence[Sequence[Tensor]] | None,
    ref: Sequence[Sequence[Tensor]] | None,
) -> list[TrainGroup]:
    """Give every completion what the loss needs. trains: [G, N] bool; the others are left out of the loss."""
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    lengths = [len(completion.token_ids) for completion in completions]
    sampling_logprobs = torch.tensor([value for completion in completions for value in completion.sampling_logprobs])
    # Views of one tensor each, as in advantages.estimate_advantages.
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
                )
                for i, rollout in enumerate(group.rollouts)
            ),
        )
        for g, group in enumerate(groups)
    ]
