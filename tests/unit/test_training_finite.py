"""Weights and optimizer states that are not finite are found before they are saved or used."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.engines import make_engine, make_rollouts, to_train
from trigon.errors import ModelError, NotFiniteError
from trigon.training.checkpointing import all_finite, require_finite
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
