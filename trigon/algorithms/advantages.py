"""Advantage estimators: from the rewards of completions to the advantage of each token.

Most estimators compute one advantage per completion, which each of its tokens gets.
reinforce_plus_plus and remax compute returns per token, so that with a discount, or a KL penalty in
the reward, a token is credited with the rewards that follow it.

A group of equal rewards gets exactly zero from every estimator that compares within groups.
Equality is tested on the rewards: in float32 the mean and standard deviation of equal numbers are
rounded, and their quotient can reach 0.3. docs/algorithms.md has a section for each estimator.

With a critic, generalized advantage estimation computes advantages and returns. Its steps are the
sampled tokens of a completion. Tokens that an episode observed in between are no steps: the state
after the last token of a turn is the one before the first token of the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from trigon.config.names import SINGLE_COMPLETION_ESTIMATORS, AdvantageEstimator
from trigon.config.schema import AlgorithmConfig

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8
FLOAT32_ROUNDING = 2.0**-22
"""Four times the relative rounding error of a float32: of a reward and the mean of its group."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardBatch:
    """The rewards of a step's completions: G groups of N.

    rewards: [G, N] float32, earned by the last token of each completion.
    valid: [G, N] bool, False for completions that were not scored. They are excluded from all
    statistics, and their advantage is zero.
    lengths: [G, N] int64, the number S of sampled tokens of each completion, at least one.
    penalties: [S] float32 for each completion of each group, subtracted from the reward of each
    token: the KL times its coefficient. None: no penalty.
    parts: the parts of the rewards by name, [G, N] each; used by gdpo only.
    baselines: [G] float32, the reward of each prompt's greedy completion, nan where it was not
    scored; used by remax only.
    """

    rewards: Tensor
    valid: Tensor
    lengths: Tensor
    penalties: Sequence[Sequence[Tensor]] | None
    parts: Mapping[str, Tensor]
    baselines: Tensor | None

    def totals(self) -> Tensor:
        """Return the rewards less the sum of each completion's penalties: [G, N] float32."""
        if self.penalties is None:
            return self.rewards
        return self.rewards - torch.stack([torch.stack([part.sum() for part in group]) for group in self.penalties])


def estimate_advantages(
    batch: RewardBatch,
    estimator: AdvantageEstimator,
    *,
    gamma: float = 1.0,
    weights: Mapping[str, float] | None = None,
) -> list[list[Tensor]]:
    """Return the advantage of each token: [S] float32 for each completion of each group.

    gamma: discount per token between a reward and the token credited with it; used by
    reinforce_plus_plus only.
    weights: weight of each of batch.parts, for gdpo; None: 1 each.
    Raises: ValueError if the estimator compares within groups and N < 2.
    """
    if estimator not in SINGLE_COMPLETION_ESTIMATORS and batch.rewards.shape[1] < 2:
        raise ValueError(f"a group needs at least 2 completions to compare, got {batch.rewards.shape[1]}")
    rewards, valid = batch.totals(), batch.valid
    match estimator:
        case "grpo":
            values = group_relative(rewards, valid)
        case "dr_grpo":
            values = group_centered(rewards, valid)
        case "grpo_batch":
            values = batch_relative(rewards, valid)
        case "grpo_passk":
            values = best_of_group(rewards, valid)
        case "rloo":
            values = leave_one_out(rewards, valid)
        case "opo":
            values = length_weighted_baseline(rewards, valid, batch.lengths)
        case "reinforce_plus_plus_baseline":
            values = divide_by_batch_std(group_centered(rewards, valid), valid)
        case "gdpo":
            assert batch.penalties is None, "gdpo normalizes the parts of a reward, and a penalty is not one of them"
            values = decoupled_parts(batch.parts, valid, weights)
        case "reinforce_plus_plus":
            return whiten(token_returns(batch, gamma), valid)
        case "remax":
            # Not discounted, since the reward of the greedy completion is not.
            return subtract_baselines(token_returns(batch, 1.0), valid, batch.baselines)
        case _:
            assert_never(estimator)
    # Views of one tensor: creating them one by one would take most of the controller's time.
    lengths = batch.lengths.flatten()
    per_completion = iter(values.flatten().repeat_interleave(lengths).split_with_sizes(lengths.tolist()))
    return [list(itertools.islice(per_completion, len(group))) for group in values]


# -- one advantage per completion: [G, N] in, [G, N] float32 out -----------------------------------


def group_centered(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return each reward less the mean of its group. Dr. GRPO, section 3.2 (arXiv:2503.20783).

    Args: rewards: [G, N] float; valid: [G, N] bool.
    Returns: [G, N] float32; rows sum to zero up to rounding.
    """
    return _centered(rewards.float(), valid)


def group_relative(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return each reward less the mean of its group, divided by the group's standard deviation.

    The standard deviation is the unbiased one (n - 1). GRPO: DeepSeekMath, section 4.1.2
    (arXiv:2402.03300). Args and Returns: as group_centered.
    """
    return group_centered(rewards, valid) / (_group_std(rewards, valid) + STD_EPSILON)


def batch_relative(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return each reward less the mean of its group, divided by the batch's standard deviation.

    Lite PPO (arXiv:2508.08221). Args and Returns: as group_centered.
    """
    scored = rewards.float()[valid]
    std = scored.std() if len(scored) > 1 else torch.zeros(())
    return group_centered(rewards, valid) / (std + STD_EPSILON)


def best_of_group(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return (best - second best) / standard deviation for the best of a group, 0 for all others.

    Zero for all if the best two are equal. Pass@k training (arXiv:2503.19595).
    Args and Returns: as group_centered.
    """
    scored = torch.where(valid, rewards.float(), -torch.inf)
    (best, second), best_index = scored.topk(2, dim=1).values.T, scored.argmax(dim=1)
    lead = torch.where(torch.isfinite(second), best - second, 0.0)
    scaled = lead / (_group_std(rewards, valid)[:, 0] + STD_EPSILON)
    return torch.zeros_like(scored).scatter(1, best_index[:, None], scaled[:, None])


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return each reward less the mean of the other rewards of its group.

    This is n / (n - 1) times the centered reward. RLOO (arXiv:2402.14740). Args and Returns: as
    group_centered.
    """
    count = _count(valid)
    return group_centered(rewards, valid) * count / (count - 1).clamp(min=1)


def length_weighted_baseline(rewards: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """Return each reward less the length-weighted mean of its group, the minimum-variance baseline.

    OPO (arXiv:2505.23585).
    Args: as group_centered; lengths: [G, N] int64. Returns: [G, N] float32.
    """
    rewards, weights = rewards.float(), (lengths * valid).float()
    baseline = (rewards * weights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(_has_unequal(rewards, valid) & valid, rewards - baseline, 0.0)


def divide_by_batch_std(values: Tensor, valid: Tensor) -> Tensor:
    """Return values of mean zero divided by their standard deviation over the batch.

    The mean is not subtracted, so that an exact zero stays zero.
    Args: values: [G, N] float32; valid: [G, N] bool. Returns: [G, N] float32.
    """
    scored = values[valid]
    std = (scored.square().sum() / max(len(scored) - 1, 1)).sqrt()
    return values / (std + STD_EPSILON)


def decoupled_parts(parts: Mapping[str, Tensor], valid: Tensor, weights: Mapping[str, float] | None) -> Tensor:
    """Return the weighted sum of the parts, normalized per group and then over the batch.

    Each part is normalized in its group before the sum: otherwise different parts with equal sums
    would get equal advantages. Parts that cancel give exactly zero. GDPO (arXiv:2601.05242).
    Args: parts: {name: [G, N] float}; weights: by name, None: 1 each. Returns: [G, N] float32.
    """
    weight_of_part = dict.fromkeys(parts, 1.0) if weights is None else weights
    total, unscaled, error = (torch.zeros(valid.shape, dtype=torch.float64) for _ in range(3))
    for name, weight in weight_of_part.items():
        rewards = parts[name].double()
        centered = _centered(rewards, valid)
        std = _std_of_centered(centered, valid)
        total = total + weight * centered / (std + STD_EPSILON)
        # Without STD_EPSILON, which scales parts of different spread differently: parts that cancel
        # then do, but for the rounding of the rewards to float32.
        exact = torch.where(std > 0, centered / std, 0.0)
        largest = torch.where(valid, rewards.abs(), 0.0).amax(dim=1, keepdim=True)
        unscaled = unscaled + weight * exact
        error = error + abs(weight) * torch.where(std > 0, FLOAT32_ROUNDING * (largest / std + exact.abs()), 0.0)
    # The batch's standard deviation would scale up what is left of parts that cancel.
    cancel = (unscaled.abs() <= error).all(dim=1, keepdim=True)
    return divide_by_batch_std(torch.where(cancel, 0.0, total).float(), valid)


# -- one advantage per token -----------------------------------------------------------------------


def token_returns(batch: RewardBatch, gamma: float) -> list[list[Tensor]]:
    """Return the discounted sum of rewards from each token on: [S] float32 for each completion.

    The last token earns the completion's reward, and each token its own penalty.
    """
    penalties = batch.penalties
    return [
        [
            _discounted_returns(int(batch.lengths[g, i]), reward, None if penalties is None else penalties[g][i], gamma)
            for i, reward in enumerate(rewards.tolist())
        ]
        for g, rewards in enumerate(batch.rewards)
    ]


def whiten(returns: Sequence[Sequence[Tensor]], valid: Tensor) -> list[list[Tensor]]:
    """Return the returns of all tokens of valid completions, scaled to mean 0 and variance 1.

    If all of them are equal, they become zero. REINFORCE++ (arXiv:2501.03262), with the unbiased
    variance.
    """
    scored = [
        values
        for group, is_valid in zip(returns, valid.tolist(), strict=True)
        for values in itertools.compress(group, is_valid)
    ]
    tokens = torch.cat(scored) if scored else torch.zeros(1)
    if tokens.max() == tokens.min():
        return _map_valid(returns, valid, torch.zeros_like)
    mean, scale = tokens.mean(), (tokens.var() + VARIANCE_EPSILON).rsqrt()
    return _map_valid(returns, valid, lambda values: (values - mean) * scale)


def subtract_baselines(
    returns: Sequence[Sequence[Tensor]], valid: Tensor, baselines: Tensor | None
) -> list[list[Tensor]]:
    """Return each return less the reward of the prompt's greedy completion.

    Zero if that was not scored. ReMax, algorithm 1 (arXiv:2310.10505).
    """
    assert baselines is not None, "remax needs the reward of a greedy completion"
    comparable = (valid & torch.isfinite(baselines)[:, None]).tolist()
    return [
        [values - baseline if ok else torch.zeros_like(values) for values, ok in zip(group, oks, strict=True)]
        for group, oks, baseline in zip(returns, comparable, baselines.tolist(), strict=True)
    ]


def _discounted_returns(length: int, reward: float, penalties: Tensor | None, gamma: float) -> Tensor:
    rewards = torch.zeros(length) if penalties is None else -penalties.float()
    rewards[-1] += reward
    if gamma == 1.0:
        return rewards.flip(0).cumsum(0).flip(0)
    value = 0.0
    returns = []
    for reward_of_token in reversed(rewards.tolist()):
        value = reward_of_token + gamma * value
        returns.append(value)
    return torch.tensor(returns[::-1])


def _map_valid(
    returns: Sequence[Sequence[Tensor]], valid: Tensor, function: Callable[[Tensor], Tensor]
) -> list[list[Tensor]]:
    """Return function(values) for each valid completion, and zeros for the others."""
    return [
        [function(values) if ok else torch.zeros_like(values) for values, ok in zip(group, is_valid, strict=True)]
        for group, is_valid in zip(returns, valid.tolist(), strict=True)
    ]


def _count(valid: Tensor) -> Tensor:
    return valid.sum(dim=1, keepdim=True)


def _has_unequal(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return whether the valid rewards of each group are not all equal: [G, 1] bool."""
    highest = torch.where(valid, rewards, -torch.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(valid, rewards, torch.inf).amin(dim=1, keepdim=True)
    return highest > lowest


def _group_std(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each group's valid rewards: [G, 1] float32."""
    return _std_of_centered(group_centered(rewards, valid), valid)


def _centered(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return each reward less the mean of its group, exactly 0 where all are equal: [G, N]."""
    mean = (rewards * valid).sum(dim=1, keepdim=True) / _count(valid).clamp(min=1)
    return torch.where(_has_unequal(rewards, valid) & valid, rewards - mean, 0.0)


def _std_of_centered(centered: Tensor, valid: Tensor) -> Tensor:
    return (centered.square().sum(dim=1, keepdim=True) / (_count(valid) - 1).clamp(min=1)).sqrt()


Tokens = list[list[Tensor]]
"""One tensor for each completion of each group."""


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """What a step learns. For each completion of each group, float32 [S].

    advantages: whitened over the tokens of all scored completions of the step. returns: the targets
    of the critic. values: the value of the state before each token.
    """

    advantages: Tokens
    returns: Tokens
    values: Tokens


def estimate_with_values(
    batch: RewardBatch, values: Sequence[Sequence[Tensor]], algorithm: AlgorithmConfig, *, cut: Tensor
) -> Estimates:
    """Return the generalized advantage estimates of a step's completions (arXiv:1506.02438).

    The last token of a completion earns its reward, and each token its own penalty. Completions
    that were not scored have advantages of zero, and returns that equal their values.

    lam_critic is the decoupled estimate of VC-PPO (arXiv:2503.01491, section 4.2), lam_alpha the
    length-adaptive one of VAPO (arXiv:2504.05118, section 4.2).

    Args:
        values: float32 [S + 1] for each completion of each group: of the state before each sampled
            token, and of the state after the last one.
        algorithm: its gamma, lam, lam_critic, lam_alpha and bootstrap_cut.
        cut: [G, N] bool, whether a completion was cut at its limit.
    """
    sizes = [len(group) for group in values]
    flat = list(itertools.chain.from_iterable(values))
    lengths = batch.lengths.flatten()
    end = cut.flatten() if algorithm.bootstrap_cut else torch.zeros_like(cut.flatten())
    # Padded at the end, so that all completions are computed together, from the last token back.
    before = torch.nn.utils.rnn.pad_sequence([each[:-1].double() for each in flat], batch_first=True)
    after = torch.stack([each[-1].double() for each in flat]) * end
    rewards = _token_rewards(batch, before.shape)
    lam = torch.full((len(flat),), algorithm.lam, dtype=torch.float64)
    if algorithm.lam_alpha is not None:
        lam = (1.0 - 1.0 / (algorithm.lam_alpha * lengths.double())).clamp(min=0.0)
    advantages = _accumulate(rewards, before, after, lengths, algorithm.gamma, lam)
    learned = advantages
    if algorithm.lam_critic is not None:
        critic_lam = torch.full_like(lam, algorithm.lam_critic)
        learned = _accumulate(rewards, before, after, lengths, algorithm.gamma, critic_lam)
    returns = torch.where(batch.valid.flatten()[:, None], before + learned, before)
    return Estimates(
        advantages=whiten(_by_group(advantages, lengths, sizes), batch.valid),
        returns=_by_group(returns, lengths, sizes),
        values=[[each[:-1] for each in group] for group in values],
    )


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - variance of (returns - values) / variance of the returns, over all tokens.

    1: the critic knows the returns. 0: it knows their mean at best. Below 0: it is worse than that.
    0 where the returns do not vary.
    """
    if len(returns) < 2 or returns.max() == returns.min():
        return 0.0
    values, returns = values.double(), returns.double()
    return float(1.0 - (returns - values).var() / returns.var())


def _token_rewards(batch: RewardBatch, shape: torch.Size) -> Tensor:
    """Return the reward of each token, [completions, longest] float64, zero where there is none."""
    rewards = torch.zeros(shape, dtype=torch.float64)
    if batch.penalties is not None:
        penalties = [each.double() for each in itertools.chain.from_iterable(batch.penalties)]
        rewards -= torch.nn.utils.rnn.pad_sequence(penalties, batch_first=True)
    last = batch.lengths.flatten() - 1
    rewards[torch.arange(len(last)), last] += batch.rewards.double().flatten()
    return rewards


def _accumulate(rewards: Tensor, before: Tensor, after: Tensor, lengths: Tensor, gamma: float, lam: Tensor) -> Tensor:
    """Return the advantages, [C, T] float64, zero beyond the length of each completion.

        delta_t = r_t + gamma * V(t + 1) - V(t)
        A_t     = delta_t + gamma * lam * A_(t + 1)

    Args: rewards, before: [C, T]; after: [C], values after the last tokens; lam: [C].
    """
    advantages = torch.zeros_like(before)
    next_value, accumulated = after, torch.zeros_like(after)
    for position in range(before.shape[1] - 1, -1, -1):
        inside = position < lengths
        delta = rewards[:, position] + gamma * next_value - before[:, position]
        accumulated = torch.where(inside, delta + gamma * lam * accumulated, accumulated)
        next_value = torch.where(inside, before[:, position], next_value)
        advantages[:, position] = torch.where(inside, accumulated, 0.0)
    return advantages


def _by_group(padded: Tensor, lengths: Tensor, sizes: Sequence[int]) -> Tokens:
    """Return the rows of a padded tensor without padding, in float32, by group."""
    rows = iter(row[:length].float() for row, length in zip(padded, lengths.tolist(), strict=True))
    return [list(itertools.islice(rows, size)) for size in sizes]
