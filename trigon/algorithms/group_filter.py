"""Classifies groups by their mean score, for DAPO's dynamic sampling."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GroupClass = Literal["kept", "low", "high", "ungraded"]
"""low, high: the mean is at or beyond that bound. ungraded: no completion was scored."""


def classify_groups(values: Tensor, valid: Tensor, *, low: float, high: float) -> list[GroupClass]:
    """Return "kept" for each group whose mean value is strictly between two bounds.

    Dynamic sampling: DAPO, section 3.2 (arXiv:2503.14476). Means are computed in float64.
    Args: values: [G, N] float; valid: [G, N] bool, which of them count.
    Returns: one class for each of the G groups.
    """
    counts, values = valid.sum(dim=1), values.double()
    means = torch.where(valid, values, 0.0).sum(dim=1) / counts.clamp(min=1)
    # The rounded mean of equal numbers can differ from that number, which may be the bound.
    lowest = torch.where(valid, values, torch.inf).amin(dim=1)
    highest = torch.where(valid, values, -torch.inf).amax(dim=1)
    means = torch.where(counts > 0, means.maximum(lowest).minimum(highest), means)
    return [
        "ungraded" if not count else "low" if mean <= low else "high" if mean >= high else "kept"
        for mean, count in zip(means.tolist(), counts.tolist(), strict=True)
    ]
