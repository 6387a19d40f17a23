"""The config of the loss in updates of the local train engine."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from support.engines import (
    FULL_KL,
    KL,
    ONE_ROW,
    make_engine,
    make_rollouts,
    to_train,
    weights_of,
    with_loss,
)
from support.tensors import flatten, max_relative_error
from trigon.config.names import PolicyLossType, SampledKlEstimator
from trigon.metrics import values
from trigon.types import TrainGroup


def test_without_old_logprobs_the_ratio_is_exactly_one_and_old_logprobs_give_the_same_update(tiny_vlm):
    rollouts = make_rollouts(tiny_vlm)
    engine = make_engine(tiny_vlm)
    metrics = values(engine.step(to_train(rollouts)))
    assert metrics["actor/ratio_max"] == 1.0
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac_higher"] == metrics["actor/pg_clipfrac_lower"] == 0.0
    assert metrics["mismatch/logprobs_diff_mean"] > 0

    other = make_engine(tiny_vlm)
    with_old = values(other.step(to_train(rollouts, old=other.logprobs(rollouts))))
    assert with_old["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert max_relative_error(weights_of(other), weights_of(engine)) < 1e-6
    # In both cases the mismatch is between the sampling log-probabilities and those before the
    # update.
    assert with_old["mismatch/logprobs_diff_mean"] == pytest.approx(metrics["mismatch/logprobs_diff_mean"], rel=1e-5)


OFF_POLICY = {
    "default, seq": with_loss(loss_avg_mode="seq"),
    "default, seq_fixed": with_loss(loss_avg_mode="seq_fixed"),
    **{name: with_loss(loss_type=name) for name in get_args(PolicyLossType)},
    "gspo": with_loss(loss_type="gspo", loss_avg_mode="seq"),
    "entropy": with_loss(entropy_coeff=0.1),
    "truncate": with_loss(mismatch_correction="truncate", mismatch_level="token", mismatch_low=0.5, mismatch_high=2.0),
    "mask": with_loss(mismatch_correction="mask", mismatch_level="sequence", mismatch_low=0.5, mismatch_high=2.0),
    "reject": with_loss(mismatch_correction="reject", mismatch_level="token", mismatch_low=0.2, mismatch_high=5.0),
    **{name: with_loss(use_kl_loss=True, kl_penalty=name, kl_coef=0.3) for name in get_args(SampledKlEstimator)},
    "full": FULL_KL,
}


@pytest.mark.extended(but=["gspo"])
@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in OFF_POLICY.items()])
def test_with_every_loss_neither_the_token_budget_nor_the_order_of_groups_changes_the_update(tiny_model, config):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    drift = torch.Generator().manual_seed(3)
    logprobs = make_engine(folder).logprobs(rollouts)
    old = [[tokens + 0.4 * torch.randn(len(tokens), generator=drift) for tokens in row] for row in logprobs]
    ref = [[tokens + 0.4 * torch.randn(len(tokens), generator=drift) for tokens in row] for row in logprobs]
    groups = to_train(rollouts, old=old, ref=ref, masked=[(0, 1), (2, 2)])
    other = tiny_model("qwen2", seed=1) if config is FULL_KL else None

    def updated(groups: list[TrainGroup], max_tokens: int) -> tuple[dict[str, float], dict[str, Tensor]]:
        engine = make_engine(folder, config=config, max_tokens=max_tokens, compared_with=other)
        return values(engine.step(groups)), weights_of(engine)

    metrics, weights = updated(groups, ONE_ROW)
    assert metrics["actor/grad_norm"] > 0.01
    for order, max_tokens in ((groups, 45), (groups, 1), (groups[::-1], 45)):
        split_metrics, split_weights = updated(order, max_tokens)
        assert split_metrics["actor/micro_batches"] > metrics["actor/micro_batches"]
        error = (flatten(split_weights) - flatten(weights)).norm() / flatten(weights).norm()
        assert error < 2e-5
        for key in metrics.keys() - {"actor/micro_batches", "actor/packed_tokens", "actor/packing_fill"}:
            assert split_metrics[key] == pytest.approx(metrics[key], rel=2e-4, abs=1e-6), key


@pytest.mark.parametrize(
    ("averaging", "loss"),
    [
        ("token", -(14 * 1.0 - 12 * 0.75 + 7 * 0.25) / 33),
        ("seq", -(1.0 - 0.75 + 0.25) / 3),
        ("seq_fixed", -(14 * 1.0 - 12 * 0.75 + 7 * 0.25) / 16 / 9),  # 16 tokens, 9 completions
    ],
)
def test_averaging_by_hand(tiny_model, averaging, loss):
    # At a ratio of 1 the loss of a token is -A. Completions of 3, 7, 1 | 5, 2, 4 | 6, 3, 2 tokens
    # have the advantages 1, -0.75, 0.25.
    folder = tiny_model("qwen2")
    engine = make_engine(folder, config=with_loss(loss_avg_mode=averaging))
    metrics = values(engine.step(to_train(make_rollouts(folder))))
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-6)


def test_a_second_update_on_the_same_completions_is_off_policy_and_clipped(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine = make_engine(folder, config=with_loss(clip_ratio_low=0.0, clip_ratio_high=0.0))
    groups = to_train(rollouts, old=engine.logprobs(rollouts))
    engine.step(groups)
    second = values(engine.step(groups))
    assert second["actor/ratio_max"] > 1.0
    assert second["actor/ppo_kl"] != 0.0
    assert 0.5 < second["actor/pg_clipfrac_higher"] <= 1.0, "the first update moved the ratios"


def test_an_entropy_bonus_raises_the_entropy(tiny_model):
    folder = tiny_model("qwen2")
    groups = to_train(make_rollouts(folder), advantages=(0.0, 0.0, 0.0))
    engine = make_engine(folder, config=with_loss(entropy_coeff=1.0))
    entropies = [values(engine.step(groups))["actor/entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]


def test_a_rejected_completion_has_no_gradient(tiny_model):
    folder = tiny_model("qwen2")
    rejecting = with_loss(
        mismatch_correction="reject", mismatch_level="token", mismatch_low=1.0, mismatch_high=1.0
    )  # the sampling log-probabilities are all -6.5
    metrics = values(make_engine(folder, config=rejecting).step(to_train(make_rollouts(folder))))
    assert metrics["mismatch/corrected_fraction"] == 1.0
    assert metrics["actor/grad_norm"] == 0.0


def test_the_kl_from_the_policy_itself_is_zero_and_does_not_change_the_update(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine, plain = make_engine(folder, config=KL), make_engine(folder)
    metrics = values(engine.step(to_train(rollouts, ref=engine.logprobs(rollouts))))
    plain.step(to_train(rollouts))
    assert metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert max_relative_error(weights_of(engine), weights_of(plain)) < 1e-6


@pytest.mark.parametrize("config", [KL, FULL_KL], ids=["low_var_kl", "full"])
def test_the_kl_from_another_policy_falls_when_it_is_trained_on(tiny_model, config):
    folder, other = tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    rollouts = make_rollouts(folder)
    is_full = config is FULL_KL
    engine = make_engine(folder, config=with_loss(config, kl_coef=1.0), compared_with=other if is_full else None)
    ref = None if is_full else make_engine(other).logprobs(rollouts)
    groups = to_train(rollouts, ref=ref, advantages=(0.0, 0.0, 0.0))
    full = torch.cat([tokens for row in engine.full_kl(rollouts) for tokens in row]).mean() if is_full else None
    distances = [values(engine.step(groups))["actor/kl_loss"] for _ in range(4)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > distances[-1] > 0
    if full is not None:
        assert distances[0] == pytest.approx(float(full), rel=1e-5)


def test_the_kl_metric_is_without_its_coefficient(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine = make_engine(folder, config=with_loss(use_kl_loss=True, kl_penalty="kl", kl_coef=0.001))
    ref = [[logprobs - 0.5 for logprobs in group] for group in engine.logprobs(rollouts)]
    metrics = values(engine.step(to_train(rollouts, ref=ref)))
    assert metrics["actor/kl_loss"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(-(14 * 1.0 - 12 * 0.75 + 7 * 0.25) / 33, abs=1e-6)


def test_the_full_kl_of_new_adapters_is_zero(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine = make_engine(folder, config=FULL_KL, lora_rank=2)
    assert max(float(tokens.abs().max()) for row in engine.full_kl(rollouts) for tokens in row) < 1e-6
    engine.step(to_train(rollouts))
    assert min(float(tokens.max()) for row in engine.full_kl(rollouts) for tokens in row) > 1e-7
