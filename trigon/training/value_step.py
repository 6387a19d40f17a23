"""The forward and backward pass of one packed row of a critic. As step.py, which has a policy's."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from trigon.algorithms.reduce import Denominators
from trigon.algorithms.unread import UnreadMetrics
from trigon.training.step import Precision
from trigon.training.value_terms import ValueTerms, reduced_value_loss
from trigon.types import MicroBatch, PackedGroups


class RowValues(Protocol):
    """Computes the value before each sampled token of a row, [S], with gradient."""

    def __call__(self, packed: PackedGroups, *, run_dummy_vision: bool) -> Tensor: ...


def value_backward(
    values_of: RowValues,
    batch: MicroBatch,
    terms: ValueTerms,
    denominators: Denominators,
    precision: Precision,
    *,
    run_dummy_vision: bool,
    gradient_scale: float,
) -> UnreadMetrics:
    """Add the gradient of one micro-batch to the parameters, and return its metrics.

    The other arguments are those of micro_batch_backward. "critic/vf_loss" is this micro-batch's
    summand of the update's loss.
    """
    with precision():
        values = values_of(batch.packed, run_dummy_vision=run_dummy_vision)
    loss, metrics = reduced_value_loss(values, batch, terms, denominators)
    torch.autograd.backward(loss * gradient_scale)
    return metrics


def idle_value_backward(
    values_of: RowValues, idle_row: PackedGroups, precision: Precision, *, run_dummy_vision: bool
) -> None:
    """Make a pass whose gradient is zero, for a rank with fewer micro-batches than another one."""
    with precision():
        values = values_of(idle_row, run_dummy_vision=run_dummy_vision)
    torch.autograd.backward(values.sum() * 0.0)
