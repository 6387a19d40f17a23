"""Checksums of weights: the sum and the sum of squares of their values, in float64.

Both are independent of the order of the values and can be added up. So a parameter that an engine
fuses from several tensors, or shards over several ranks, has the sums of the tensors it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

RELATIVE_TOLERANCE = 1e-12
"""Largest difference between sums of the same values in another order, relative to their size.

float64 sums of the same values differ by about 1e-15. One update with a learning rate of 1e-6
changes them by 1e-9 and more.
"""

_CPU_CHUNK = 2**17  # values whose float64 copy stays in the cache of a core
_GPU_CHUNK = 2**24  # whose float64 copy has 128 MiB


@dataclass(frozen=True, slots=True)
class Checksum:
    """Sums over the values of one or several tensors. num_values: how many they are."""

    total: float
    squares: float
    num_values: int

    def equals(self, other: Checksum) -> bool:
        """Return whether both can be of the same values. False if a sum is not finite.

        The number of values is not compared: an engine may pad its parameters with zeros.
        """
        squares = max(self.squares, other.squares)
        # |sum| <= sqrt(number * sum of squares), so this is the scale of the rounding of the sum.
        scale = math.sqrt(max(self.num_values, other.num_values) * squares)
        return (
            abs(self.total - other.total) <= RELATIVE_TOLERANCE * scale
            and abs(self.squares - other.squares) <= RELATIVE_TOLERANCE * squares
        )


def add(checksums: Iterable[tuple[int, Checksum]]) -> Checksum:
    """Return the sum of checksums, each with the number of times that it counts."""
    terms = list(checksums)
    return Checksum(
        total=sum(times * term.total for times, term in terms),
        squares=sum(times * term.squares for times, term in terms),
        num_values=sum(times * term.num_values for times, term in terms),
    )


@torch.no_grad()
def sum_values(tensor: Tensor) -> Tensor:
    """Return the sum and the sum of squares, float64 [2] on the tensor's device."""
    chunk = _CPU_CHUNK if tensor.device.type == "cpu" else _GPU_CHUNK
    values = tensor.detach().reshape(-1)
    if values.numel() <= chunk:  # most tensors: norms and biases
        return _sum_chunk(values)
    return torch.stack([_sum_chunk(part) for part in torch.split(values, chunk)]).sum(dim=0)


def _sum_chunk(values: Tensor) -> Tensor:
    values = values.double()
    return torch.stack([values.sum(), values.dot(values)])


def read_sums(sums: dict[str, tuple[Tensor, int]]) -> dict[str, Checksum]:
    """Return the checksums of (sum_values, number of values), with one copy from each device."""
    by_device: dict[torch.device, list[str]] = {}
    for name, (values, _) in sums.items():
        by_device.setdefault(values.device, []).append(name)
    return {
        name: Checksum(total, squares, sums[name][1])
        for names in by_device.values()
        for name, (total, squares) in zip(names, torch.stack([sums[name][0] for name in names]).tolist(), strict=True)
    }
