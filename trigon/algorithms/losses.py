"""The policy's loss, token by token. Nothing here divides by a count; reduce.py does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp: float32 overflows near 88, and a ratio of e^20 is a lost cause anyway."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What one token contributes, and what became of it. All [S] float32.

    loss carries gradient. ratio: pi / pi_old. clipped: 1 where the clipped branch was the larger loss, so that the
    token's gradient is zero. dual_clipped: 1 where the dual bound was.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> PolicyLoss:
    """Return the clipped surrogate loss of each token.

        ratio < 1 - clip_low or ratio > 1 + clip_high gains nothing more; where A < 0 the loss is at most -A *
        clip_dual.

    PPO (arXiv:1707.06347, equation 7); separate bounds: DAPO (arXiv:2503.14476, section 3.1); dual bound:
    arXiv:1912.09729, equation 5.

    Args: logprobs [S] with gradient; old_logprobs, advantages [S]. Returns: PolicyLoss.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped_ratio = log_ratio.clamp(math.log1p(-clip_low), math.log1p(clip_high)).exp()
    plain, clipped = -advantages * ratio, -advantages * clipped_ratio
    loss = torch.maximum(plain, clipped)
    bound = -advantages * clip_dual
    dual = (advantages < 0) & (loss > bound)
    return PolicyLoss(
        loss=torch.where(dual, bound, loss),
        ratio=ratio.detach(),
        clipped=(clipped > plain).float(),
        dual_clipped=dual.float(),
    )
