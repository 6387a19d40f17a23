"""What an update of the local train engine does, and what must not change it.

test_training_losses.py has the terms of the loss.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.engines import KL, ONE_ROW, make_engine, make_rollouts, tensors_in, to_train, weights_of, with_loss
from support.models import processors_of
from support.oracle import make_video_prompt
from support.tensors import assert_equal_tensors, flatten, max_relative_error
from trigon.errors import DeviceMemoryError
from trigon.metrics import values
from trigon.models.load import load_model
from trigon.models.policy import Policy
from trigon.training.device_memory import Placement
from trigon.training.protocol import SKIPPED_GRAD_NORM
from trigon.training.scorer import LocalScorer
from trigon.types import TrainGroup


def test_the_token_budget_does_not_change_the_update(tiny_vlm, tmp_path):
    groups = to_train(make_rollouts(tiny_vlm), masked=[(0, 1), (2, 2)])

    def updated(max_tokens: int) -> tuple[dict[str, float], Tensor, dict[str, Tensor]]:
        """Return metrics, all weights in one vector, and first moments (gradients / 10)."""
        engine = make_engine(tiny_vlm, max_tokens=max_tokens)
        metrics = values(engine.step(groups))
        engine.save_state(tmp_path, model_only=False)()
        states = tensors_in(tmp_path / "optimizer")
        gradients = {name: state for name, state in states.items() if name.endswith("/exp_avg")}
        return metrics, flatten(weights_of(engine)), gradients

    metrics, weights, gradients = updated(ONE_ROW)
    assert metrics["actor/micro_batches"] == 1
    assert (weights - flatten(weights_of(make_engine(tiny_vlm)))).norm() > 1e-3 * weights.norm()
    for max_tokens, at_least in ((45, 2), (1, 9)):
        split_metrics, split_weights, split_gradients = updated(max_tokens)
        assert split_metrics.pop("actor/micro_batches") >= at_least
        assert split_metrics.pop("actor/packed_tokens") > metrics["actor/packed_tokens"] or at_least == 2
        split_metrics.pop("actor/packing_fill")
        # AdamW's first update divides each gradient by its magnitude, which amplifies rounding
        # errors near 0.
        assert (split_weights - weights).norm() < 1e-5 * weights.norm()
        assert max_relative_error(split_gradients, gradients) < 1e-5
        for key, value in split_metrics.items():
            assert value == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key


def test_packing_fill_by_hand(tiny_model):
    folder = tiny_model("qwen2")
    groups = to_train(make_rollouts(folder))
    tokens = sum(len(group.prompt.token_ids) + sum(len(part.token_ids) for part in group.sequences) for group in groups)
    assert values(make_engine(folder, max_tokens=100).step(groups))["actor/packing_fill"] == tokens / 100
    engine = make_engine(folder, max_tokens=45)
    metrics = values(engine.step(groups))
    assert metrics["actor/packing_fill"] == tokens / (45 * metrics["actor/micro_batches"])


@pytest.mark.extended(but=["with_gradient0"])
@pytest.mark.parametrize("with_gradient", [(0, 2), (2,), (1,), ()])
def test_groups_without_an_advantage_take_no_pass_and_do_not_change_the_update(tiny_vlm, with_gradient):
    rollouts = make_rollouts(tiny_vlm)
    first = to_train(rollouts)  # the moments of the optimizer then change weights even without a gradient
    nothing = to_train(rollouts, advantages=(0.0, 0.0, 0.0))
    second = [group if number in with_gradient else nothing[number] for number, group in enumerate(to_train(rollouts))]

    skipping, thorough = make_engine(tiny_vlm), make_engine(tiny_vlm, config=with_loss(KL, kl_coef=1e-30))
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
    assert (flatten(weights_of(skipping)) - flatten(weights_of(thorough))).norm() < 1e-5 * flatten(
        weights_of(thorough)
    ).norm()


def with_ref(group: TrainGroup, ref: list[Tensor]) -> TrainGroup:
    sequences = tuple(replace(part, ref_logprobs=tokens) for part, tokens in zip(group.sequences, ref, strict=True))
    return replace(group, sequences=sequences)


def test_the_positions_of_a_video_follow_override_config(tiny_vlm):
    """As they do in vLLM, which receives it too."""
    processors = processors_of(tiny_vlm)
    prompt = make_video_prompt(processors, (3, 4, 4), seconds=1.0, seed=1)

    def largest(override_config: dict[str, object]) -> int:
        model = load_model(str(tiny_vlm), dtype=torch.float32, device="cpu", override_config=override_config)
        policy = Policy(model, processors.family, temperature=1.0, banned_token_ids=())
        return int(LocalScorer(policy, Placement(torch.device("cpu"), None), max_tokens=1).positions(prompt).max())

    rate = processors.hf_config.vision_config.tokens_per_second
    assert largest({"vision_config": {"tokens_per_second": rate + 5}}) == largest({}) + 2 * 5  # two seconds later


def test_masked_completions_have_no_gradient_and_are_not_averaged(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine, other = make_engine(folder), make_engine(folder)
    metrics = values(engine.step(to_train(rollouts, masked=[(0, 0), (1, 0), (2, 0)])))
    assert metrics["actor/pg_loss"] == pytest.approx(-(-12 * 0.75 + 7 * 0.25) / 19, abs=1e-6)
    infinite = to_train(rollouts, masked=[(0, 0), (1, 0), (2, 0)], advantages=(math.inf, -0.75, 0.25))
    assert values(other.step(infinite))["actor/skipped_updates"] == 0
    assert_equal_tensors(weights_of(engine), weights_of(other))


def test_the_learning_rate_warms_up_with_the_number_of_updates(tiny_model):
    folder = tiny_model("qwen2")
    engine = make_engine(folder, warmup_updates=4)
    groups = to_train(make_rollouts(folder))
    rates = [values(engine.step(groups))["actor/lr"] for _ in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["all", "lora"])
def test_gradient_checkpointing_does_not_change_the_update(tiny_vlm, lora_rank):
    groups = to_train(make_rollouts(tiny_vlm))
    kept = make_engine(tiny_vlm, lora_rank=lora_rank)
    recomputed = make_engine(tiny_vlm, lora_rank=lora_rank, checkpointing=True)
    assert values(kept.step(groups)) == values(recomputed.step(groups))
    assert_equal_tensors(weights_of(kept), weights_of(recomputed))


def test_an_update_without_trainable_tokens_is_skipped(tiny_model):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine = make_engine(folder)
    engine.step(to_train(rollouts))  # the moments of the optimizer would change the weights
    before = weights_of(engine)
    all_completions = [(g, i) for g in range(3) for i in range(3)]
    metrics = values(engine.step(to_train(rollouts, masked=all_completions)))
    assert (metrics["actor/skipped_updates"], metrics["actor/nonfinite_updates"]) == (1, 0)
    assert_equal_tensors(weights_of(engine), before)


@pytest.mark.parametrize("advantage", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_skips_the_update_and_does_not_change_later_ones(tiny_model, advantage):
    folder = tiny_model("qwen2")
    rollouts = make_rollouts(folder)
    engine, healthy = make_engine(folder, warmup_updates=4), make_engine(folder, warmup_updates=4)
    start = weights_of(engine)

    metrics = engine.step(to_train(rollouts, advantages=(advantage, -0.75, 0.25)))
    assert metrics["actor/skipped_updates"].value == metrics["actor/nonfinite_updates"].value == 1.0
    assert not math.isfinite(metrics[SKIPPED_GRAD_NORM].value)
    assert metrics["actor/grad_norm"].count == 0.0
    assert_equal_tensors(weights_of(engine), start)

    after = values(engine.step(to_train(rollouts)))
    assert after["actor/skipped_updates"] == 0.0
    assert after == values(healthy.step(to_train(rollouts)))
    assert_equal_tensors(weights_of(engine), weights_of(healthy))
    assert max_relative_error(weights_of(engine), start) > 1e-5


@pytest.mark.parametrize("freeze", [False, True])
def test_only_a_frozen_vision_tower_does_not_change_and_has_no_optimizer_state(tiny_vlm, tmp_path, freeze):
    engine = make_engine(tiny_vlm, freeze=freeze)
    start = weights_of(engine)
    engine.step(to_train(make_rollouts(tiny_vlm)))
    engine.save_state(tmp_path, model_only=False)()
    moved = {name for name, weight in weights_of(engine).items() if not torch.equal(weight, start[name])}
    visual = {name for name in start if "visual" in name}
    assert visual
    frozen = visual if freeze else set()
    assert moved == start.keys() - frozen
    assert any("visual" in name for name in tensors_in(tmp_path / "optimizer")) != freeze


@pytest.mark.extended(but=["all-adamw_bf16", "lora-adamw_bf16"])
@pytest.mark.parametrize(
    ("strategy", "dtype", "bytes_each"),
    [("adamw", torch.float32, 8), ("adamw_bf16", torch.bfloat16, 8), ("adamw_bf16", torch.float32, 8)],
    ids=["adamw fp32", "adamw_bf16", "adamw_bf16 fp32"],
)
@pytest.mark.parametrize("options", [{}, {"freeze": True}, {"lora_rank": 2}], ids=["all", "frozen tower", "lora"])
def test_optimizer_bytes_are_those_of_the_states_after_an_update(
    tiny_vlm, tmp_path, strategy, dtype, bytes_each, options
):
    engine = make_engine(tiny_vlm, strategy=strategy, dtype=dtype, **options)
    before = engine.optimizer_bytes
    engine.step(to_train(make_rollouts(tiny_vlm)))
    engine.save_state(tmp_path, model_only=False)()
    assert engine.optimizer_bytes == before

    trained = [parameter for parameter in engine.policy.parameters() if parameter.requires_grad]
    states = [t for name, t in tensors_in(tmp_path / "optimizer").items() if not name.endswith("/step")]
    assert sum(tensor.nbytes for tensor in states) == bytes_each * sum(map(torch.numel, trained))
    temporaries = 12 * max(map(torch.numel, trained)) if strategy == "adamw_bf16" else 0
    assert before == sum(tensor.nbytes for tensor in states) + temporaries


OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is "
    "free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


def run_out_of_memory(*inputs: object) -> None:
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


@pytest.mark.parametrize("max_tokens", [1, 45, ONE_ROW])
def test_running_out_of_memory_is_explained_with_the_phase_and_the_longest_row(tiny_model, max_tokens):
    rollouts = make_rollouts(tiny_model("qwen2"))
    groups = to_train(rollouts)
    engine = make_engine(
        tiny_model("qwen2"),
        max_tokens=max_tokens,
        prepare=lambda policy: policy.layers()[0].register_forward_pre_hook(run_out_of_memory),
    )
    # Where a group does not fit into a row, its completions have rows of their own.
    tokens = {len(group.prompt.token_ids) + len(part.token_ids) for group in groups for part in group.sequences}
    least = max(tokens) if max_tokens == 1 else 1
    for phase, work, given in (("log-probabilities", engine.logprobs, rollouts), ("update", engine.step, groups)):
        with pytest.raises(DeviceMemoryError, match=r"CUDA out of memory\. Tried to allocate 2\.00 GiB") as raised:
            work(given)
        message = str(raised.value)
        assert phase in message
        assert "policy" in message
        assert "PYTORCH_ALLOC_CONF" not in message
        [longest] = {int(number) for number in re.findall(r"([0-9]+) tokens", message)}
        assert least <= longest <= max(max_tokens, max(tokens))
    # A dry run, which tries how many groups fit, gets the error itself.
    with pytest.raises(torch.OutOfMemoryError):
        engine.dry_run(rollouts)


def test_three_remedies_are_named_in_their_order():
    placement = Placement(torch.device("cpu"), None, model="critic", remedies=("first=1", "second=2", "third=3", "x=4"))
    with (
        pytest.raises(
            DeviceMemoryError, match=r"values of the critic(?s:.*)first=1\n.*second=2\n.*third=3\n"
        ) as raised,
        placement.explain_out_of_memory("values", [], max_tokens=1),
    ):
        run_out_of_memory()
    assert "x=4" not in str(raised.value)
