"""The policy loss of each token. reduce.py averages them.

docs/algorithms.md has a section for each loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from trigon.algorithms.reduce import sequence_means
from trigon.config.schema import ActorConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-MAX_LOG_RATIO before exp. float32 overflows near 88."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of each token, and where it was clipped. All [S] float32.

    loss: with gradient. ratio: pi / pi_old of the token or, for gspo, of its sequence; no gradient.
    clipped: 1 where a bound applied: to the loss, so that the token's gradient is zero (default,
    gspo, gspo_token), or to the weight (cispo); None for sapo, which has no bound.
    dual_clipped: 1 where the dual bound applied; None for cispo and sapo, which have none.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor | None
    dual_clipped: Tensor | None


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    actor: ActorConfig,
    *,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
) -> PolicyLoss:
    """Return the loss of each token.

    Args: logprobs: [S] float32 with gradient; old_logprobs, advantages, loss_mask: [S] float32;
    sequence_index: [S] int64 in [0, num_sequences). Only gspo and gspo_token use loss_mask,
    sequence_index and num_sequences: the ratio of a sequence is computed from its trainable tokens.
    """
    log_ratio = logprobs - old_logprobs
    match actor.loss_type:
        case "default":
            return _clipped_loss(log_ratio, advantages, actor)
        case "gspo" | "gspo_token":
            sequence_log_ratio = sequence_means(log_ratio, loss_mask, sequence_index, num_sequences)[sequence_index]
            if actor.loss_type == "gspo_token":
                # The value of the sequence's ratio, with the gradient of the token's.
                sequence_log_ratio = sequence_log_ratio.detach() + logprobs - logprobs.detach()
            return _clipped_loss(sequence_log_ratio, advantages, actor)
        case "cispo":
            return _cispo_loss(logprobs, log_ratio, advantages, actor)
        case "sapo":
            return _sapo_loss(log_ratio, advantages, actor)
        case _:
            assert_never(actor.loss_type)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_loss(log_ratio: Tensor, advantages: Tensor, actor: ActorConfig) -> PolicyLoss:
    """Return the clipped surrogate loss; where A < 0 it is at most -A * clip_ratio_dual.

    PPO (arXiv:1707.06347, equation 7); separate bounds: DAPO (arXiv:2503.14476, section
    3.1); dual bound: arXiv:1912.09729, equation 5; ratios of sequences: GSPO (arXiv:2507.18071).
    """
    ratio = _ratio(log_ratio)
    log_low = -math.inf if actor.clip_ratio_low >= 1 else math.log1p(-actor.clip_ratio_low)
    clipped_ratio = _ratio(log_ratio.clamp(log_low, math.log1p(actor.clip_ratio_high)))
    unclipped, clipped = -advantages * ratio, -advantages * clipped_ratio
    loss = torch.maximum(unclipped, clipped)
    bound = -advantages * actor.clip_ratio_dual
    dual = (advantages < 0) & (loss > bound)
    return PolicyLoss(
        loss=torch.where(dual, bound, loss),
        ratio=ratio.detach(),
        clipped=(clipped > unclipped).float(),
        dual_clipped=dual.float(),
    )


def _cispo_loss(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, actor: ActorConfig) -> PolicyLoss:
    """Return the policy gradient loss weighted by a bounded ratio without gradient.

    CISPO: MiniMax-M1 (arXiv:2506.13585).
    """
    ratio = _ratio(log_ratio).detach()
    weight = ratio.clamp(1.0 - actor.clip_ratio_low, actor.max_cispo_weight)
    return PolicyLoss(
        loss=-advantages * weight * logprobs, ratio=ratio, clipped=(weight != ratio).float(), dual_clipped=None
    )


def _sapo_loss(log_ratio: Tensor, advantages: Tensor, actor: ActorConfig) -> PolicyLoss:
    """Return the surrogate loss through a soft gate, whose slope is largest at ratio 1.

    SAPO (arXiv:2511.20347).
    """
    ratio = _ratio(log_ratio)
    tau = torch.where(advantages >= 0, actor.tau_positive, actor.tau_negative)
    gate = 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
    return PolicyLoss(loss=-advantages * gate, ratio=ratio.detach(), clipped=None, dual_clipped=None)


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The loss of each token, with gradient, and where it was clipped. Both [S] float32."""

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> ValueLoss:
    """Return half the squared error of each value, or that of the clipped value if it is larger.

    A value is clipped to old_value +- clip, as by the authors of PPO and in EasyR1.
    Args: values: [S] float32 with gradient; old_values: before the update; returns: the targets.
    """
    clipped = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    errors, clipped_errors = (values - returns).square(), (clipped - returns).square()
    return ValueLoss(loss=0.5 * torch.maximum(errors, clipped_errors), clipped=(clipped_errors > errors).float())
