"""How well the rollout engine and the trainer agree about the tokens that were sampled, and what is done where they do
not.

Both hold the same weights, so in exact arithmetic every difference here is zero. What is left is rounding, or a bug:
stale weights, a stale cache, other pixels. docs/metrics.md gives the healthy ranges, docs/algorithms.md the
corrections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from trigon.algorithms.losses import MAX_LOG_RATIO
from trigon.algorithms.reduce import sequence_means, sequence_sums
from trigon.metrics import EffectiveShare, Max, Mean, Metric

CorrectionKind = Literal["truncate", "mask", "reject"]
CorrectionLevel = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class Correction:
    """What is done with w = trainer / sampler, the ratio of the two probabilities of what was sampled.

    kind: truncate weighs the loss by w, capped at high; mask weighs it by w between low and high and by 0 outside;
    reject weighs whole sequences by 1 or, outside, by 0.
    level: token takes each token's w; sequence that of a whole completion, the geometric mean of its tokens', which
    unlike their product does not depend on its length. reject at token level refuses a sequence for a single token.
    """

    kind: CorrectionKind
    level: CorrectionLevel
    low: float
    high: float


def correction_weights(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    correction: Correction,
    *,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
) -> tuple[Tensor, Tensor]:
    """Return by how much each token's policy loss is to be weighed, and 1 where a bound acted. Both [S], no gradient.

    Truncated importance sampling: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
    (2025); masking on both sides: IcePop (2025); sequences by the geometric mean: Liu et al., "When speed kills
    stability" (2025).
    Args: logprobs: the trainer's before the update; the rest as in reduce_loss.
    """
    log_weight = logprobs.detach() - sampling_logprobs
    if correction.level == "sequence":
        log_weight = sequence_means(log_weight, loss_mask, sequence_index, num_sequences)[sequence_index]
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = ((weight < correction.low) | (weight > correction.high)).float() * (loss_mask > 0)
    match correction.kind:
        case "truncate":
            return weight.clamp(max=correction.high), (weight > correction.high).float()
        case "mask":
            return torch.where(outside > 0, 0.0, weight), outside
        case "reject":
            refused = (sequence_sums(outside, sequence_index, num_sequences) > 0)[sequence_index].float()
            return 1.0 - refused, refused
        case _:
            assert_never(correction.kind)


def mismatch_metrics(sampling_logprobs: Tensor, logprobs: Tensor, loss_mask: Tensor) -> dict[str, Metric]:
    """Compare two opinions on the same tokens, both before any update. All [S] float32; loss_mask selects the tokens.

    probs_diff: |p - q|. logprobs_diff: |log p - log q|. k3: the low-variance estimate of KL(sampler || trainer).
    weight: w = trainer / sampler. effective_share: the effective sample size of these weights.
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
    total, squares = float(weight.sum()), float(weight.square().sum())
    return {
        "mismatch/probs_diff_mean": Mean(float(probs_diff.sum()), count),
        "mismatch/probs_diff_max": Max(float(probs_diff.max())),
        "mismatch/logprobs_diff_mean": Mean(float(logprobs_diff.sum()), count),
        "mismatch/logprobs_diff_max": Max(float(logprobs_diff.max())),
        "mismatch/k3": Mean(float((weight - log_weight - 1.0).sum()), count),
        "mismatch/weight_mean": Mean(total, count),
        "mismatch/weight_max": Max(float(weight.max())),
        "mismatch/effective_share": EffectiveShare(total, squares, count),
    }
