"""The loss of a critic on a micro-batch, given the values of its tokens.

Used for a critic of its own (value_step.py) and for one on the policy's trunk (step.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trigon.algorithms.reduce import Denominators, reduce_loss
from trigon.algorithms.unread import Unread
from trigon.algorithms.value_loss import value_loss
from trigon.metrics import Mean, Sum
from trigon.types import MicroBatch


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """The loss of a critic. clip: how far a value may move from that before the step's updates.

    averaging: how per-token values become one number. regularized: every token has a gradient.
    """

    clip: float
    averaging: Literal["token", "seq"]
    regularized: Literal[True] = True


def reduced_value_loss(
    values: Tensor, batch: MicroBatch, terms: ValueTerms, denominators: Denominators
) -> tuple[Tensor, dict[str, Unread]]:
    """Return this micro-batch's summand of the update's value loss, with gradient, and its metrics.

    values: [S] float32, with gradient. denominators: of the whole update, over all ranks.
    """
    assert batch.values is not None, "the loss of a critic needs its values before the update"
    assert batch.returns is not None, "a critic learns from returns"
    mask, count = batch.loss_mask, float(len(batch.trainable))
    lost = value_loss(values, batch.values, batch.returns, clip=terms.clip)
    loss = reduce_loss(
        lost.loss,
        mask,
        batch.sequence_index,
        batch.num_sequences,
        averaging=terms.averaging,
        fixed_length=1,  # of seq_fixed, which a critic does not have
        denominators=denominators,
    )
    return loss, {
        "critic/vf_loss": Unread(Sum, (loss.detach(),)),
        "critic/vf_clipfrac": _token_mean(lost.clipped, mask, count),
        "critic/vpred_mean": _token_mean(values, mask, count),
    }


def _token_mean(per_token: Tensor, mask: Tensor, count: float) -> Unread:
    """Return the mean over the trainable tokens, weighted by their number."""
    return Unread(Mean, (torch.where(mask > 0, per_token.detach(), torch.zeros_like(mask)).sum(), count))
