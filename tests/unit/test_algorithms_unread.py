"""Metrics that are read from the device together."""

from __future__ import annotations

import math

import pytest
import torch

from support.device import HostWaits, OnDevice
from trigon.algorithms.unread import Unread, read_metrics
from trigon.metrics import EffectiveShare, Max, Mean, Sum


def number(value: float) -> OnDevice:
    return OnDevice(torch.tensor(value))


def test_metrics_of_all_micro_batches_are_read_at_once_and_merged() -> None:
    batches = [
        {"mean": Unread(Mean, (number(3.0), 2.0)), "share": Unread(EffectiveShare, (number(2.0), number(4.0), 2.0))},
        {"mean": Unread(Mean, (number(1.0), 2.0)), "max": Unread(Max, (number(-1.0),)), "sum": Unread(Sum, (5.0,))},
    ]
    with HostWaits() as recorded:
        metrics, others = read_metrics(batches, number(7.0), number(math.inf))
    assert len(recorded.waits) == 1
    assert metrics == {
        "mean": Mean(4.0, 4.0),
        "share": EffectiveShare(2.0, 4.0, 2.0),
        "max": Max(-1.0),
        "sum": Sum(5.0),
    }
    assert others == [7.0, math.inf]
    with HostWaits() as recorded:
        assert read_metrics([]) == ({}, [])
    assert recorded.waits == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_are_read_exactly_whatever_else_is_read(dtype: torch.dtype) -> None:
    value = torch.tensor(0.1, dtype=dtype)
    metrics, [other] = read_metrics([{"sum": Unread(Sum, (value,))}], torch.tensor(2.0**-60))
    assert metrics["sum"].value == float(value)
    assert other == 2.0**-60


def test_a_number_with_gradient_is_refused() -> None:
    with pytest.raises(AssertionError):
        Unread(Sum, (torch.tensor(1.0, requires_grad=True) * 2,))
