"""The learning-rate schedule and the optimizers, by hand."""

import math

import pytest
import torch
from torch import nn

from trigon.training.optim import Schedule, make_optimizer


def test_warm_up_starts_above_zero_and_reaches_the_peak():
    schedule = Schedule(peak=1.0, shape="constant", warmup_updates=4, total_updates=10, min_ratio=0.0)
    assert [schedule.learning_rate(k) for k in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_without_warm_up_the_first_update_has_the_peak_rate():
    assert Schedule(2.0, "constant", 0, 10, 0.0).learning_rate(1) == 2.0


def test_cosine_falls_to_its_minimum_and_stays_there():
    schedule = Schedule(peak=1.0, shape="cosine", warmup_updates=0, total_updates=4, min_ratio=0.1)
    half = 0.1 + 0.9 * 0.5
    assert schedule.learning_rate(2) == pytest.approx(half)
    assert schedule.learning_rate(4) == pytest.approx(0.1)
    assert schedule.learning_rate(9) == pytest.approx(0.1)
    assert schedule.learning_rate(1) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_only_matrices_have_weight_decay():
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(1.0)
    optimizer = make_optimizer(
        layer.parameters(), strategy="adamw", learning_rate=0.1, betas=(0.9, 0.999), weight_decay=0.5
    )
    layer.weight.grad, layer.bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(layer.weight.data, torch.full((2, 2), 0.95))
    torch.testing.assert_close(layer.bias.data, torch.ones(2))


def test_frozen_parameters_are_not_in_the_optimizer():
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    optimizer = make_optimizer(
        layer.parameters(), strategy="adamw", learning_rate=0.1, betas=(0.9, 0.999), weight_decay=0.0
    )
    assert [p for group in optimizer.param_groups for p in group["params"]] == [layer.bias]


def train_towards(target, strategy, dtype, updates, learning_rate):
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    optimizer = make_optimizer(
        [parameter], strategy=strategy, learning_rate=learning_rate, betas=(0.9, 0.999), weight_decay=0.01
    )
    for _ in range(updates):
        parameter.grad = (parameter.detach().float() - target).to(dtype)
        optimizer.step()
    return parameter.detach().float()


def test_bf16_adamw_equals_adamw_in_float32():
    target = torch.linspace(-1, 1, 16).reshape(4, 4)
    torch.testing.assert_close(
        train_towards(target, "adamw_bf16", torch.float32, 20, 0.01),
        train_towards(target, "adamw", torch.float32, 20, 0.01),
        rtol=1e-4,
        atol=1e-6,
    )


def test_bf16_adamw_keeps_updates_that_bfloat16_would_round_away():
    # An update of 1e-4 is less than half a unit in the last place of a bfloat16 near 1: each would
    # be rounded to 0.
    parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = make_optimizer(
        [parameter], strategy="adamw_bf16", learning_rate=1e-4, betas=(0.9, 0.999), weight_decay=0.0
    )
    for _ in range(200):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    torch.testing.assert_close(parameter.detach().float(), torch.full((4, 4), 0.98), rtol=0, atol=0.004)
