"""KL estimators by hand, and the adaptive coefficient."""

import math

import pytest
import torch

from trigon.algorithms.losses import MAX_EXPONENT, AdaptiveKl, kl_per_token


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("kl", 0.5), ("abs", 0.5), ("mse", 0.125), ("low_var_kl", math.exp(-0.5) + 0.5 - 1.0)],
)
def test_kl_by_hand(estimator, expected):
    value = kl_per_token(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator)
    assert value.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("difference", [-30.0, -12.0, -3.0, 0.5, 2.7, 11.0, 25.0, 500.0])
def test_low_var_kl_pulls_back_however_far_the_policy_has_drifted(difference):
    logprobs = torch.tensor([-difference], requires_grad=True)
    value = kl_per_token(logprobs, torch.zeros(1), "low_var_kl")
    value.sum().backward()
    assert math.isfinite(value.item())
    assert value.item() > 0
    assert math.isfinite(logprobs.grad.item())
    assert math.copysign(1.0, logprobs.grad.item()) == math.copysign(1.0, -difference)


def test_low_var_kl_is_exact_up_to_the_named_bound():
    value = kl_per_token(torch.tensor([0.0], dtype=torch.float64), torch.tensor([MAX_EXPONENT]).double(), "low_var_kl")
    assert value.item() == pytest.approx(math.exp(MAX_EXPONENT) - MAX_EXPONENT - 1.0, rel=1e-12)


def test_adaptive_kl_moves_at_most_a_fifth_of_batch_over_horizon():
    controller = AdaptiveKl(coefficient=0.1, target=0.1, horizon=1000.0)
    assert controller.updated(10.0, 100).coefficient == pytest.approx(0.1 * 1.02)
    assert controller.updated(0.0, 100).coefficient == pytest.approx(0.1 * 0.98)
    assert controller.updated(0.1, 100).coefficient == pytest.approx(0.1)
    assert AdaptiveKl(0.1, 0.1, 0.0).updated(10.0, 100).coefficient == 0.1
