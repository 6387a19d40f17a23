"""The train engine of one process, on tiny genuine models: what an update is, and what may not change it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.engines import (
    CLIPPED,
    FULL_KL_TERMS,
    KL_TERMS,
    ONE_ROW,
    TERMS,
    make_engine,
    make_rollouts,
    tensors_in,
    to_train,
    weights_of,
)
from trigon.algorithms.importance import Correction
from trigon.errors import CheckpointError, ModelError
from trigon.metrics import values
from trigon.models.load import load_processors
from trigon.models.lora import merge_names, merged_weight
from trigon.types import TrainGroup

FAMILIES = ["qwen2", "qwen2_5_vl"]


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []


def in_a_row(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def largest_relative_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours)


# -- what an update is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("averaging", ["token", "seq"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_token_budget_does_not_change_the_update(tiny_model, tmp_path, model_type, averaging):
    folder = tiny_model(model_type)
    groups = to_train(make_rollouts(folder), masked=[(0, 1), (2, 2)])

    def updated(max_tokens: int) -> tuple[dict[str, float], Tensor, dict[str, Tensor]]:
        """Return figures, all weights in a row, and the gradients (a tenth of them: the first moments)."""
        engine = make_engine(folder, terms=replace(TERMS, averaging=averaging), max_tokens=max_tokens)
        figures = values(engine.step(groups))
        engine.save_state(tmp_path, model_only=False)()
        states = tensors_in(tmp_path / "optimizer")
        gradients = {name: state for name, state in states.items() if name.endswith("/exp_avg")}
        return figures, in_a_row(weights_of(engine)), gradients

    figures, weights, gradients = updated(ONE_ROW)
    assert figures["actor/micro_batches"] == 1
    assert (weights - in_a_row(weights_of(make_engine(folder)))).norm() > 1e-3 * weights.norm()
    for max_tokens, at_least in ((45, 2), (1, 9)):
        split_figures, split_weights, split_gradients = updated(max_tokens)
        assert split_figures.pop("actor/micro_batches") >= at_least
        assert split_figures.pop("actor/packed_tokens") > figures["actor/packed_tokens"] or at_least == 2
        split_figures.pop("actor/packing_fill")
        # AdamW's first update divides each gradient by its own size, so that rounding shows where one is nearly 0.
        assert (split_weights - weights).norm() < 1e-5 * weights.norm()
        assert largest_relative_error(split_gradients, gradients) < 1e-5
        for key, figure in split_figures.items():
            assert figure == pytest.approx(figures[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("model_type", FAMILIES)
def test_without_old_logprobs_the_ratio_is_exactly_one_and_the_engines_own_give_the_same_update(tiny_model, model_type):
    folder = tiny_model(model_type)
    rollouts = make_rollouts(folder)
    engine = make_engine(folder)
    metrics = values(engine.step(to_train(rollouts)))
    assert metrics["actor/ratio_max"] == 1.0
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac_higher"] == metrics["actor/pg_clipfrac_lower"] == 0.0
    assert metrics["mismatch/logprobs_diff_mean"] > 0

    other = make_engine(folder)
    with_old = values(other.step(to_train(rollouts, old=other.logprobs(rollouts))))
    assert with_old["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert largest_relative_error(weights_of(other), weights_of(engine)) < 1e-6
    # Either way the trainer's opinion before the update is compared with the engine's.
    assert with_old["mismatch/logprobs_diff_mean"] == pytest.approx(metrics["mismatch/logprobs_diff_mean"], rel=1e-5)


OFF_POLICY = {
    "default, seq": replace(TERMS, averaging="seq"),
    "default, seq_fixed": replace(TERMS, averaging="seq_fixed"),
    "gspo": replace(TERMS, policy=replace(CLIPPED, kind="gspo"), averaging="seq"),
    "gspo_token": replace(TERMS, policy=replace(CLIPPED, kind="gspo_token")),
    "cispo": replace(TERMS, policy=replace(CLIPPED, kind="cispo")),
    "sapo": replace(TERMS, policy=replace(CLIPPED, kind="sapo")),
    "entropy": replace(TERMS, entropy_coefficient=0.1),
    "truncate": replace(TERMS, correction=Correction("truncate", "token", 0.5, 2.0)),
    "mask": replace(TERMS, correction=Correction("mask", "sequence", 0.5, 2.0)),
    "reject": replace(TERMS, correction=Correction("reject", "token", 0.2, 5.0)),
    "k1": replace(TERMS, kl_estimator="kl", kl_coefficient=0.3),
    "abs": replace(TERMS, kl_estimator="abs", kl_coefficient=0.3),
    "k2": replace(TERMS, kl_estimator="mse", kl_coefficient=0.3),
    "k3": replace(TERMS, kl_estimator="low_var_kl", kl_coefficient=0.3),
    "full": FULL_KL_TERMS,
}


@pytest.mark.parametrize("terms", [pytest.param(terms, id=name) for name, terms in OFF_POLICY.items()])
def test_whatever_the_loss_neither_the_token_budget_nor_the_order_of_groups_changes_the_update(tiny_model, terms):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    drift = torch.Generator().manual_seed(3)
    said = make_engine(folder).logprobs(rollouts)
    old = [[tokens + 0.4 * torch.randn(len(tokens), generator=drift) for tokens in row] for row in said]
    ref = [[tokens + 0.4 * torch.randn(len(tokens), generator=drift) for tokens in row] for row in said]
    groups = to_train(rollouts, old=old, ref=ref, masked=[(0, 1), (2, 2)])
    other = tiny_model("qwen2", seed=1) if terms.kl_estimator == "full" else None

    def updated(groups: list[TrainGroup], max_tokens: int) -> tuple[dict[str, float], dict[str, Tensor]]:
        engine = make_engine(folder, terms=terms, max_tokens=max_tokens, compared_with=other)
        return values(engine.step(groups)), weights_of(engine)

    figures, weights = updated(groups, ONE_ROW)
    assert figures["actor/grad_norm"] > 0.01
    for order, max_tokens in ((groups, 45), (groups, 1), (groups[::-1], 45)):
        split_figures, split_weights = updated(order, max_tokens)
        assert split_figures["actor/micro_batches"] > figures["actor/micro_batches"]
        error = (in_a_row(split_weights) - in_a_row(weights)).norm() / in_a_row(weights).norm()
        assert error < 2e-5
        for key in figures.keys() - {"actor/micro_batches", "actor/packed_tokens", "actor/packing_fill"}:
            assert split_figures[key] == pytest.approx(figures[key], rel=2e-4, abs=1e-6), key


def test_fixed_length_averaging_by_hand(tiny_model):
    # As below, with sums of answers divided by 16 tokens and 9 answers.
    folder = tiny_model("qwen2")
    metrics = values(
        make_engine(folder, terms=replace(TERMS, averaging="seq_fixed")).step(to_train(make_rollouts(folder)))
    )
    assert metrics["actor/pg_loss"] == pytest.approx(-(14 * 1.0 - 12 * 0.75 + 7 * 0.25) / 16 / 9, abs=1e-6)


def test_how_full_rows_are_by_hand(tiny_model):
    folder = tiny_model("qwen2")
    groups = to_train(make_rollouts(folder))
    tokens = sum(len(group.prompt.token_ids) + sum(len(part.token_ids) for part in group.sequences) for group in groups)
    assert values(make_engine(folder, max_tokens=100).step(groups))["actor/packing_fill"] == tokens / 100
    engine = make_engine(folder, max_tokens=45)
    metrics = values(engine.step(groups))
    assert metrics["actor/packing_fill"] == tokens / (45 * metrics["actor/micro_batches"])


def test_an_entropy_bonus_makes_answers_more_varied(tiny_model):
    folder = tiny_model("qwen2")
    groups = to_train(make_rollouts(folder), advantages=(0.0, 0.0, 0.0))
    engine = make_engine(folder, terms=replace(TERMS, entropy_coefficient=1.0))
    entropies = [values(engine.step(groups))["actor/entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]


def test_a_rejected_answer_does_not_train(tiny_model):
    # The engine is said to have given every token exp(-6.5); what the model says lies within [low, high] of it or not.
    folder = tiny_model("qwen2")
    engine = make_engine(folder, terms=replace(TERMS, correction=Correction("reject", "sequence", 0.0, 1e-6 + 1)))
    before = weights_of(engine)
    metrics = values(engine.step(to_train(make_rollouts(folder))))
    share = metrics["mismatch/corrected_fraction"]
    none = make_engine(folder, terms=replace(TERMS, correction=Correction("reject", "token", 1.0, 1.0)))
    untouched = values(none.step(to_train(make_rollouts(folder))))
    assert untouched["mismatch/corrected_fraction"] == 1.0
    assert untouched["actor/grad_norm"] == 0.0
    assert 0.0 < share < 1.0
    assert metrics["actor/grad_norm"] > 0
    assert largest_relative_error(weights_of(engine), before) > 0


def test_the_full_kl_pulls_towards_the_reference(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine = make_engine(
        folder, terms=replace(FULL_KL_TERMS, kl_coefficient=1.0), compared_with=tiny_model("qwen2", seed=1)
    )
    groups = to_train(rollouts, advantages=(0.0, 0.0, 0.0))
    before = engine.full_kl(rollouts)
    distances = [values(engine.step(groups))["actor/kl_loss"] for _ in range(4)]
    assert distances[0] == pytest.approx(float(torch.cat([t for row in before for t in row]).mean()), rel=1e-5)
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > distances[-1] > 0


def test_the_full_kl_of_fresh_adapters_is_zero(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine = make_engine(folder, terms=FULL_KL_TERMS, lora_rank=2)
    assert max(float(tokens.abs().max()) for row in engine.full_kl(rollouts) for tokens in row) < 1e-6
    engine.step(to_train(rollouts))
    assert min(float(tokens.max()) for row in engine.full_kl(rollouts) for tokens in row) > 1e-7


@pytest.mark.parametrize("with_gradient", [(0, 2), (2,), (1,), ()])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_groups_without_an_advantage_cost_nothing_and_change_nothing(tiny_model, model_type, with_gradient):
    folder = tiny_model(model_type)
    rollouts = make_rollouts(folder)
    first = to_train(rollouts)  # so that the optimizer has moments, by which it moves on without a gradient
    nothing = to_train(rollouts, advantages=(0.0, 0.0, 0.0))
    second = [group if number in with_gradient else nothing[number] for number, group in enumerate(to_train(rollouts))]

    skipping, thorough = make_engine(folder), make_engine(folder, terms=replace(KL_TERMS, kl_coefficient=0.0))
    ref = thorough.logprobs(rollouts)
    skipping.step(first)
    thorough.step([with_ref(group, tokens) for group, tokens in zip(first, ref, strict=True)])
    left_out = values(skipping.step(second))
    metrics = values(thorough.step([with_ref(group, tokens) for group, tokens in zip(second, ref, strict=True)]))

    assert left_out["actor/skipped_groups"] == 3 - len(with_gradient)
    assert metrics["actor/skipped_groups"] == 0
    assert left_out["actor/packed_tokens"] < metrics["actor/packed_tokens"]
    for key in ("actor/pg_loss", "actor/grad_norm", "actor/lr"):
        assert left_out[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-7), key
    assert (in_a_row(weights_of(skipping)) - in_a_row(weights_of(thorough))).norm() < 1e-5 * in_a_row(
        weights_of(thorough)
    ).norm()


def with_ref(group: TrainGroup, ref: list[Tensor]) -> TrainGroup:
    sequences = tuple(replace(part, ref_logprobs=tokens) for part, tokens in zip(group.sequences, ref, strict=True))
    return replace(group, sequences=sequences)


def test_token_and_seq_averaging_by_hand(tiny_model):
    # At a ratio of 1 a token's loss is -A. Answers of 3, 7, 1 | 5, 2, 4 | 6, 3, 2 tokens, advantages 1, -0.75, 0.25.
    folder = tiny_model("qwen2")
    groups = to_train(make_rollouts(folder))
    by_token = values(make_engine(folder).step(groups))["actor/pg_loss"]
    assert by_token == pytest.approx(-(14 * 1.0 - 12 * 0.75 + 7 * 0.25) / 33, abs=1e-6)
    by_sequence = values(make_engine(folder, terms=replace(TERMS, averaging="seq")).step(groups))["actor/pg_loss"]
    assert by_sequence == pytest.approx(-(1.0 - 0.75 + 0.25) / 3, abs=1e-6)


def test_what_is_masked_neither_trains_nor_counts(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine, other = make_engine(folder), make_engine(folder)
    metrics = values(engine.step(to_train(rollouts, masked=[(0, 0), (1, 0), (2, 0)])))
    assert metrics["actor/pg_loss"] == pytest.approx(-(-12 * 0.75 + 7 * 0.25) / 19, abs=1e-6)
    other.step(to_train(rollouts, masked=[(0, 0), (1, 0), (2, 0)], advantages=(1e30, -0.75, 0.25)))
    assert_same(weights_of(engine), weights_of(other))


def test_what_is_masked_does_not_count_even_where_it_is_not_finite(tiny_model):
    folder = tiny_model("qwen2")
    masked = [(0, 0), (1, 0), (2, 0)]
    metrics = make_engine(folder).step(
        to_train(make_rollouts(folder), masked=masked, advantages=(float("inf"), -0.75, 0.25))
    )
    assert metrics["actor/skipped_updates"].value == 0.0


def test_a_second_update_on_the_same_answers_is_off_policy_and_clipped(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine = make_engine(folder, terms=replace(TERMS, policy=replace(CLIPPED, clip_low=0.0, clip_high=0.0)))
    groups = to_train(rollouts, old=engine.logprobs(rollouts))
    engine.step(groups)
    second = values(engine.step(groups))
    assert second["actor/ratio_max"] > 1.0
    assert second["actor/ppo_kl"] != 0.0
    assert 0.5 < second["actor/pg_clipfrac_higher"] <= 1.0, "the first update took the answers where they should go"


def test_the_learning_rate_warms_up_by_updates(tiny_model):
    folder = tiny_model("qwen2")
    engine = make_engine(folder, warmup_updates=4)
    groups = to_train(make_rollouts(folder))
    rates = [values(engine.step(groups))["actor/lr"] for _ in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["all", "lora"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_gradient_checkpointing_gives_the_same_update(tiny_model, model_type, lora_rank):
    folder = tiny_model(model_type)
    groups = to_train(make_rollouts(folder))
    kept = make_engine(folder, lora_rank=lora_rank)
    recomputed = make_engine(folder, lora_rank=lora_rank, checkpointing=True)
    assert values(kept.step(groups)) == values(recomputed.step(groups))
    assert_same(weights_of(kept), weights_of(recomputed))


# -- KL in the loss -----------------------------------------------------------------------------------------------


def test_a_kl_in_the_loss_needs_the_reference(tiny_model):
    folder = tiny_model("qwen2")
    with pytest.raises(AssertionError, match="reference"):
        make_engine(folder, terms=KL_TERMS).step(to_train(make_rollouts(folder)))


def test_a_kl_to_the_policy_itself_is_zero_and_does_not_pull(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine, plain = make_engine(folder, terms=KL_TERMS), make_engine(folder)
    metrics = values(engine.step(to_train(rollouts, ref=engine.logprobs(rollouts))))
    plain.step(to_train(rollouts))
    assert metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert largest_relative_error(weights_of(engine), weights_of(plain)) < 1e-6


def test_a_kl_to_another_policy_pulls_towards_it(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine = make_engine(folder, terms=replace(KL_TERMS, kl_coefficient=1.0))
    ref = make_engine(tiny_model("qwen2", seed=1)).logprobs(rollouts)
    groups = to_train(rollouts, ref=ref, advantages=(0.0, 0.0, 0.0))
    distances = [values(engine.step(groups))["actor/kl_loss"] for _ in range(4)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > distances[-1] > 0


def test_the_kl_is_told_before_its_coefficient(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine = make_engine(folder, terms=replace(TERMS, kl_estimator="kl", kl_coefficient=0.001))
    ref = [[logprobs - 0.5 for logprobs in group] for group in engine.logprobs(rollouts)]
    metrics = values(engine.step(to_train(rollouts, ref=ref)))
    assert metrics["actor/kl_loss"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(-(14 * 1.0 - 12 * 0.75 + 7 * 0.25) / 33, abs=1e-6)


def test_an_update_with_nothing_to_learn_from_moves_nothing(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine = make_engine(folder)
    engine.step(to_train(rollouts))  # so that there are moments, by which the optimizer would move on
    before = weights_of(engine)
    everything = [(g, i) for g in range(3) for i in range(3)]
    metrics = values(engine.step(to_train(rollouts, masked=everything)))
    assert metrics["actor/skipped_updates"] == 1
    assert_same(weights_of(engine), before)


# -- gradients that are not finite --------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_skips_the_update_and_leaves_no_trace(tiny_model, broken):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine, healthy = make_engine(folder, warmup_updates=4), make_engine(folder, warmup_updates=4)
    start = weights_of(engine)

    metrics = engine.step(to_train(rollouts, advantages=(broken, -0.75, 0.25)))
    assert metrics["actor/skipped_updates"].value == 1.0
    assert metrics["actor/grad_norm"].count == 0.0
    assert_same(weights_of(engine), start)

    after = values(engine.step(to_train(rollouts)))
    assert after["actor/skipped_updates"] == 0.0
    assert after == values(healthy.step(to_train(rollouts)))
    assert_same(weights_of(engine), weights_of(healthy))
    assert largest_relative_error(weights_of(engine), start) > 1e-5


# -- frozen parts, memory -----------------------------------------------------------------------------------------


def test_a_frozen_vision_tower_does_not_move_and_has_no_optimizer_state(tiny_vlm, tmp_path):
    engine = make_engine(tiny_vlm, freeze=True)
    start = weights_of(engine)
    engine.step(to_train(make_rollouts(tiny_vlm)))
    engine.save_state(tmp_path, model_only=False)()
    moved = {name for name, weight in weights_of(engine).items() if not torch.equal(weight, start[name])}
    frozen = {name for name in start if "visual" in name}
    assert frozen
    assert moved == start.keys() - frozen
    assert not any("visual" in name for name in tensors_in(tmp_path / "optimizer"))
    sizes = engine.sizes()
    assert sizes.parameters - sizes.trainable == sum(start[name].numel() for name in frozen)


def test_a_trained_vision_tower_moves(tiny_vlm):
    engine = make_engine(tiny_vlm)
    start = weights_of(engine)
    engine.step(to_train(make_rollouts(tiny_vlm)))
    assert [name for name, weight in weights_of(engine).items() if torch.equal(weight, start[name])] == []


@pytest.mark.parametrize(
    ("strategy", "dtype", "bytes_each"),
    [
        ("adamw", torch.float32, (4, 4, 8)),
        ("adamw_bf16", torch.bfloat16, (2, 2, 8)),
        ("adamw", torch.bfloat16, (2, 2, 4)),
    ],
    ids=["adamw fp32", "adamw_bf16", "adamw bf16"],
)
@pytest.mark.parametrize("freeze", [False, True], ids=["all", "frozen tower"])
def test_the_announced_memory_is_what_a_real_update_takes(tiny_vlm, tmp_path, strategy, dtype, bytes_each, freeze):
    engine = make_engine(tiny_vlm, strategy=strategy, dtype=dtype, freeze=freeze)
    before = engine.sizes()
    engine.step(to_train(make_rollouts(tiny_vlm)))
    engine.save_state(tmp_path, model_only=False)()
    assert engine.sizes() == before

    weights = tensors_in(tmp_path / "weights").values()
    states = [t for name, t in tensors_in(tmp_path / "optimizer").items() if not name.endswith("/step")]
    trainable = before.trainable
    assert before.parameters == sum(tensor.numel() for tensor in weights)
    assert before.weight_bytes == sum(tensor.nbytes for tensor in weights)
    assert before.weight_bytes == bytes_each[0] * before.parameters
    assert before.gradient_bytes == bytes_each[1] * trainable
    assert sum(tensor.nbytes for tensor in states) == bytes_each[2] * trainable
    assert before.optimizer_bytes == sum(tensor.nbytes for tensor in states)


# -- saving and going on ------------------------------------------------------------------------------------------

STRATEGIES = pytest.mark.parametrize(
    ("strategy", "dtype"), [("adamw", torch.float32), ("adamw_bf16", torch.bfloat16)], ids=["adamw", "adamw_bf16"]
)


@STRATEGIES
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_restored_engine_goes_on_bit_for_bit(tiny_model, tmp_path, model_type, strategy, dtype):
    folder = tiny_model(model_type)
    options = {"strategy": strategy, "dtype": dtype, "warmup_updates": 5}
    batches = [to_train(make_rollouts(folder, seed=seed)) for seed in (0, 20, 40)]
    engine = make_engine(folder, **options)
    for batch in batches[:2]:
        engine.step(batch)
    engine.save_state(tmp_path, model_only=False)()
    saved = weights_of(engine)

    other = make_engine(tiny_model(model_type, seed=1), **options)
    other.load_state(tmp_path)
    assert_same(weights_of(other), saved)
    (tmp_path / "again").mkdir()
    other.save_state(tmp_path / "again", model_only=False)()
    for part in ("weights", "optimizer"):
        assert_same(tensors_in(tmp_path / "again" / part), tensors_in(tmp_path / part))

    assert values(engine.step(batches[2])) == values(other.step(batches[2]))
    assert_same(weights_of(other), weights_of(engine))
    assert largest_relative_error(weights_of(engine), saved) > 0


def test_an_engine_that_made_no_update_yet_can_be_saved_and_restored(tiny_model, tmp_path):
    folder = tiny_model("qwen2")
    make_engine(folder).save_state(tmp_path, model_only=False)()
    engine, fresh = make_engine(tiny_model("qwen2", seed=1)), make_engine(folder)
    engine.load_state(tmp_path)
    groups = to_train(make_rollouts(folder))
    assert values(engine.step(groups)) == values(fresh.step(groups))
    assert_same(weights_of(engine), weights_of(fresh))


def test_a_tower_that_saw_no_image_yet_is_restored_without_state(tiny_vlm, tmp_path):
    engine, other = make_engine(tiny_vlm), make_engine(tiny_vlm)
    engine.step(to_train(make_rollouts(tiny_vlm, images=False)))
    engine.save_state(tmp_path, model_only=False)()
    other.load_state(tmp_path)
    groups = to_train(make_rollouts(tiny_vlm))
    assert values(engine.step(groups)) == values(other.step(groups))
    assert_same(weights_of(engine), weights_of(other))


def test_loading_forgets_what_the_optimizer_held_before(tiny_vlm, tmp_path):
    engine, other = make_engine(tiny_vlm), make_engine(tiny_vlm)
    engine.step(to_train(make_rollouts(tiny_vlm, images=False)))
    engine.save_state(tmp_path, model_only=False)()
    other.step(to_train(make_rollouts(tiny_vlm)))  # the tower has a state now, which the checkpoint has not
    other.load_state(tmp_path)
    (tmp_path / "again").mkdir()
    other.save_state(tmp_path / "again", model_only=False)()
    assert_same(tensors_in(tmp_path / "again" / "optimizer"), tensors_in(tmp_path / "optimizer"))


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["all", "lora"])
def test_what_is_written_is_the_engine_as_it_was_when_it_was_to_be_saved(tiny_model, tmp_path, lora_rank):
    folder = tiny_model("qwen2")
    engine, other = make_engine(folder, lora_rank=lora_rank), make_engine(folder, lora_rank=lora_rank)
    groups = to_train(make_rollouts(folder))
    engine.step(groups)
    then = weights_of(engine)
    write = engine.save_state(tmp_path, model_only=False)
    assert list(tmp_path.iterdir()) == []
    second = values(engine.step(groups))
    write()
    assert json.loads((tmp_path / "state.json").read_text()) == {"updates": 1, "strategy": "adamw"}
    other.load_state(tmp_path)
    assert_same(weights_of(other), then)
    assert values(other.step(groups)) == second
    assert_same(weights_of(other), weights_of(engine))


@pytest.fixture
def saved(tiny_model, tmp_path):
    """Return the state of a tiny engine after an update: all weights, the optimizer's and its own."""
    engine = make_engine(tiny_model("qwen2"))
    engine.step(to_train(make_rollouts(tiny_model("qwen2"))))
    engine.save_state(tmp_path, model_only=False)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["optimizer", "state.json", "weights"]
    return tmp_path


def change(folder: Path, edit) -> None:
    [file] = folder.iterdir()
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def without(key_end: str):
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[next(key for key in tensors if key.endswith(key_end))]

    return edit


def left_over(name: str):
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.zeros(3)

    return edit


def misshapen(key_end: str):
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[next(key for key in tensors if key.endswith(key_end))] = torch.zeros(3)

    return edit


def other_dtype(key_end: str):
    def edit(tensors: dict[str, Tensor]) -> None:
        key = next(key for key in tensors if key.endswith(key_end))
        tensors[key] = tensors[key].double()

    return edit


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (without("q_proj.weight"), r"missing \[.*q_proj\.weight"),
        (left_over("model.extra.weight"), r"unknown \[.*model\.extra\.weight"),
        (misshapen("q_proj.weight"), r"q_proj\.weight .*\[3\] instead of .*\[128, 128\]"),
    ],
    ids=["missing", "left over", "misshapen"],
)
def test_weights_of_another_model_are_refused_with_nothing_changed(tiny_model, saved, edit, complaint):
    change(saved / "weights", edit)
    engine = make_engine(tiny_model("qwen2", seed=1))
    before = weights_of(engine)
    with pytest.raises(CheckpointError, match=complaint):
        engine.load_state(saved)
    assert_same(weights_of(engine), before)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (without("q_proj.weight/exp_avg"), "missing.*q_proj.weight/exp_avg"),
        (left_over("model.extra.weight/exp_avg"), "unknown.*model.extra.weight"),
        (misshapen("q_proj.weight/exp_avg_sq"), "another shape.*q_proj.weight/exp_avg_sq"),
    ],
    ids=["missing", "left over", "misshapen"],
)
def test_an_optimizer_state_that_does_not_fit_is_refused(tiny_model, saved, edit, complaint):
    change(saved / "optimizer", edit)
    with pytest.raises(CheckpointError, match=complaint):
        make_engine(tiny_model("qwen2")).load_state(saved)


@pytest.mark.parametrize(
    ("part", "key_end"),
    [("weights", "q_proj.weight"), ("optimizer", "q_proj.weight/exp_avg")],
)
def test_a_tensor_of_another_dtype_is_refused(tiny_model, saved, part, key_end):
    change(saved / part, other_dtype(key_end))
    with pytest.raises(CheckpointError, match=r"q_proj.*float64.* instead of .*float32"):
        make_engine(tiny_model("qwen2")).load_state(saved)


def test_the_optimizer_state_of_a_tower_that_is_frozen_now_is_refused(tiny_vlm, tmp_path):
    engine = make_engine(tiny_vlm)
    engine.step(to_train(make_rollouts(tiny_vlm)))
    engine.save_state(tmp_path, model_only=False)()
    with pytest.raises(CheckpointError, match=r"unknown.*visual"):
        make_engine(tiny_vlm, freeze=True).load_state(tmp_path)


def test_another_strategy_is_refused(tiny_model, saved):
    with pytest.raises(CheckpointError, match=r"strategy=adamw, this run has adamw_bf16"):
        make_engine(tiny_model("qwen2"), strategy="adamw_bf16", dtype=torch.bfloat16).load_state(saved)


def test_a_checkpoint_of_weights_alone_is_refused(tiny_model, tmp_path):
    engine = make_engine(tiny_model("qwen2"))
    engine.save_state(tmp_path, model_only=True)()
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    with pytest.raises(CheckpointError, match=r"has no optimizer.*save_model_only"):
        engine.load_state(tmp_path)


# -- LoRA ---------------------------------------------------------------------------------------------------------


def learned_with_lora(folder, **options):
    """Return an engine with adapters of rank 2 after two updates."""
    engine = make_engine(folder, lora_rank=2, **options)
    for seed in (0, 20):
        engine.step(to_train(make_rollouts(folder, seed=seed)))
    return engine


@pytest.mark.parametrize("model_type", FAMILIES)
def test_with_lora_adapters_alone_are_saved_and_go_on_bit_for_bit(tiny_model, tmp_path, model_type):
    folder = tiny_model(model_type)
    engine, other = learned_with_lora(folder), make_engine(folder, lora_rank=2)
    engine.save_state(tmp_path, model_only=False)()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter",
        "adapter_config.json",
        "optimizer",
        "state.json",
    ]
    adapter, states = tensors_in(tmp_path / "adapter"), tensors_in(tmp_path / "optimizer")
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in adapter)
    assert all(".lora_A." in name or ".lora_B." in name for name in states)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)

    other.load_state(tmp_path)
    assert_same(weights_of(other), weights_of(engine))
    (tmp_path / "again").mkdir()
    other.save_state(tmp_path / "again", model_only=False)()
    assert_same(tensors_in(tmp_path / "again" / "adapter"), adapter)
    assert_same(tensors_in(tmp_path / "again" / "optimizer"), states)
    groups = to_train(make_rollouts(folder, seed=40))
    assert values(engine.step(groups)) == values(other.step(groups))
    assert_same(weights_of(other), weights_of(engine))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_with_lora_the_weights_below_the_adapters_never_move(tiny_model, tmp_path, model_type, dtype):
    folder = tiny_model(model_type)
    base = weights_of(make_engine(folder, dtype=dtype))
    assert_same(weights_of(make_engine(folder, dtype=dtype, lora_rank=2)), base)
    engine = learned_with_lora(folder, dtype=dtype)
    engine.save_state(tmp_path, model_only=True)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "adapter_config.json"]
    adapter = tensors_in(tmp_path / "adapter")
    expected = dict(base)
    for name, (lora_a, lora_b) in merge_names(adapter, load_processors(str(folder)).family).items():
        assert torch.count_nonzero(adapter[lora_b]) > 0
        expected[name] = merged_weight(base[name], adapter[lora_a], adapter[lora_b], scaling=2.0)
    assert_same(weights_of(engine), expected)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_with_lora_the_reference_scores_as_the_base_does_however_far_the_policy_has_gone(tiny_model, model_type):
    folder = tiny_model(model_type)
    rollouts = make_rollouts(folder)
    base = torch.cat([logprobs for group in make_engine(folder).logprobs(rollouts) for logprobs in group])
    engine = learned_with_lora(folder)
    reference = engine.reference_without_adapters()

    def said(by) -> Tensor:
        return torch.cat([logprobs for group in by.logprobs(rollouts) for logprobs in group])

    policy = said(engine)
    assert torch.equal(said(reference), base)
    assert torch.equal(said(engine), policy), "the adapters are on again"
    assert (policy - base).abs().max() > 1e-3
    engine.step(to_train(rollouts))
    assert torch.equal(said(reference), base)


def test_a_bfloat16_base_learns_by_float32_adapters(tiny_vlm, tmp_path):
    engine, exact = make_engine(tiny_vlm, dtype=torch.bfloat16, lora_rank=2), make_engine(tiny_vlm, lora_rank=2)
    groups = to_train(make_rollouts(tiny_vlm))
    for _ in range(2):
        metrics, expected = values(engine.step(groups)), values(exact.step(groups))
        assert metrics["actor/skipped_updates"] == 0.0
        assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.05)
        assert metrics["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=0.01)
    engine.save_state(tmp_path, model_only=False)()
    adapter, states = tensors_in(tmp_path / "adapter"), tensors_in(tmp_path / "optimizer")
    assert {tensor.dtype for tensor in (*adapter.values(), *states.values())} == {torch.float32}
    assert {weight.dtype for weight in weights_of(engine).values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_with_lora_the_announced_memory_is_what_a_real_update_takes(tiny_vlm, tmp_path, dtype):
    engine = make_engine(tiny_vlm, dtype=dtype, lora_rank=2)
    sizes = engine.sizes()
    engine.step(to_train(make_rollouts(tiny_vlm)))
    engine.save_state(tmp_path, model_only=False)()
    assert engine.sizes() == sizes
    base, adapter = weights_of(engine).values(), tensors_in(tmp_path / "adapter").values()
    states = [t for name, t in tensors_in(tmp_path / "optimizer").items() if not name.endswith("/step")]
    assert sizes.trainable == sum(tensor.numel() for tensor in adapter)
    assert sizes.parameters == sizes.trainable + sum(tensor.numel() for tensor in base)
    assert sizes.weight_bytes == sum(tensor.nbytes for tensor in (*base, *adapter))
    assert sizes.gradient_bytes == sum(tensor.nbytes for tensor in adapter)
    assert sizes.optimizer_bytes == sum(tensor.nbytes for tensor in states)


def test_a_checkpoint_of_adapters_is_for_a_run_with_the_same_and_one_without_for_one_without(
    tiny_model, saved, tmp_path
):
    folder = tiny_model("qwen2")
    with pytest.raises(CheckpointError, match=r"has no adapter.*LoRA"):
        make_engine(folder, lora_rank=2).load_state(saved)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    learned_with_lora(folder).save_state(adapters, model_only=False)()
    with pytest.raises(CheckpointError, match=r"has no weights.*LoRA"):
        make_engine(folder).load_state(adapters)
    with pytest.raises(CheckpointError, match=r"lora_A\.weight .*\[2, 128\] instead of .*\[4, 128\]"):
        make_engine(folder, lora_rank=4).load_state(adapters)


def test_without_lora_an_engine_is_not_its_own_reference(tiny_model):
    folder = tiny_model("qwen2")
    with pytest.raises(ModelError, match="no adapters"):
        make_engine(folder).reference_without_adapters().logprobs(make_rollouts(folder))
