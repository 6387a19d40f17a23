"""Measures and corrects the train-inference mismatch: engine against trainer on the sampled tokens.

Both have the same weights, so in exact arithmetic every difference is zero. What remains is
rounding, or a bug: stale weights, a stale cache, other pixels. docs/metrics.md gives the healthy
ranges, docs/algorithms.md the corrections.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from trigon.algorithms.losses import MAX_LOG_RATIO
from trigon.algorithms.reduce import sequence_means, sequence_sums
from trigon.algorithms.unread import Unread
from trigon.config.names import CorrectionKind
from trigon.config.schema import AlgorithmConfig
from trigon.metrics import EffectiveShare, Max, Mean


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
