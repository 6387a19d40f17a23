"""Saving and restoring the local train engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.engines import make_engine, make_rollouts, tensors_in, to_train, weights_of
from support.tensors import assert_equal_tensors, max_relative_error
from trigon.errors import CheckpointError
from trigon.metrics import values

STRATEGIES = pytest.mark.parametrize(
    ("strategy", "dtype"), [("adamw", torch.float32), ("adamw_bf16", torch.bfloat16)], ids=["adamw", "adamw_bf16"]
)


@STRATEGIES
@pytest.mark.extended(but=["adamw"])
def test_a_restored_engine_continues_bit_for_bit(tiny_vlm, tiny_model, tmp_path, strategy, dtype):
    options = {"strategy": strategy, "dtype": dtype, "warmup_updates": 5}
    batches = [to_train(make_rollouts(tiny_vlm, seed=seed)) for seed in (0, 20, 40)]
    engine = make_engine(tiny_vlm, **options)
    for batch in batches[:2]:
        engine.step(batch)
    engine.save_state(tmp_path, model_only=False)()
    saved = weights_of(engine)

    other = make_engine(tiny_model("qwen2_5_vl", seed=1), **options)
    other.load_state(tmp_path)
    assert_equal_tensors(weights_of(other), saved)
    (tmp_path / "again").mkdir()
    other.save_state(tmp_path / "again", model_only=False)()
    for part in ("weights", "optimizer"):
        assert_equal_tensors(tensors_in(tmp_path / "again" / part), tensors_in(tmp_path / part))

    assert values(engine.step(batches[2])) == values(other.step(batches[2]))
    assert_equal_tensors(weights_of(other), weights_of(engine))
    assert max_relative_error(weights_of(engine), saved) > 0


def test_an_engine_without_updates_can_be_saved_and_restored(tiny_model, tmp_path):
    folder = tiny_model("qwen2")
    make_engine(folder).save_state(tmp_path, model_only=False)()
    engine, fresh = make_engine(tiny_model("qwen2", seed=1)), make_engine(folder)
    engine.load_state(tmp_path)
    groups = to_train(make_rollouts(folder))
    assert values(engine.step(groups)) == values(fresh.step(groups))
    assert_equal_tensors(weights_of(engine), weights_of(fresh))


@pytest.mark.extended
@pytest.mark.parametrize("has_states", [False, True])
def test_a_vision_tower_that_had_no_image_is_restored_without_optimizer_state(tiny_vlm, tmp_path, has_states):
    engine, other = make_engine(tiny_vlm), make_engine(tiny_vlm)
    engine.step(to_train(make_rollouts(tiny_vlm, images=False)))
    engine.save_state(tmp_path, model_only=False)()
    groups = to_train(make_rollouts(tiny_vlm))
    if has_states:  # of the tower, which the checkpoint does not have
        other.step(groups)
    other.load_state(tmp_path)
    (tmp_path / "again").mkdir()
    other.save_state(tmp_path / "again", model_only=False)()
    assert_equal_tensors(tensors_in(tmp_path / "again" / "optimizer"), tensors_in(tmp_path / "optimizer"))
    assert values(engine.step(groups)) == values(other.step(groups))
    assert_equal_tensors(weights_of(engine), weights_of(other))


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["all", "lora"])
def test_the_state_written_is_that_of_the_call_of_save_state(tiny_model, tmp_path, lora_rank):
    folder = tiny_model("qwen2")
    engine, other = make_engine(folder, lora_rank=lora_rank), make_engine(folder, lora_rank=lora_rank)
    groups = to_train(make_rollouts(folder))
    engine.step(groups)
    saved_weights = weights_of(engine)
    write = engine.save_state(tmp_path, model_only=False)
    assert list(tmp_path.iterdir()) == []
    second = values(engine.step(groups))
    write()
    assert json.loads((tmp_path / "state.json").read_text()) == {"updates": 1, "strategy": "adamw"}
    other.load_state(tmp_path)
    assert_equal_tensors(weights_of(other), saved_weights)
    assert values(other.step(groups)) == second
    assert_equal_tensors(weights_of(other), weights_of(engine))


@pytest.fixture
def saved(tiny_model, tmp_path):
    """Return the folder of an engine's state after one update."""
    engine = make_engine(tiny_model("qwen2"))
    engine.step(to_train(make_rollouts(tiny_model("qwen2"))))
    engine.save_state(tmp_path, model_only=False)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["optimizer", "state.json", "weights"]
    return tmp_path


def damage(folder: Path, how: str, key_end: str) -> None:
    """Change a tensor of a folder, or add another one."""
    [file] = folder.iterdir()
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith(key_end))
    match how:
        case "missing":
            del tensors[key]
        case "unknown":
            tensors[f"model.extra.{key_end}"] = torch.zeros(3)
        case "shape":
            tensors[key] = torch.zeros(3)
        case "dtype":
            tensors[key] = tensors[key].double()
    save_file(tensors, file)


WEIGHT, STATE = "q_proj.weight", "q_proj.weight/exp_avg"


@pytest.mark.parametrize(
    ("part", "how", "key_end", "message"),
    [
        ("weights", "missing", WEIGHT, r"missing \[.*q_proj\.weight"),
        ("weights", "unknown", WEIGHT, r"unknown \[.*model\.extra\.q_proj"),
        ("weights", "shape", WEIGHT, r"q_proj\.weight .*\[3\] instead of .*\[128, 128\]"),
        ("weights", "dtype", WEIGHT, r"q_proj.*float64.* instead of .*float32"),
        ("optimizer", "missing", STATE, "missing.*q_proj.weight/exp_avg"),
        ("optimizer", "unknown", STATE, "unknown.*model.extra.q_proj"),
        ("optimizer", "shape", STATE, "another shape.*q_proj.weight/exp_avg"),
        ("optimizer", "dtype", STATE, r"q_proj.*float64.* instead of .*float32"),
    ],
)
def test_tensors_that_do_not_match_raise_an_error_and_change_no_weight(tiny_model, saved, part, how, key_end, message):
    damage(saved / part, how, key_end)
    engine = make_engine(tiny_model("qwen2", seed=1))
    before = weights_of(engine)
    with pytest.raises(CheckpointError, match=message):
        engine.load_state(saved)
    if part == "weights":
        assert_equal_tensors(weights_of(engine), before)


def test_optimizer_states_of_a_vision_tower_that_is_now_frozen_raise_an_error(tiny_vlm, tmp_path):
    engine = make_engine(tiny_vlm)
    engine.step(to_train(make_rollouts(tiny_vlm)))
    engine.save_state(tmp_path, model_only=False)()
    with pytest.raises(CheckpointError, match=r"unknown.*visual"):
        make_engine(tiny_vlm, freeze=True).load_state(tmp_path)


def test_another_optimizer_strategy_raises_an_error(tiny_model, saved):
    with pytest.raises(CheckpointError, match=r"strategy=adamw, this run has adamw_bf16"):
        make_engine(tiny_model("qwen2"), strategy="adamw_bf16", dtype=torch.bfloat16).load_state(saved)


def test_a_checkpoint_of_weights_only_cannot_be_resumed(tiny_model, tmp_path):
    engine = make_engine(tiny_model("qwen2"))
    engine.save_state(tmp_path, model_only=True)()
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    with pytest.raises(CheckpointError, match=r"has no optimizer.*save_model_only"):
        engine.load_state(tmp_path)


def test_a_checkpoint_with_other_adapters_cannot_be_resumed(tiny_model, saved, tmp_path):
    folder = tiny_model("qwen2")
    with pytest.raises(
        CheckpointError, match=r"holds all weights of a run without LoRA, and this run trains LoRA adapters"
    ):
        make_engine(folder, lora_rank=2).load_state(saved)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    engine = make_engine(folder, lora_rank=2)
    engine.step(to_train(make_rollouts(folder)))
    engine.save_state(adapters, model_only=False)()
    with pytest.raises(
        CheckpointError, match=r"holds the LoRA adapters of a run with .*rank=2, and this run trains all weights"
    ):
        make_engine(folder).load_state(adapters)
    with pytest.raises(CheckpointError, match=r"LoRA adapters of rank 2, and worker\.actor\.model\.lora\.rank is 4"):
        make_engine(folder, lora_rank=4).load_state(adapters)
