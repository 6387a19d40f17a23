"""Averages token losses; nothing else divides by a number of tokens or sequences.

The denominators are counted over the update, on all ranks, before the first micro-batch runs. Each
micro-batch then adds its share, so that micro-batching, packing, the number of ranks and gradient
accumulation do not change the sum beyond rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from trigon.config.names import LossAveraging


@dataclass(frozen=True, slots=True)
class Denominators:
    """The number of trainable tokens and sequences of an update, on all ranks.

    tokens: tokens with loss_mask 1. sequences: sequences with at least one such token.
    """

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpertShares:
    """How the tokens of an update are spread over the experts of MoE layers, on all ranks.

    fractions: [E] float32, the fraction of the tokens that use each expert; they add up to the
    number of experts per token. tokens: the number of these tokens, each counted once for each MoE
    layer.
    """

    fractions: Tensor
    tokens: float


def expert_shares(assignments: Sequence[float], *, experts_per_token: int) -> ExpertShares:
    """Return the shares of experts. assignments: how often each is used, over tokens and layers."""
    tokens = sum(assignments) / experts_per_token
    return ExpertShares(torch.tensor(assignments) / max(tokens, 1.0), tokens)


def load_balancing_loss(probabilities: Tensor, shares: ExpertShares) -> Tensor:
    """Return a micro-batch's share of the load-balancing loss of an update.

    The loss is the number of experts times the sum, over the experts, of the fraction of the tokens
    that use an expert and its mean probability: the number of experts per token if all are used
    alike, and more otherwise. The fractions have no gradient. Switch Transformer, arXiv:2101.03961,
    equations 4 to 6; as load_balancing_loss_func of transformers, over all MoE layers together.

    Args: probabilities: [E], the sum of each expert's probabilities over tokens and MoE layers.
        shares: the shares of the whole update, on the same device.
    Returns: a scalar with gradient.
    """
    return len(probabilities) * (shares.fractions * probabilities).sum() / max(shares.tokens, 1.0)


def count_denominators(loss_masks: Iterable[Tensor]) -> Denominators:
    """Return the denominators of an update, given the loss_mask [S] of each of its completions."""
    lengths = [int(mask.count_nonzero()) for mask in loss_masks]
    return Denominators(tokens=sum(lengths), sequences=sum(length > 0 for length in lengths))


def sequence_sums(per_token: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Return the sum of [S] values over each sequence: [num_sequences], with gradient."""
    return torch.zeros(num_sequences, dtype=per_token.dtype, device=per_token.device).index_add(
        0, sequence_index, per_token
    )


def sequence_means(values: Tensor, loss_mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Return the mean over the trainable tokens of each sequence, 0 if it has none.

    Args: as in reduce_loss. Returns: [num_sequences] with gradient.
    """
    masked = torch.where(loss_mask > 0, values, torch.zeros_like(values))
    lengths = sequence_sums(loss_mask, sequence_index, num_sequences)
    return sequence_sums(masked, sequence_index, num_sequences) / lengths.clamp(min=1.0)


def reduce_loss(
    per_token: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    *,
    averaging: LossAveraging,
    fixed_length: int,
    denominators: Denominators,
) -> Tensor:
    """Return a micro-batch's share of the loss of an update. The shares add up to the loss.

    token: the mean over all trainable tokens of the update (DAPO, arXiv:2503.14476, equation 12).
    seq: the mean over sequences of the mean of each one (GRPO, arXiv:2402.03300, equation 3).
    seq_fixed: the mean over sequences of the sum of each one divided by fixed_length (Dr. GRPO,
    arXiv:2503.20783, section 3.2).

    A masked token contributes nothing, even if its value is not finite. Its derivative must be
    finite, or the gradient is nan.
    Args: per_token, loss_mask: [S] float; sequence_index: [S] int64 in [0, num_sequences).
    Returns: a scalar with gradient.
    """
    masked = torch.where(loss_mask > 0, per_token, torch.zeros_like(per_token))
    match averaging:
        case "token":
            return masked.sum() / max(denominators.tokens, 1)
        case "seq":
            means = sequence_means(per_token, loss_mask, sequence_index, num_sequences)
            return means.sum() / max(denominators.sequences, 1)
        case "seq_fixed":
            return masked.sum() / (fixed_length * max(denominators.sequences, 1))
        case _:
            assert_never(averaging)
