"""Generalized advantage estimation: from rewards and a critic's values to advantages and returns.

The steps are the sampled tokens of a completion. Tokens that an episode observed in between are no
steps: the state after the last token of a turn is the one before the first token of the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trigon.algorithms.advantages import RewardBatch, whiten
from trigon.config.schema import AlgorithmConfig

Tokens = list[list[Tensor]]
"""One tensor for each completion of each group."""


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """What a step learns. For each completion of each group, float32 [S].

    advantages: whitened over the tokens of all scored completions of the step. returns: the targets
    of the critic. values: of the state before each token.
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
    critic_lam = lam if algorithm.lam_critic is None else torch.full_like(lam, algorithm.lam_critic)
    returns = before + (
        advantages
        if algorithm.lam_critic is None
        else _accumulate(rewards, before, after, lengths, algorithm.gamma, critic_lam)
    )
    returns = torch.where(batch.valid.flatten()[:, None], returns, before)
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
