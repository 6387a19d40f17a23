"""Every advantage estimator: values by hand, edge cases and invariants."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from trigon.algorithms.advantages import RewardBatch, estimate_advantages, group_relative
from trigon.config.names import GROUP_ESTIMATORS, SINGLE_COMPLETION_ESTIMATORS, AdvantageEstimator

ESTIMATORS = get_args(AdvantageEstimator)
COMPARING = sorted(set(ESTIMATORS) - set(SINGLE_COMPLETION_ESTIMATORS))


def reward_batch(rewards, *, valid=None, lengths=None, penalties=None, parts=None, baselines=None):
    rewards = torch.tensor(rewards)
    return RewardBatch(
        rewards=rewards,
        valid=torch.ones_like(rewards, dtype=torch.bool) if valid is None else torch.tensor(valid),
        lengths=torch.full(rewards.shape, 2) if lengths is None else torch.tensor(lengths),
        penalties=None if penalties is None else [[torch.tensor(tokens) for tokens in row] for row in penalties],
        parts={name: torch.tensor(values) for name, values in (parts or {"overall": rewards.tolist()}).items()},
        baselines=torch.zeros(len(rewards)) if baselines is None else torch.tensor(baselines),
    )


def advantages(rewards, estimator, *, gamma=1.0, weights=None, **others):
    """Return the advantage of each token of each completion, as lists."""
    found = estimate_advantages(reward_batch(rewards, **others), estimator, gamma=gamma, weights=weights)
    return [[tokens.tolist() for tokens in row] for row in found]


def completion_advantages(rewards, estimator, **others):
    """Return the advantage of each completion, which all of its tokens must have."""
    rows = advantages(rewards, estimator, **others)
    assert all(len(set(tokens)) == 1 for row in rows for tokens in row)
    return [[tokens[0] for tokens in row] for row in rows]


def close(*expected):
    return [pytest.approx(list(row), rel=1e-5, abs=1e-6) for row in expected]


# -- by hand ---------------------------------------------------------------------------------------


ROOT = math.sqrt
PARTS = {"accuracy": [[0.0, 0.0, 1.0, 1.0]], "format": [[0.0, 1.0, 0.0, 1.0]]}
BY_HAND = {
    # mean 2, differences -1 -1 1 1, unbiased std sqrt(4/3)
    "grpo": ("grpo", [[1.0, 1.0, 3.0, 3.0]], {}, [[-ROOT(3 / 4), -ROOT(3 / 4), ROOT(3 / 4), ROOT(3 / 4)]]),
    "dr_grpo": ("dr_grpo", [[0.0, 1.0, 0.0, 3.0]], {}, [[-1.0, 0.0, -1.0, 2.0]]),
    # rewards 0 2 4 6: mean 3, squares 9 1 1 9, unbiased std sqrt(20/3); centered -1 1 -1 1
    "grpo_batch": ("grpo_batch", [[0.0, 2.0], [4.0, 6.0]], {}, [[-ROOT(3 / 20), ROOT(3 / 20)]] * 2),
    # 1 - (0 + 5) / 2, 0 - (1 + 5) / 2, 5 - (1 + 0) / 2
    "rloo": ("rloo", [[1.0, 0.0, 5.0]], {}, [[-1.5, -3.0, 4.5]]),
    # mean 2, differences -1 -1 2, unbiased std sqrt(6/2); the best leads the second by 4 - 1
    "grpo_passk": ("grpo_passk", [[1.0, 1.0, 4.0]], {}, [[0.0, 0.0, 3.0 / ROOT(3.0)]]),
    "grpo_passk without a lead": ("grpo_passk", [[1.0, 4.0, 4.0]], {}, [[0.0] * 3]),
    # the baseline is weighted by length: (1 x 1 + 3 x 0) / 4
    "opo": ("opo", [[1.0, 0.0]], {"lengths": [[1, 3]]}, [[0.75, -0.25]]),
    # centered -1 1 -2 2: squares 1 1 4 4, 10 / 3
    "reinforce_plus_plus_baseline": (
        "reinforce_plus_plus_baseline",
        [[0.0, 2.0], [0.0, 4.0]],
        {},
        [[-ROOT(3 / 10), ROOT(3 / 10)], [-2 * ROOT(3 / 10), 2 * ROOT(3 / 10)]],
    ),
    # accuracy becomes -s -s s s with s = sqrt(3)/2, format -s s -s s; sums -2s 0 0 2s; rms of
    # these four over n - 1: sqrt(8 s^2 / 3) = sqrt(2)
    "gdpo": ("gdpo", [[9.0] * 4], {"parts": PARTS}, [[-ROOT(3 / 2), 0.0, 0.0, ROOT(3 / 2)]]),
    # accuracy alone counts: -s -s s s over sqrt(4 s^2 / 3) = 1
    "gdpo weighted": (
        "gdpo",
        [[9.0] * 4],
        {"parts": PARTS, "weights": {"accuracy": 2.0}},
        [[-ROOT(3) / 2, -ROOT(3) / 2, ROOT(3) / 2, ROOT(3) / 2]],
    ),
    "remax": ("remax", [[1.0, 0.0], [0.5, 2.0]], {"baselines": [1.0, 0.5]}, [[0.0, -1.0], [0.0, 1.5]]),
    "remax without a greedy reward": (
        "remax",
        [[1.0, 0.0], [1.0, 0.0]],
        {"baselines": [math.nan, 0.5]},
        [[0.0, 0.0], [0.5, -0.5]],
    ),
    "penalties": ("dr_grpo", [[1.0, 1.0]], {"penalties": [[[0.5, 0.5], [0.25, 0.25]]]}, [[-0.25, 0.25]]),
}


@pytest.mark.parametrize(("estimator", "rewards", "others", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_advantages_by_hand(estimator, rewards, others, expected):
    assert completion_advantages(rewards, estimator, **others) == close(*expected)


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("offset", [0.0, 0.01])
def test_gdpo_is_its_formula_for_parts_of_any_spread(spread, offset):
    random = torch.Generator().manual_seed(7)
    for _ in range(30):
        drawn = torch.randn(2, 3, 4, generator=random, dtype=torch.float64) * torch.tensor([1.0, spread])[:, None, None]
        parts = (drawn + offset).float()
        exact = parts.double()
        std = exact.std(dim=2, keepdim=True)
        total = ((exact - exact.mean(dim=2, keepdim=True)) / (std + 1e-6)).sum(dim=0)
        expected = total / (total.square().sum() / (total.numel() - 1)).sqrt()
        found = completion_advantages([[1.0] * 4] * 3, "gdpo", parts={"a": parts[0].tolist(), "b": parts[1].tolist()})
        assert torch.tensor(found).double() == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.1, 1e-3])
def test_gdpo_gives_exactly_zero_where_the_parts_cancel(ratio):
    # Both parts normalize to the same numbers with opposite signs, up to STD_EPSILON and rounding.
    # What that leaves must not be scaled up, neither alone nor beside a group that differs.
    cancelled = [1.0, 0.0, 0.0, 1.0, 0.0], [ratio * part for part in (0.0, 1.0, 1.0, 0.0, 1.0)]
    other = [1.0, 0.0, 0.0, 0.0, 0.0], [ratio * part for part in (1.0, 0.0, 0.0, 1.0, 0.0)]
    parts = {"accuracy": [cancelled[0]] * 2, "format": [cancelled[1]] * 2}
    assert completion_advantages([[1.0] * 5] * 2, "gdpo", parts=parts) == [[0.0] * 5] * 2
    parts = {"accuracy": [cancelled[0], other[0]], "format": [cancelled[1], other[1]]}
    found = completion_advantages([[1.0] * 5] * 2, "gdpo", parts=parts)
    assert found[0] == [0.0] * 5
    assert max(found[1]) > 1


def test_reinforce_plus_plus_whitens_all_tokens_of_the_batch_together():
    # returns 1 1 | 3: mean 5/3, squares (4 + 4 + 16) / 9, unbiased variance 4/3
    mean, std = 5 / 3, math.sqrt(4 / 3)
    found = advantages([[1.0, 3.0]], "reinforce_plus_plus", lengths=[[2, 1]])
    assert found[0][0] == pytest.approx([(1 - mean) / std] * 2, rel=1e-5)
    assert found[0][1] == pytest.approx([(3 - mean) / std], rel=1e-5)


def test_a_token_is_credited_with_what_follows_it():
    # reward 2 at the end of three tokens; penalties 0.1, 0.2, 0.3 with their tokens: rewards to go
    penalties = [[[0.1, 0.2, 0.3]]]
    found = advantages([[2.0]], "remax", lengths=[[3]], penalties=penalties)
    assert found[0][0] == pytest.approx([1.4, 1.5, 1.7])
    assert advantages([[2.0]], "remax", lengths=[[3]], penalties=penalties, gamma=0.5) == found


def test_a_discount_credits_the_last_tokens_most():
    # returns 2/4 2/2 2 | 0: mean 3.5/4, squares
    returns = [0.5, 1.0, 2.0, 0.0]
    mean = sum(returns) / 4
    std = math.sqrt(sum((value - mean) ** 2 for value in returns) / 3)
    found = advantages([[2.0, 0.0]], "reinforce_plus_plus", lengths=[[3, 1]], gamma=0.5)
    assert found[0][0] + found[0][1] == pytest.approx([(value - mean) / std for value in returns], rel=1e-5)


# -- edges -----------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("size", [2, 3, 7, 12, 64])
@pytest.mark.parametrize("estimator", COMPARING)
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(size, estimator):
    lengths = [list(range(1, size + 1)), [2] * size]
    other_group = ([0.0, 1.0] * size)[:size]  # so that the rewards of the batch are not all equal
    for reward in (0.1, 0.3, 0.7, 0.9, 1.1, 1.4, -0.3, 1e-8, 12345.678):
        assert completion_advantages([[reward] * size, other_group], estimator, lengths=lengths)[0] == [0.0] * size, (
            reward
        )


@pytest.mark.parametrize("estimator", COMPARING)
def test_a_group_of_equal_rewards_has_an_advantage_only_where_their_parts_are_compared(estimator):
    [values] = completion_advantages([[1.0] * 4], estimator, parts=PARTS)
    assert any(values) == (estimator not in GROUP_ESTIMATORS)


@pytest.mark.parametrize("reward", [0.1, 0.9, 12345.678])
def test_a_batch_of_equal_rewards_has_exactly_zero_advantage_without_group_comparison(reward):
    assert completion_advantages([[reward] * 7] * 3, "reinforce_plus_plus") == [[0.0] * 7] * 3
    assert completion_advantages([[reward] * 7] * 3, "remax", baselines=[reward] * 3) == [[0.0] * 7] * 3


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unscored_completions_are_excluded_from_statistics_and_get_zero(estimator):
    lengths, rewards = [[2, 3, 4, 5], [1, 2, 3, 4]], [[1.0, 2.0, 99.0, 3.0], [0.0, 1.0, -99.0, 1.0]]
    valid = [[True, True, False, True]] * 2
    with_unscored = completion_advantages(rewards, estimator, valid=valid, lengths=lengths)
    keep = [0, 1, 3]
    without = completion_advantages(
        [[row[i] for i in keep] for row in rewards], estimator, lengths=[[row[i] for i in keep] for row in lengths]
    )
    assert [[row[i] for i in keep] for row in with_unscored] == close(*without)
    assert [row[2] for row in with_unscored] == [0.0, 0.0]


@pytest.mark.parametrize("valid", [[False] * 4, [True, False, False, False]])
@pytest.mark.parametrize("estimator", COMPARING)
def test_a_group_with_nothing_to_compare_has_zero_advantage(valid, estimator):
    assert completion_advantages([[1.0, 2.0, 3.0, 4.0]], estimator, valid=[valid]) == [[0.0] * 4]


@pytest.mark.parametrize("estimator", COMPARING)
def test_a_group_of_one_is_rejected(estimator):
    with pytest.raises(ValueError, match="at least 2"):
        completion_advantages([[1.0], [2.0]], estimator)
    for other in SINGLE_COMPLETION_ESTIMATORS:
        assert len(completion_advantages([[1.0], [2.0]], other)) == 2


# -- invariants ------------------------------------------------------------------------------------


def some_rewards(num_groups, size):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_groups, size, generator=generator), torch.randint(
        1, 9, (num_groups, size), generator=generator
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_order_of_groups_and_completion_advantages_does_not_matter(estimator):
    rewards, lengths = some_rewards(5, 4)
    groups, members = torch.tensor([3, 0, 4, 2, 1]), torch.tensor([2, 3, 0, 1])

    def run(rewards, lengths):
        parts = {"a": rewards.tolist(), "b": (rewards * lengths).tolist()}
        return torch.tensor(completion_advantages(rewards.tolist(), estimator, lengths=lengths.tolist(), parts=parts))

    original = run(rewards, lengths)
    permuted = run(rewards[groups][:, members], lengths[groups][:, members])
    torch.testing.assert_close(permuted, original[groups][:, members], rtol=1e-4, atol=1e-5)
    assert original.abs().max() > 0.1


def test_half_precision_rewards_are_compared_in_float32():
    rewards = torch.tensor([[1.0, 1.001, 0.999, 1.0]]).bfloat16()
    assert group_relative(rewards, torch.ones(1, 4, dtype=torch.bool)).dtype == torch.float32
