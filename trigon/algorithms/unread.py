"""Metrics whose numbers are still tensors, so that computing them does not make the host wait.

Reading one number from a GPU makes the host wait until all work before it is done; meanwhile the
host issues no new work. The metrics of an update are therefore read together, once, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trigon.metrics import Metric, merge


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """A metric whose numbers have not been read.

    kind: makes the metric from its numbers. numbers: tensors without dimensions, on any device and
    without gradient; and numbers that the host knows already.
    """

    kind: Callable[..., Metric]
    numbers: tuple[Tensor | float, ...]

    def __post_init__(self) -> None:
        # It would keep the activations of its micro-batch until the end of the update.
        assert not any(isinstance(number, Tensor) and number.requires_grad for number in self.numbers)


UnreadMetrics = Mapping[str, Unread]


def read_metrics(batches: Sequence[UnreadMetrics], *others: Tensor) -> tuple[dict[str, Metric], list[float]]:
    """Return the metrics of all micro-batches, merged in order, and the values of other tensors.

    Makes the host wait once for each device, however many metrics there are.
    others: tensors without dimensions. Raises: TypeError if a key has two different reductions.
    """
    tensors = [
        number
        for metrics in batches
        for metric in metrics.values()
        for number in metric.numbers
        if isinstance(number, Tensor)
    ]
    values = iter(_read([*tensors, *others]))
    read = [
        {
            key: metric.kind(*[next(values) if isinstance(number, Tensor) else number for number in metric.numbers])
            for key, metric in metrics.items()
        }
        for metrics in batches
    ]
    return merge(*read), list(values)


def _read(tensors: Sequence[Tensor]) -> list[float]:
    """Return the value of each tensor, exactly, with one copy from each device."""
    numbers = [0.0] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        together = torch.stack([tensors[index].detach().double() for index in indices])
        for index, value in zip(indices, together.tolist(), strict=True):
            numbers[index] = value
    return numbers
