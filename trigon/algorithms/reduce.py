"""The only place that divides by a number of tokens or of sequences.

The denominators are counted over the whole optimizer step, on all ranks, before the first micro-batch runs. Each
micro-batch then adds its share, and neither micro-batching, packing, rank count nor accumulation can change the sum
beyond rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

Averaging = Literal["token", "seq", "seq_fixed"]


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a whole optimizer step trains on.

    tokens: those with loss_mask 1. sequences: those with at least one such token.
    """

    tokens: int
    sequences: int


def count_denominators(loss_masks: Iterable[Tensor]) -> Denominators:
    """Count the trainable tokens and sequences of a step, given the loss_mask [R] of each of its completions."""
    lengths = [int(mask.count_nonzero()) for mask in loss_masks]
    return Denominators(tokens=sum(lengths), sequences=sum(length > 0 for length in lengths))


def sequence_sums(per_token: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Add up [S] values by the sequence to which they belong. Returns: [num_sequences]; carries gradient."""
    return torch.zeros(num_sequences, dtype=per_token.dtype, device=per_token.device).index_add(
        0, sequence_index, per_token
    )


def sequence_means(values: Tensor, loss_mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Return each sequence's mean over its trainable tokens, 0 where it has none: [S] -> [num_sequences]; has gradient.

    Args: as reduce_loss.
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
    averaging: Averaging,
    fixed_length: int,
    denominators: Denominators,
) -> Tensor:
    """Return this micro-batch's share of the step's loss: a scalar with gradient; the shares of all micro-batches add
    up to it.

    token: the mean over all trainable tokens of the step (DAPO, arXiv:2503.14476, equation 12).
    seq: the mean over sequences of each one's own mean (GRPO, arXiv:2402.03300, equation 3).
    seq_fixed: the mean over sequences of each one's sum, divided by fixed_length tokens whatever its own length
    (Dr. GRPO, arXiv:2503.20783, section 3.2).

    Args: per_token, loss_mask [S] float; sequence_index [S] int64 in [0, num_sequences).
    A masked token contributes nothing, even where its value is not finite (its derivative must be, or the gradient is
    nan).
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
