"""Advantages and returns of generalized advantage estimation, and the loss of a critic, by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trigon.algorithms.advantages import Estimates, RewardBatch, estimate_with_values, explained_variance
from trigon.algorithms.losses import value_loss
from trigon.config.schema import AlgorithmConfig


def batch_of(
    rewards: list[list[float]],
    lengths: list[list[int]],
    *,
    valid: list[list[bool]] | None = None,
    penalties: list[list[Tensor]] | None = None,
) -> RewardBatch:
    return RewardBatch(
        rewards=torch.tensor(rewards),
        valid=torch.ones(len(rewards), len(rewards[0]), dtype=torch.bool) if valid is None else torch.tensor(valid),
        lengths=torch.tensor(lengths),
        penalties=penalties,
        parts={},
        baselines=None,
    )


def estimate(batch: RewardBatch, values: list[list[list[float]]], *, cut: bool = False, **settings) -> Estimates:
    tensors = [[torch.tensor(each) for each in group] for group in values]
    return estimate_with_values(batch, tensors, AlgorithmConfig(**settings), cut=torch.full(batch.valid.shape, cut))


def unwhitened(estimates: Estimates, group: int = 0, index: int = 0) -> list[float]:
    """Return the advantages before whitening, where the critic learns with the same lambda."""
    return (estimates.returns[group][index] - estimates.values[group][index]).tolist()


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        # values 0.5, 0.25, 1.0; the reward 2 comes with the third token
        (1.0, 1.0, [1.5, 1.75, 1.0]),  # the return less the value
        (1.0, 0.0, [-0.25, 0.75, 1.0]),  # one step
        (1.0, 0.5, [0.375, 1.25, 1.0]),  # 1; 0.75 + 0.5; -0.25 + 0.5 * 1.25
        (0.5, 1.0, [0.0, 0.75, 1.0]),  # 1; 0.25 + 0.5; -0.375 + 0.5 * 0.75
        (0.5, 0.5, [-0.25, 0.5, 1.0]),  # 1; 0.25 + 0.25; -0.375 + 0.25 * 0.5
    ],
)
def test_advantages_by_hand(gamma, lam, expected):
    estimates = estimate(batch_of([[2.0]], [[3]]), [[[0.5, 0.25, 1.0, 9.0]]], gamma=gamma, lam=lam)
    assert unwhitened(estimates) == pytest.approx(expected, abs=1e-6)
    assert estimates.values[0][0].tolist() == [0.5, 0.25, 1.0]


def test_a_cut_completion_has_the_value_after_it_only_if_that_is_asked_for():
    batch, values = batch_of([[0.0]], [[2]]), [[[1.0, 2.0, 8.0]]]
    assert unwhitened(estimate(batch, values, cut=True)) == [-1.0, -2.0]
    # The last delta is 0 + 0.5 * 8 - 2; the first 0.5 * 2 - 1, and half of the last.
    bootstrapped = estimate(batch, values, cut=True, gamma=0.5, bootstrap_cut=True)
    assert unwhitened(bootstrapped) == [1.0, 2.0]
    assert unwhitened(estimate(batch, values, cut=False, bootstrap_cut=True)) == [-1.0, -2.0]


def test_the_critic_can_learn_with_another_lambda():
    batch, values = batch_of([[2.0]], [[3]]), [[[0.5, 0.25, 1.0, 0.0]]]
    assert estimate(batch, values, lam=0.0, lam_critic=1.0).returns[0][0].tolist() == [2.0, 2.0, 2.0]


def test_lambda_grows_with_the_length_of_the_completion():
    # alpha * S is 2 for four tokens: lambda 0.5. For one token it is 0.5: lambda 0, not -1.
    batch = batch_of([[1.0, 1.0]], [[4, 1]])
    estimates = estimate(batch, [[[0.0] * 5, [0.0] * 2]], lam_alpha=0.5)
    assert unwhitened(estimates) == [0.125, 0.25, 0.5, 1.0]
    assert unwhitened(estimates, 0, 1) == [1.0]


def test_advantages_are_whitened_over_all_tokens_with_the_unbiased_variance():
    batch = batch_of([[1.0], [0.0]], [[1], [3]])
    estimates = estimate(batch, [[[0.0] * 2], [[0.0] * 4]])
    # Of 1, 0, 0, 0: mean 0.25, variance 0.25.
    assert estimates.advantages[0][0].tolist() == pytest.approx([1.5])
    assert estimates.advantages[1][0].tolist() == pytest.approx([-0.5] * 3)
    equal = estimate(batch_of([[0.3, 0.3]], [[2, 4]]), [[[0.0] * 3, [0.0] * 5]])
    assert all(not tokens.any() for tokens in equal.advantages[0])  # exactly


def test_completions_without_a_score_teach_nothing():
    batch = batch_of([[5.0, 1.0, 0.0]], [[2, 1, 1]], valid=[[False, True, True]])
    estimates = estimate(batch, [[[0.5, 0.25, 0.0], [0.0] * 2, [0.0] * 2]])
    assert estimates.advantages[0][0].tolist() == [0.0, 0.0]
    assert estimates.returns[0][0].tolist() == [0.5, 0.25]
    assert estimates.advantages[0][1].tolist() == pytest.approx([0.5**0.5], abs=1e-6)


NUMBERS = st.floats(-4, 4, width=32)


@given(st.data(), st.floats(0.5, 1), st.floats(0, 1))
def test_gae_equals_an_independent_loop(data, gamma, lam):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    rewards = [data.draw(NUMBERS) for _ in lengths]
    values = [data.draw(st.lists(NUMBERS, min_size=n + 1, max_size=n + 1)) for n in lengths]
    penalties = [data.draw(st.lists(NUMBERS, min_size=n, max_size=n)) for n in lengths]
    cut = [data.draw(st.booleans()) for _ in lengths]
    estimates = estimate_with_values(
        batch_of(
            [[reward] for reward in rewards],
            [[n] for n in lengths],
            penalties=[[torch.tensor(each)] for each in penalties],
        ),
        [[torch.tensor(each)] for each in values],
        AlgorithmConfig(gamma=gamma, lam=lam, bootstrap_cut=True),
        cut=torch.tensor(cut)[:, None],
    )
    for index, n in enumerate(lengths):
        following = [*values[index][1:n], values[index][n] if cut[index] else 0.0]
        for start in range(n):
            expected = 0.0  # the sum over later deltas, without recursion
            for t in range(start, n):
                reward = (rewards[index] if t == n - 1 else 0.0) - penalties[index][t]
                delta = reward + gamma * following[t] - values[index][t]
                expected += (gamma * lam) ** (t - start) * delta
            actual = float(estimates.returns[index][0][start]) - values[index][start]
            assert actual == pytest.approx(expected, abs=1e-4)


def test_explained_variance_by_hand():
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.zeros(3), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(3)) == 0.0


def test_the_value_loss_by_hand():
    # Inside the range; beyond it towards the return, where clipping is worse; and away from it.
    values = torch.tensor([0.25, 1.0, -1.0], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(3), torch.ones(3), clip=0.5)
    assert loss.tolist() == pytest.approx([0.5 * 0.75**2, 0.5 * 0.5**2, 0.5 * 2.0**2])
    assert clipped.tolist() == [0.0, 1.0, 0.0]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.75, 0.0, -2.0])
