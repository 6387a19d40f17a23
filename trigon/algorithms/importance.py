"""How well the rollout engine and the trainer agree about the tokens that were sampled.

Both hold the same weights, so in exact arithmetic every difference here is zero. What is left is rounding, or a bug:
stale weights, a stale cache, other pixels. docs/metrics.md gives the healthy ranges.
"""

from __future__ import annotations

from torch import Tensor

from trigon.algorithms.losses import MAX_LOG_RATIO
from trigon.metrics import Max, Mean, Metric


def mismatch_metrics(sampling_logprobs: Tensor, logprobs: Tensor, loss_mask: Tensor) -> dict[str, Metric]:
    """Compare two opinions on the same tokens, both before any update. All [S] float32; loss_mask selects the tokens.

    probs_diff: |p - q|. logprobs_diff: |log p - log q|. k3: the low-variance estimate of KL(sampler || trainer).
    weight and weight_squared: moments of w = trainer / sampler, whose effective sample size is weight^2 /
    weight_squared.
    """
    chosen = loss_mask > 0
    sampler, trainer = sampling_logprobs[chosen], logprobs.detach()[chosen]
    count = float(chosen.sum())
    if count == 0:
        return {}
    log_weight = (trainer - sampler).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = log_weight.exp()
    probs_diff = (trainer.exp() - sampler.exp()).abs()
    logprobs_diff = log_weight.abs()
    return {
        "mismatch/probs_diff_mean": Mean(float(probs_diff.sum()), count),
        "mismatch/probs_diff_max": Max(float(probs_diff.max())),
        "mismatch/logprobs_diff_mean": Mean(float(logprobs_diff.sum()), count),
        "mismatch/logprobs_diff_max": Max(float(logprobs_diff.max())),
        "mismatch/k3": Mean(float((weight - log_weight - 1.0).sum()), count),
        "mismatch/weight_mean": Mean(float(weight.sum()), count),
        "mismatch/weight_squared_mean": Mean(float(weight.square().sum()), count),
    }
