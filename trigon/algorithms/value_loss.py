"""The loss of a critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
