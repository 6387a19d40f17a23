"""Weights and optimizer states that are not finite are found before they are saved or used."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from support.engines import make_engine, make_rollouts, to_train
from trigon.checkpoint.store import CheckpointStore
from trigon.errors import CheckpointError, ModelError, NotFiniteError
from trigon.training.checkpointing import require_finite_files
from trigon.training.finite import all_finite, require_finite
from trigon.training.parallel import SingleProcess

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found_among_many(dtype, wrong):
    tensors = [torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype) for _ in range(4)]
    tensors += [torch.empty(0, dtype=dtype), torch.zeros((), dtype=dtype), torch.full((2,), -1.0)]
    assert all_finite(tensors)
    for tensor in (tensors[0], tensors[3], tensors[5]):
        kept = tensor.clone()
        tensor.view(-1)[-1] = wrong
        assert not all_finite(tensors)
        tensor.copy_(kept)
    assert all_finite([])


def test_the_message_names_the_tensors():
    tensors = {name: torch.zeros(2) for name in "abcdef"} | {"steps": torch.ones(2, dtype=torch.int16)}
    for name in "bdef":
        tensors[name][1] = math.inf
    with pytest.raises(NotFiniteError) as caught:
        require_finite(tensors, SingleProcess(), what="the weights after 7 updates")
    assert (
        str(caught.value) == "the weights after 7 updates hold nan or infinity, in 4 of 6 tensors: b, d, e and 1 more"
    )


@pytest.mark.faults
@pytest.mark.parametrize(("strategy", "dtype"), [("adamw", torch.float32), ("adamw_bf16", torch.bfloat16)])
def test_a_weight_that_an_update_made_infinite_is_neither_sampled_from_nor_saved(tiny_model, tmp_path, strategy, dtype):
    folder = tiny_model("qwen2")
    engine = make_engine(folder, strategy=strategy, dtype=dtype)
    groups = to_train(make_rollouts(folder))
    engine.weights()
    engine.step(groups)
    engine.weights()
    parameter = next(iter(engine.policy.parameters()))
    engine._trained.optimizer.param_groups[0]["betas"] = (0.9, 1.0)  # a bias correction that divides by zero
    engine.step(groups)
    assert not parameter.isfinite().all()
    with pytest.raises(
        NotFiniteError, match=r"the weights after 2 updates hold nan or infinity, in \d+ of \d+ tensors"
    ):
        engine.weights()
    with pytest.raises(NotFiniteError, match=r"weights and optimizer states after 2 updates"):
        engine.save_state(tmp_path, model_only=False)
    with pytest.raises(NotFiniteError, match=r"weights/"):
        engine.save_state(tmp_path, model_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_own_weights_are_not_finite_is_an_error_of_the_model_and_not_of_training(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("qwen2"), tmp_path / "model")
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    next(tensor for tensor in tensors.values() if tensor.ndim == 2)[0, 0] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"hold nan .* in 1 of \d+ tensors: .*No update was made: the model's own wei"):
        make_engine(folder).weights()


def test_an_optimizer_state_that_is_not_finite_is_not_saved(tiny_model, tmp_path):
    folder = tiny_model("qwen2")
    engine = make_engine(folder)
    engine.step(to_train(make_rollouts(folder)))
    name, parameter = list(engine.policy.named_parameters())[1]
    engine._trained.optimizer.state[parameter]["exp_avg_sq"].view(-1)[3] = math.inf
    engine.weights()
    with pytest.raises(NotFiniteError, match=rf"in 1 of \d+ tensors: optimizer/{name}/exp_avg_sq$"):
        engine.save_state(tmp_path, model_only=False)
    engine.save_state(tmp_path, model_only=True)()  # the weights alone are good


@pytest.mark.faults
@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_checkpoint_of_an_older_version_that_is_not_finite_is_damaged_and_the_one_before_it_is_used(
    tiny_model, tmp_path, part
):
    folder, messages = tiny_model("qwen2"), []
    store = CheckpointStore(tmp_path, keep=-1, warn=messages.append, check_actor=require_finite_files)
    engine = make_engine(folder)
    engine.step(to_train(make_rollouts(folder)))

    def write_as_before(actor, value):
        """Write what an older version wrote: values without a mark that they were checked."""
        engine.save_state(actor, model_only=False)()
        [file] = (actor / part).glob("*.safetensors")
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        next(tensor for tensor in tensors.values() if tensor.ndim == 2)[0, 0] = value
        save_file(tensors, file, metadata=metadata)
        state = json.loads((actor / "state.json").read_text())
        assert state.pop("finite") is True
        (actor / "state.json").write_text(json.dumps(state))

    for step, value in ((1, 0.5), (2, math.nan)):
        store.save(step, write=lambda actor, value=value: write_as_before(actor, value), progress={}, score=None)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1
    [message] = messages
    assert message.startswith("DAMAGED CHECKPOINT: ")
    assert f"global_step_2/actor/{part} holds nan or infinity in " in message
    with pytest.raises(CheckpointError, match=r"holds nan or infinity"):
        require_finite_files(tmp_path / "global_step_2" / "actor")


def test_the_files_of_a_checkpoint_that_was_checked_when_it_was_saved_are_not_read(tiny_model, tmp_path):
    make_engine(tiny_model("qwen2")).save_state(tmp_path, model_only=False)()
    for file in tmp_path.glob("*/*.safetensors"):
        file.write_bytes(b"")
    require_finite_files(tmp_path)
