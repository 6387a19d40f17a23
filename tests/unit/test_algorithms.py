"""Each formula worked by hand, with the edges."""

import itertools
import math

import pytest
import torch

from trigon.algorithms.advantages import group_relative
from trigon.algorithms.importance import mismatch_metrics
from trigon.algorithms.kl import MAX_EXPONENT, AdaptiveKl, kl_penalized_rewards, kl_per_token
from trigon.algorithms.losses import clipped_policy_loss
from trigon.algorithms.reduce import Denominators, count_denominators, reduce_loss

ALL = torch.ones(1, 4, dtype=torch.bool)


def test_group_relative_centres_and_scales_by_the_unbiased_deviation():
    # mean 2, deviations -1 -1 1 1, unbiased std sqrt(4/3)
    advantages = group_relative(torch.tensor([[1.0, 1.0, 3.0, 3.0]]), ALL)
    expected = 1.0 / (math.sqrt(4 / 3) + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([[-expected, -expected, expected, expected]]))


def test_group_relative_without_std_only_centres():
    advantages = group_relative(torch.tensor([[0.0, 1.0, 0.0, 3.0]]), ALL, normalize_std=False)
    assert advantages.tolist() == [[-1.0, 0.0, -1.0, 2.0]]


@pytest.mark.parametrize("size", [2, 3, 5, 7, 8, 12, 16, 48, 64])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 0.9, 1.1, 1.4, -0.3, 1e-8, 12345.678])
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(size, reward):
    rewards = torch.full((2, size), reward)
    assert torch.equal(group_relative(rewards, torch.ones(2, size, dtype=torch.bool)), torch.zeros(2, size))


def test_ungraded_completions_enter_no_statistic():
    valid = torch.tensor([[True, True, False, True]])
    with_hole = group_relative(torch.tensor([[1.0, 2.0, 99.0, 3.0]]), valid)
    without = group_relative(torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(with_hole[:, [0, 1, 3]], without)
    assert with_hole[0, 2] == 0.0


@pytest.mark.parametrize("valid", [[False] * 4, [True, False, False, False]])
def test_a_group_with_nothing_to_compare_has_zero_advantage(valid):
    assert torch.equal(group_relative(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([valid])), torch.zeros(1, 4))


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        group_relative(torch.ones(3, 1), torch.ones(3, 1, dtype=torch.bool))


def loss_of(ratio, advantage):
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    result = clipped_policy_loss(
        logprobs, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.3, clip_dual=3.0
    )
    result.loss.sum().backward()
    return result.loss.item(), logprobs.grad.item(), result


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the plain policy gradient
        (1.2, 1.0, -1.2, -1.2),  # inside the bounds
        (1.5, 1.0, -1.3, 0.0),  # gained enough: clipped high
        (0.5, 1.0, -0.5, -0.5),  # losing ground on a good token: never clipped
        (0.5, -1.0, 0.8, 0.0),  # bad token already unlikely: clipped low
        (2.0, -1.0, 2.0, 2.0),  # bad token growing: full loss
        (5.0, -1.0, 3.0, 0.0),  # ... up to the dual bound
    ],
)
def test_clipped_loss_by_hand(ratio, advantage, loss, gradient):
    got_loss, got_gradient, _ = loss_of(ratio, advantage)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    assert got_gradient == pytest.approx(gradient, rel=1e-5)


def test_clip_flags_say_which_bound_was_met():
    assert loss_of(1.5, 1.0)[2].clipped.item() == 1.0
    assert loss_of(1.2, 1.0)[2].clipped.item() == 0.0
    assert loss_of(5.0, -1.0)[2].dual_clipped.item() == 1.0
    assert loss_of(2.0, -1.0)[2].dual_clipped.item() == 0.0


def test_clipped_loss_stays_finite_when_the_policies_are_worlds_apart():
    logprobs = torch.tensor([-1000.0, 0.0], requires_grad=True)
    old = torch.tensor([0.0, -1000.0])
    result = clipped_policy_loss(logprobs, old, torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.3, clip_dual=3.0)
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(logprobs.grad).all()


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


def test_kl_penalty_is_taken_from_the_reward():
    penalized = kl_penalized_rewards(torch.tensor([[1.0, 0.5]]), torch.tensor([[2.0, 4.0]]), 0.1)
    torch.testing.assert_close(penalized, torch.tensor([[0.8, 0.1]]))


PER_TOKEN = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
SEQUENCES = torch.tensor([0, 0, 0, 0, 1, 1])


def test_token_averaging_by_hand():
    loss = reduce_loss(
        PER_TOKEN, torch.ones(6), SEQUENCES, 2, averaging="token", denominators=Denominators(tokens=6, sequences=2)
    )
    assert loss.item() == pytest.approx(21 / 6)


def test_sequence_averaging_is_the_mean_of_sequence_means():
    loss = reduce_loss(
        PER_TOKEN, torch.ones(6), SEQUENCES, 2, averaging="seq", denominators=Denominators(tokens=6, sequences=2)
    )
    assert loss.item() == pytest.approx((2.5 + 5.5) / 2)


@pytest.mark.parametrize("averaging", ["token", "seq"])
def test_micro_batching_does_not_change_the_gradient(averaging):
    generator = torch.Generator().manual_seed(0)
    lengths = [10, 2, 6, 2]
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    mask = (torch.rand(sum(lengths), generator=generator) > 0.2).double()
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = list(itertools.pairwise(starts))
    whole = count_denominators([mask[a:b] for a, b in spans])

    def gradient(batches):
        leaf = values.clone().requires_grad_()
        for batch in batches:
            piece = torch.cat([leaf[slice(*spans[i])] for i in batch])
            piece_mask = torch.cat([mask[slice(*spans[i])] for i in batch])
            index = torch.cat([torch.full((lengths[i],), k) for k, i in enumerate(batch)])
            reduce_loss(
                piece.square(), piece_mask, index, len(batch), averaging=averaging, denominators=whole
            ).backward()
        return leaf.grad

    together = gradient([[0, 1, 2, 3]])
    torch.testing.assert_close(gradient([[0], [1], [2], [3]]), together)
    torch.testing.assert_close(gradient([[3, 0], [2, 1]]), together)


def test_masked_tokens_contribute_nothing_even_when_not_finite():
    values = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    loss = reduce_loss(
        values,
        torch.tensor([1.0, 0.0, 0.0]),
        torch.zeros(3, dtype=torch.int64),
        1,
        averaging="token",
        denominators=Denominators(1, 1),
    )
    loss.backward()
    assert loss.item() == 1.0
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_a_step_with_everything_masked_has_zero_loss_not_nan():
    for averaging in ("token", "seq"):
        loss = reduce_loss(
            PER_TOKEN, torch.zeros(6), SEQUENCES, 2, averaging=averaging, denominators=Denominators(0, 0)
        )
        assert loss.item() == 0.0


def test_denominators_count_only_what_trains():
    counted = count_denominators([torch.tensor([1.0, 0.0, 1.0]), torch.zeros(4), torch.ones(2)])
    assert counted == Denominators(tokens=4, sequences=2)


def test_mismatch_by_hand():
    half, quarter = math.log(0.5), math.log(0.25)
    metrics = mismatch_metrics(
        torch.tensor([half, half, half]), torch.tensor([half, quarter, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    )
    assert metrics["mismatch/probs_diff_mean"].value == pytest.approx(0.125)
    assert metrics["mismatch/probs_diff_max"].value == pytest.approx(0.25)
    assert metrics["mismatch/logprobs_diff_mean"].value == pytest.approx(math.log(2) / 2)
    assert metrics["mismatch/k3"].value == pytest.approx((0.5 + math.log(2) - 1.0) / 2)
    assert metrics["mismatch/weight_mean"].value == pytest.approx(0.75)
    assert metrics["mismatch/weight_squared_mean"].value == pytest.approx(0.625)


def test_mismatch_of_nothing_is_nothing():
    assert mismatch_metrics(torch.zeros(2), torch.zeros(2), torch.zeros(2)) == {}
