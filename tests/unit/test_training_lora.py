"""The local train engine with LoRA.

What is trained and saved, and the reference without adapters.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from support.engines import make_engine, make_rollouts, tensors_in, to_train, weights_of
from support.models import processors_of
from support.tensors import assert_equal_tensors
from trigon.errors import ModelError
from trigon.metrics import values
from trigon.models.lora import merge_names, merged_weight


def engine_after_updates(folder, **options):
    """Return an engine with adapters of rank 2 after two updates."""
    engine = make_engine(folder, lora_rank=2, **options)
    for seed in (0, 20):
        engine.step(to_train(make_rollouts(folder, seed=seed)))
    return engine


def test_adapters_alone_are_saved_and_continue_bit_for_bit(tiny_vlm, tmp_path):
    engine, other = engine_after_updates(tiny_vlm), make_engine(tiny_vlm, lora_rank=2)
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
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_vlm)

    other.load_state(tmp_path)
    assert_equal_tensors(weights_of(other), weights_of(engine))
    (tmp_path / "again").mkdir()
    other.save_state(tmp_path / "again", model_only=False)()
    assert_equal_tensors(tensors_in(tmp_path / "again" / "adapter"), adapter)
    assert_equal_tensors(tensors_in(tmp_path / "again" / "optimizer"), states)
    groups = to_train(make_rollouts(tiny_vlm, seed=40))
    assert values(engine.step(groups)) == values(other.step(groups))
    assert_equal_tensors(weights_of(other), weights_of(engine))


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_base_weights_do_not_change(tiny_vlm, tmp_path, dtype):
    base = weights_of(make_engine(tiny_vlm, dtype=dtype))
    assert_equal_tensors(weights_of(make_engine(tiny_vlm, dtype=dtype, lora_rank=2)), base)
    engine = engine_after_updates(tiny_vlm, dtype=dtype)
    engine.save_state(tmp_path, model_only=True)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "adapter_config.json"]
    adapter = tensors_in(tmp_path / "adapter")
    expected = dict(base)
    for name, (lora_a, lora_b) in merge_names(adapter, processors_of(tiny_vlm).family).items():
        assert torch.count_nonzero(adapter[lora_b]) > 0
        expected[name] = merged_weight(base[name], adapter[lora_a], adapter[lora_b], scaling=2.0)
    assert_equal_tensors(weights_of(engine), expected)


@pytest.mark.extended(but=["qwen2_5_vl-checkpointing"])
@pytest.mark.parametrize("option", ["checkpointing", "offloads_activations"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_every_adapter_learns_under_gradient_checkpointing_those_of_the_tower_too(
    tiny_model, tmp_path, model_type, option
):
    engine_after_updates(tiny_model(model_type), **{option: True}).save_state(tmp_path, model_only=True)()
    learned = {
        name: bool(weight.any()) for name, weight in tensors_in(tmp_path / "adapter").items() if "lora_B" in name
    }
    assert any("visual" in name for name in learned)
    # Qwen3-VL's second merger is added after the last layer of the tiny language model, to the
    # image's own positions, on which no completion depends.
    assert {name for name, moved in learned.items() if not moved} == {
        name for name in learned if "deepstack_merger_list.1." in name
    }


def test_the_reference_scores_as_the_base_model_after_any_number_of_updates(tiny_vlm):
    rollouts = make_rollouts(tiny_vlm)
    base = torch.cat([logprobs for group in make_engine(tiny_vlm).logprobs(rollouts) for logprobs in group])
    engine = engine_after_updates(tiny_vlm)
    reference = engine.reference_without_adapters()

    def score(engine) -> Tensor:
        return torch.cat([logprobs for group in engine.logprobs(rollouts) for logprobs in group])

    policy = score(engine)
    assert torch.equal(score(reference), base)
    assert torch.equal(score(engine), policy), "the adapters are enabled again"
    assert (policy - base).abs().max() > 1e-3
    engine.step(to_train(rollouts))
    assert torch.equal(score(reference), base)


@pytest.mark.extended
def test_a_bfloat16_base_model_is_trained_with_float32_adapters(tiny_vlm, tmp_path):
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


def test_a_policy_without_adapters_is_not_its_own_reference(tiny_model):
    folder = tiny_model("qwen2")
    with pytest.raises(ModelError, match="no adapters"):
        make_engine(folder).reference_without_adapters().logprobs(make_rollouts(folder))
