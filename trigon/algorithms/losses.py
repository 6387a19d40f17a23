"""Losses per token of the policy and of values, KL to the reference, and importance sampling.

reduce.py averages them. docs/algorithms.md has a section for each loss. Importance sampling
corrects the train-inference mismatch between engine and trainer on the sampled tokens. Both have
the same weights, so in exact arithmetic every difference is zero. What remains is rounding, or a
bug: stale weights, a stale cache, other pixels. docs/metrics.md gives the healthy ranges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from trigon.algorithms.reduce import sequence_means, sequence_sums
from trigon.algorithms.unread import Unread
from trigon.config.names import CorrectionKind, SampledKlEstimator
from trigon.config.schema import ActorConfig, AlgorithmConfig
from trigon.metrics import EffectiveShare, Max, Mean

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


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each value, or of the clipped value if that is larger.

    A value is clipped to its old value +- clip, as by the authors of PPO and in EasyR1.
    Args: values: [S] float32 with gradient; old_values: before the update; returns: the targets.
    Returns: the loss of each token, with gradient, and 1 where it was clipped. Both [S] float32.
    """
    clipped = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    errors, clipped_errors = (values - returns).square(), (clipped - returns).square()
    return 0.5 * torch.maximum(errors, clipped_errors), (clipped_errors > errors).float()


MAX_EXPONENT = 20.0
"""Above this, exp is continued by its tangent: it cannot overflow, and its gradient never vanishes.
"""


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: SampledKlEstimator) -> Tensor:
    """Return an estimate of KL(policy || reference) from each sampled token.

    Schulman, "Approximating KL divergence" (2020). kl is k1: unbiased, may be negative, and its
    expected gradient is zero. mse is k2. low_var_kl is k3: unbiased and never negative; GRPO uses
    it (arXiv:2402.03300, equation 4).
    Args: logprobs, ref_logprobs: [S] float32. Returns: [S] float32 with the gradient of logprobs.
    """
    log_ratio = logprobs - ref_logprobs
    match estimator:
        case "kl":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "mse":
            return 0.5 * log_ratio.square()
        case "low_var_kl":
            return _exp_with_tangent(-log_ratio) + log_ratio - 1.0
        case _:
            assert_never(estimator)


def _exp_with_tangent(x: Tensor) -> Tensor:
    """Return exp(x), continued by its tangent above MAX_EXPONENT."""
    tangent = math.exp(MAX_EXPONENT) * (1.0 + x - MAX_EXPONENT)
    return torch.where(x > MAX_EXPONENT, tangent, x.clamp(max=MAX_EXPONENT).exp())


@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """A KL coefficient that follows a target (arXiv:1909.08593, section 2.2).

    target: target of the KL that updated receives, in nats.
    horizon: a number of completions; 0 keeps the coefficient fixed.
    """

    coefficient: float
    target: float
    horizon: float

    def updated(self, kl: float, num_sequences: int) -> AdaptiveKl:
        """Return the controller after a step.

        Args:
            kl: mean over the step's completions of each one's mean over its tokens, in nats.
            num_sequences: completions of the step.
        """
        if self.horizon == 0 or not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return AdaptiveKl(self.coefficient * (1.0 + error * num_sequences / self.horizon), self.target, self.horizon)


def correction_weights(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    kind: CorrectionKind,
    algorithm: AlgorithmConfig,
    *,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token's policy loss, and 1 where a bound applied.

    The importance weight is w = p_trainer / p_engine, of each token, or at level sequence the
    geometric mean over the tokens of a completion, which, unlike their product, does not depend on
    its length. truncate gives min(w, high). mask gives w where low <= w <= high, and 0 elsewhere.
    reject gives each completion 1 or 0; at token level it rejects a completion if the w of any of
    its tokens is outside.

    Truncated importance sampling: Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training" (2025). Two-sided masking: IcePop (2025). Geometric mean per sequence:
    Liu et al., "When speed kills stability" (2025).
    Args: logprobs: [S] float32, the trainer's before the update. algorithm: its mismatch_level,
    mismatch_low and mismatch_high. The rest as in reduce_loss.
    Returns: two [S] float32 tensors without gradient.
    """
    log_weight = logprobs.detach() - sampling_logprobs
    if algorithm.mismatch_level == "sequence":
        log_weight = sequence_means(log_weight, loss_mask, sequence_index, num_sequences)[sequence_index]
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = ((weight < algorithm.mismatch_low) | (weight > algorithm.mismatch_high)).float() * (loss_mask > 0)
    match kind:
        case "truncate":
            return weight.clamp(max=algorithm.mismatch_high), (weight > algorithm.mismatch_high).float()
        case "mask":
            return torch.where(outside > 0, 0.0, weight), outside
        case "reject":
            rejected = (sequence_sums(outside, sequence_index, num_sequences) > 0)[sequence_index].float()
            return 1.0 - rejected, rejected
        case _:
            assert_never(kind)


def mismatch_metrics(sampling_logprobs: Tensor, logprobs: Tensor, trainable: Tensor) -> dict[str, Unread]:
    """Return the metrics of the train-inference mismatch before any update.

    probs_diff: |p - q|. logprobs_diff: |log p - log q|. k3: low-variance estimate of
    KL(engine || trainer). weight: w = p_trainer / p_engine. effective_share: effective sample size
    of these weights as a share of their number.
    Args: sampling_logprobs, logprobs: [S] float32. trainable: int64 indices of the tokens that
    count. Returns: no metric if there are none.
    """
    count = float(len(trainable))
    if count == 0:
        return {}
    engine, trainer = (each.index_select(0, trainable) for each in (sampling_logprobs, logprobs.detach()))
    log_weight = (trainer - engine).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = log_weight.exp()
    probs_diff = (trainer.exp() - engine.exp()).abs()
    logprobs_diff = log_weight.abs()
    total, squares = weight.sum(), weight.square().sum()
    return {
        "mismatch/probs_diff_mean": Unread(Mean, (probs_diff.sum(), count)),
        "mismatch/probs_diff_max": Unread(Max, (probs_diff.max(),)),
        "mismatch/logprobs_diff_mean": Unread(Mean, (logprobs_diff.sum(), count)),
        "mismatch/logprobs_diff_max": Unread(Max, (logprobs_diff.max(),)),
        "mismatch/k3": Unread(Mean, ((weight - log_weight - 1.0).sum(), count)),
        "mismatch/weight_mean": Unread(Mean, (total, count)),
        "mismatch/weight_max": Unread(Max, (weight.max(),)),
        "mismatch/effective_share": Unread(EffectiveShare, (total, squares, count)),
    }
