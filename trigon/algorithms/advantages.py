"""From the rewards of a group to the advantage of each of its completions."""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def group_relative(rewards: Tensor, valid: Tensor, *, normalize_std: bool = True) -> Tensor:
    """Centre each reward on its group, and divide by the group's standard deviation unless normalize_std is False.

    DeepSeekMath, section 4.1.2 (arXiv:2402.03300), with the unbiased standard deviation (n - 1).

    A group of equal rewards gets exactly zero: its float32 mean and standard deviation are themselves rounded, and
    their quotient can reach 0.2 where 0 is meant, so equality is tested, not computed.

    Args:
        rewards: [G, N] float.
        valid: [G, N] bool; completions that could not be graded are False. They enter no statistic and get zero.

    Returns: [G, N] float32; each row sums to zero up to rounding. Raises: ValueError if N < 2.
    """
    if rewards.shape[1] < 2:
        raise ValueError(f"a group needs at least 2 completions to compare, got {rewards.shape[1]}")
    rewards = rewards.float()
    count = valid.sum(dim=1, keepdim=True)
    mean = (rewards * valid).sum(dim=1, keepdim=True) / count.clamp(min=1)
    centred = (rewards - mean) * valid
    if normalize_std:
        variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)
    infinity = torch.tensor(torch.inf, dtype=rewards.dtype, device=rewards.device)
    highest = torch.where(valid, rewards, -infinity).amax(dim=1, keepdim=True)
    lowest = torch.where(valid, rewards, infinity).amin(dim=1, keepdim=True)
    return torch.where(highest > lowest, centred, torch.zeros_like(centred))
