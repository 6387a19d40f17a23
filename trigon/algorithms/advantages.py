"""From what completions were worth to the advantage of each of their tokens.

Every estimator sees the same Outcomes. Most give one number to a whole completion, which each of its tokens gets; two
(reinforce_plus_plus, remax) add up rewards from the end, so that with a KL penalty in the reward or a discount a token
is credited with what follows it.

A group of equal rewards teaches nothing and gets exactly zero from every estimator that compares within groups. Its
float32 mean and standard deviation are themselves rounded, and their quotient can reach 0.2 where 0 is meant, so
equality is tested, not computed. docs/algorithms.md has a section for each estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, assert_never

import torch
from torch import Tensor

AdvantageEstimator = Literal[
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus",
    "remax",
    "dr_grpo",
    "grpo_batch",
    "reinforce_plus_plus_baseline",
    "opo",
    "gdpo",
]

WITHOUT_A_GROUP: frozenset[AdvantageEstimator] = frozenset({"reinforce_plus_plus", "remax"})
"""Estimators that do not compare the completions of a prompt with each other, and so work with one of them."""

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class RewardBatch:
    """What a step's completions were worth: G groups of N.

    rewards: [G, N] float32, one for each completion, at its end.
    valid: [G, N] bool; completions that could not be graded are False. They enter no statistic and get zero.
    lengths: [G, N] int64, tokens of each completion, at least one.
    penalties: [R] float32 for each completion of each group: what is taken from each token's reward (a KL penalty with
    its coefficient), or None.
    parts: the numbers of which the rewards are made, by name, [G, N] each; read by gdpo only.
    baselines: [G] float32, the reward of each prompt's greedy completion, nan where that was not graded; read by remax
    only.
    """

    rewards: Tensor
    valid: Tensor
    lengths: Tensor
    penalties: Sequence[Sequence[Tensor]] | None
    parts: Mapping[str, Tensor]
    baselines: Tensor | None

    def totals(self) -> Tensor:
        """Return the rewards [G, N] less all of each completion's penalties."""
        if self.penalties is None:
            return self.rewards
        return self.rewards - torch.stack([torch.stack([part.sum() for part in group]) for group in self.penalties])


def estimate(
    outcomes: RewardBatch,
    estimator: AdvantageEstimator,
    *,
    gamma: float = 1.0,
    weights: Mapping[str, float] | None = None,
) -> list[list[Tensor]]:
    """Return the advantage of every token, for each completion of each group: float32 [R].

    gamma: discount for each token between a reward and the token that is credited with it; reinforce_plus_plus only.
    weights: of outcomes.parts, for gdpo; None: 1 each.
    Raises: ValueError if the estimator compares within groups and N < 2.
    """
    if estimator not in WITHOUT_A_GROUP and outcomes.rewards.shape[1] < 2:
        raise ValueError(f"a group needs at least 2 completions to compare, got {outcomes.rewards.shape[1]}")
    rewards, valid = outcomes.totals(), outcomes.valid
    match estimator:
        case "grpo":
            values = group_relative(rewards, valid)
        case "dr_grpo":
            values = group_centred(rewards, valid)
        case "grpo_batch":
            values = batch_scaled(rewards, valid)
        case "grpo_passk":
            values = best_over_second(rewards, valid)
        case "rloo":
            values = leave_one_out(rewards, valid)
        case "opo":
            values = length_weighted(rewards, valid, outcomes.lengths)
        case "reinforce_plus_plus_baseline":
            values = root_mean_square_scaled(group_centred(rewards, valid), valid)
        case "gdpo":
            assert outcomes.penalties is None, "gdpo normalizes the parts of a reward, of which a penalty is none"
            values = parts_normalized(outcomes.parts, valid, weights)
        case "reinforce_plus_plus":
            return whitened(token_returns(outcomes, gamma), valid)
        case "remax":
            # Not discounted, since the greedy completion's reward is not.
            return above_baseline(token_returns(outcomes, 1.0), valid, outcomes.baselines)
        case _:
            assert_never(estimator)
    # Views of one tensor: made one by one they would be most of what the controller costs.
    lengths = outcomes.lengths.flatten()
    each = iter(values.flatten().repeat_interleave(lengths).split_with_sizes(lengths.tolist()))
    return [list(islice(each, len(group))) for group in values]


# -- one advantage for a whole completion: [G, N] in, [G, N] float32 out ----------------------------------------------


def group_centred(rewards: Tensor, valid: Tensor) -> Tensor:
    """Centre each reward on its group. Dr. GRPO, section 3.2 (arXiv:2503.20783).

    Args: rewards [G, N] float; valid [G, N] bool. Returns: [G, N] float32; rows sum to zero up to rounding.
    """
    rewards = rewards.float()
    mean = (rewards * valid).sum(dim=1, keepdim=True) / _count(valid).clamp(min=1)
    return torch.where(_differ(rewards, valid) & valid, rewards - mean, 0.0)


def group_relative(rewards: Tensor, valid: Tensor) -> Tensor:
    """Centre each reward on its group and divide by the group's standard deviation (unbiased, n - 1).

    GRPO: DeepSeekMath, section 4.1.2 (arXiv:2402.03300). Args and Returns: as group_centred.
    """
    return group_centred(rewards, valid) / (_group_std(rewards, valid) + STD_EPSILON)


def batch_scaled(rewards: Tensor, valid: Tensor) -> Tensor:
    """Centre each reward on its group and divide by the standard deviation of all rewards of the batch.

    Lite PPO (arXiv:2508.08221). Args and Returns: as group_centred.
    """
    chosen = rewards.float()[valid]
    std = chosen.std() if len(chosen) > 1 else torch.zeros(())
    return group_centred(rewards, valid) / (std + STD_EPSILON)


def best_over_second(rewards: Tensor, valid: Tensor) -> Tensor:
    """Give the best completion of a group its lead over the second best, in the group's standard deviations.

    All others, and the best two where they are equal, get zero: what a group gains in its maximum (arXiv:2503.19595).
    Args and Returns: as group_centred.
    """
    known = torch.where(valid, rewards.float(), -torch.inf)
    (best, second), place = known.topk(2, dim=1).values.T, known.argmax(dim=1)
    lead = torch.where(torch.isfinite(second), best - second, 0.0)
    scaled = lead / (_group_std(rewards, valid)[:, 0] + STD_EPSILON)
    return torch.zeros_like(known).scatter(1, place[:, None], scaled[:, None])


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """Compare each reward with the mean of the others of its group: n / (n - 1) times the centred reward.

    RLOO (arXiv:2402.14740). Args and Returns: as group_centred.
    """
    count = _count(valid)
    return group_centred(rewards, valid) * count / (count - 1).clamp(min=1)


def length_weighted(rewards: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """Compare each reward with the mean of its group weighted by length, the baseline of least variance.

    OPO (arXiv:2505.23585). Args: as group_centred; lengths [G, N] int64. Returns: [G, N] float32.
    """
    rewards, shares = rewards.float(), (lengths * valid).float()
    baseline = (rewards * shares).sum(dim=1, keepdim=True) / shares.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(_differ(rewards, valid) & valid, rewards - baseline, 0.0)


def root_mean_square_scaled(values: Tensor, valid: Tensor) -> Tensor:
    """Divide values by their standard deviation over the batch, taking as given that their mean is zero.

    Nothing is subtracted, so that what is exactly zero stays so. Args and Returns: [G, N].
    """
    chosen = values[valid]
    std = (chosen.square().sum() / max(len(chosen) - 1, 1)).sqrt()
    return values / (std + STD_EPSILON)


def parts_normalized(parts: Mapping[str, Tensor], valid: Tensor, weights: Mapping[str, float] | None) -> Tensor:
    """Normalize each part of the reward within its group, add them up by weight, and scale by the whole batch.

    Added up first, parts of different combinations but equal sums would get equal advantages. GDPO
    (arXiv:2601.05242). Args: parts {name: [G, N]}; weights by name, None: 1 each. Returns: [G, N] float32.
    """
    chosen = dict.fromkeys(parts, 1.0) if weights is None else weights
    total = torch.zeros(valid.shape)
    for name, weight in chosen.items():
        total = total + weight * group_relative(parts[name], valid)
    return root_mean_square_scaled(total, valid)


# -- one advantage for each token ---------------------------------------------------------------------------------


def token_returns(outcomes: RewardBatch, gamma: float) -> list[list[Tensor]]:
    """Return for each token the discounted sum of what is still to come: float32 [R] for each completion.

    A completion's reward comes with its last token; penalties come with the token that earns them.
    """
    penalties = outcomes.penalties
    return [
        [
            _discounted(int(outcomes.lengths[g, i]), reward, None if penalties is None else penalties[g][i], gamma)
            for i, reward in enumerate(rewards.tolist())
        ]
        for g, rewards in enumerate(outcomes.rewards)
    ]


def whitened(returns: Sequence[Sequence[Tensor]], valid: Tensor) -> list[list[Tensor]]:
    """Give the tokens of all valid completions of the batch together mean 0 and variance 1; zeros where all are equal.

    REINFORCE++ (arXiv:2501.03262), with the unbiased variance.
    """
    chosen = [values for row, kept in zip(returns, valid.tolist(), strict=True) for values in _only(row, kept)]
    tokens = torch.cat(chosen) if chosen else torch.zeros(1)
    if tokens.max() == tokens.min():
        return _each(returns, valid, torch.zeros_like)
    mean, scale = tokens.mean(), (tokens.var() + VARIANCE_EPSILON).rsqrt()
    return _each(returns, valid, lambda values: (values - mean) * scale)


def above_baseline(returns: Sequence[Sequence[Tensor]], valid: Tensor, baselines: Tensor | None) -> list[list[Tensor]]:
    """Subtract from each return the reward of the prompt's greedy completion; zero where that could not be graded.

    ReMax, algorithm 1 (arXiv:2310.10505).
    """
    assert baselines is not None, "remax compares with a greedy completion"
    known = valid & torch.isfinite(baselines)[:, None]
    return [
        row
        for number, baseline in enumerate(baselines.tolist())
        for row in _each(
            returns[number : number + 1],
            known[number : number + 1],
            lambda values, baseline=baseline: values - baseline,  # type: ignore[misc]
        )
    ]


def _discounted(length: int, reward: float, penalties: Tensor | None, gamma: float) -> Tensor:
    rewards = torch.zeros(length) if penalties is None else -penalties.float()
    rewards[-1] += reward
    if gamma == 1.0:
        return rewards.flip(0).cumsum(0).flip(0)
    following = 0.0
    returns = []
    for earned in reversed(rewards.tolist()):
        following = earned + gamma * following
        returns.append(following)
    return torch.tensor(returns[::-1])


def _only(row: Sequence[Tensor], kept: Sequence[bool]) -> list[Tensor]:
    return [values for values, keep in zip(row, kept, strict=True) if keep]


def _each(returns: Sequence[Sequence[Tensor]], valid: Tensor, change: Callable[[Tensor], Tensor]) -> list[list[Tensor]]:
    """Change the values of valid completions, and give the others zeros."""
    return [
        [change(values) if keep else torch.zeros_like(values) for values, keep in zip(row, kept, strict=True)]
        for row, kept in zip(returns, valid.tolist(), strict=True)
    ]


def _count(valid: Tensor) -> Tensor:
    return valid.sum(dim=1, keepdim=True)


def _differ(rewards: Tensor, valid: Tensor) -> Tensor:
    """Tell of each group whether not all of its valid rewards are equal: [G, 1] bool."""
    highest = torch.where(valid, rewards, -torch.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(valid, rewards, torch.inf).amin(dim=1, keepdim=True)
    return highest > lowest


def _group_std(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each group's valid rewards: [G, 1] float32."""
    centred = group_centred(rewards, valid)
    return (centred.square().sum(dim=1, keepdim=True) / (_count(valid) - 1).clamp(min=1)).sqrt()
