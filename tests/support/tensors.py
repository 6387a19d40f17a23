"""Comparisons of named tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_equal_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare bit for bit."""
    assert actual.keys() == expected.keys()
    different = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert different == []


def flatten(tensors: dict[str, Tensor]) -> Tensor:
    """Return all elements in one vector, in the order of the names."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def max_relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a tensor, in the Euclidean norm."""
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - expected[name]).norm() / expected[name].norm()) for name in actual)
