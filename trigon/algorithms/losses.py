"""The policy's loss, token by token. Nothing here divides by a count; reduce.py does.

docs/algorithms.md has a section for each loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from trigon.algorithms.reduce import sequence_means

PolicyLossType = Literal["default", "gspo", "gspo_token", "cispo", "sapo"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp: float32 overflows near 88, and a ratio of e^20 is a lost cause anyway."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Which policy loss, and its bounds.

    clip_low, clip_high: a ratio counts from 1 - clip_low to 1 + clip_high (all but sapo). clip_dual: bound on the ratio
    where the advantage is negative (default, gspo, gspo_token). cap: largest weight of cispo, at least 1.
    tau_positive, tau_negative: steepness of sapo's gate, by the sign of the advantage.
    """

    kind: PolicyLossType
    clip_low: float
    clip_high: float
    clip_dual: float
    cap: float
    tau_positive: float
    tau_negative: float


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What one token contributes, and what became of it. All [S] float32.

    loss carries gradient. ratio: pi / pi_old, of the token or, for gspo, of its sequence. clipped: 1 where a bound
    acted: on the loss, so that the token's gradient is zero (default, gspo, gspo_token), or on the weight (cispo); None
    where there is none (sapo). dual_clipped: 1 where the dual bound did; None where there is none.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor | None
    dual_clipped: Tensor | None


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    *,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
) -> PolicyLoss:
    """Return the loss of each token.

    Args: logprobs [S] with gradient; old_logprobs, advantages, loss_mask [S]; sequence_index [S] int64 in
    [0, num_sequences). Only gspo and gspo_token look at the last three: a sequence's ratio is made of its trainable
    tokens.
    """
    log_ratio = logprobs - old_logprobs
    match settings.kind:
        case "default":
            return _clipped(log_ratio, advantages, settings)
        case "gspo" | "gspo_token":
            of_sequence = sequence_means(log_ratio, loss_mask, sequence_index, num_sequences)[sequence_index]
            if settings.kind == "gspo_token":
                # The value of the sequence's ratio, with the gradient of the token's.
                of_sequence = of_sequence.detach() + logprobs - logprobs.detach()
            return _clipped(of_sequence, advantages, settings)
        case "cispo":
            return _weighted(logprobs, log_ratio, advantages, settings)
        case "sapo":
            return _gated(log_ratio, advantages, settings)
        case _:
            assert_never(settings.kind)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(log_ratio: Tensor, advantages: Tensor, settings: LossSettings) -> PolicyLoss:
    """The clipped surrogate: beyond its bounds a ratio gains nothing more; where A < 0 the loss is at most -A *
    clip_dual.

    PPO (arXiv:1707.06347, equation 7); separate bounds: DAPO (arXiv:2503.14476, section 3.1); dual bound:
    arXiv:1912.09729, equation 5; over the ratios of whole sequences: GSPO (arXiv:2507.18071).
    """
    ratio = _ratio(log_ratio)
    lowest = -math.inf if settings.clip_low >= 1 else math.log1p(-settings.clip_low)
    clipped_ratio = _ratio(log_ratio.clamp(lowest, math.log1p(settings.clip_high)))
    plain, clipped = -advantages * ratio, -advantages * clipped_ratio
    loss = torch.maximum(plain, clipped)
    bound = -advantages * settings.clip_dual
    dual = (advantages < 0) & (loss > bound)
    return PolicyLoss(
        loss=torch.where(dual, bound, loss),
        ratio=ratio.detach(),
        clipped=(clipped > plain).float(),
        dual_clipped=dual.float(),
    )


def _weighted(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, settings: LossSettings) -> PolicyLoss:
    """The policy gradient, weighted by a bounded ratio that carries no gradient: every token keeps its own.

    CISPO: MiniMax-M1 (arXiv:2506.13585).
    """
    ratio = _ratio(log_ratio).detach()
    weight = ratio.clamp(1.0 - settings.clip_low, settings.cap)
    return PolicyLoss(
        loss=-advantages * weight * logprobs, ratio=ratio, clipped=(weight != ratio).float(), dual_clipped=None
    )


def _gated(log_ratio: Tensor, advantages: Tensor, settings: LossSettings) -> PolicyLoss:
    """The surrogate through a soft gate, whose slope is 1 at a ratio of 1 and falls off smoothly on both sides.

    SAPO (arXiv:2511.20347).
    """
    ratio = _ratio(log_ratio)
    tau = torch.where(advantages >= 0, settings.tau_positive, settings.tau_negative)
    gate = 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
    return PolicyLoss(loss=-advantages * gate, ratio=ratio.detach(), clipped=None, dual_clipped=None)
