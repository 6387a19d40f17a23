"""When weights and optimizer states leave the device for the rollout engine.

The device is the CPU: what is moved to it is recorded, although it is there already.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from support.engines import make_engine, make_rollouts, to_train
from trigon.assemble.engines import open_rollout
from trigon.assemble.models import DevicePlacement
from trigon.config.schema import Config
from trigon.training import local
from trigon.training.device_memory import CudaMemory, free_cached_memory
from trigon.training.parallel import SingleProcess


class Moves(TorchFunctionMode):
    """Records the kinds of tensors that are moved, each kind once in a row."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.kinds: list[str] = []
        self._buffers = set(map(id, policy.buffers()))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and id(args[0]) not in self._buffers:
            kind = "weights" if isinstance(args[0], nn.Parameter) else "states"
            if self.kinds[-1:] != [kind]:
                self.kinds.append(kind)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def engine(tiny_model):
    """Return an engine that offloads everything, after one update."""
    engine = make_engine(tiny_model("qwen2"), offload=True)
    engine.step(to_train(make_rollouts(tiny_model("qwen2"))))
    return engine


def test_optimizer_states_leave_the_device_before_the_weights_are_read_and_weights_after_that(engine):
    with Moves(engine.policy) as moves:
        handle = engine.weights()
        assert moves.kinds == ["states"]
        moves.kinds.clear()
        tensors = handle.read()
        assert moves.kinds == []
        next(tensors)
        assert moves.kinds == ["weights"]  # onto the device, where they may be already
        moves.kinds.clear()
        for _ in tensors:
            assert moves.kinds == []
        assert moves.kinds == ["weights"]
        moves.kinds.clear()
        engine.offload()  # before a rollout engine starts
        assert moves.kinds == ["weights", "states"]


def test_a_rollout_engine_starts_after_the_trainer_has_left_the_device():
    class LeftError(Exception):
        """Raised when the trainer leaves the device."""

    def leave():
        raise LeftError

    config = Config(worker={"actor": {"model": {"model_path": "no/model"}}, "rollout": {"name": "transformers"}})
    place = DevicePlacement(torch.device("cpu"), SingleProcess())
    with pytest.raises(LeftError):  # not: there is no such model
        open_rollout(config, None, place, SimpleNamespace(offload=leave), shows_videos=False)


def test_nothing_is_moved_without_offloading(tiny_model):
    engine = make_engine(tiny_model("qwen2"))
    engine.step(to_train(make_rollouts(tiny_model("qwen2"))))
    engine.weights()  # checks once that they are finite
    with Moves(engine.policy) as moves:
        engine.offload()
        for _ in engine.weights().read():
            pass
    assert moves.kinds == []


def test_cached_memory_is_freed_on_a_gpu_only(monkeypatch):
    freed = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: freed.append("copies"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("cuda"))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: freed.append("host"), raising=False)
    free_cached_memory(torch.device("cpu"))
    assert freed == []
    free_cached_memory(torch.device("cuda"))
    assert freed == ["copies", "cuda", "host"]
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: freed.append("older"), raising=False)
    free_cached_memory(torch.device("cuda"))
    assert freed[3:] == ["copies", "cuda", "older"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    assert CudaMemory(torch.device("cuda")).free_bytes() == 1
    assert freed[6:] == ["copies", "cuda", "older"]


def test_cached_memory_is_freed_before_sampling_and_saving(tiny_model, monkeypatch, tmp_path):
    freed = []
    monkeypatch.setattr(local, "free_cached_memory", freed.append)
    engine = make_engine(tiny_model("qwen2"))
    engine.weights()
    assert len(freed) == 1
    engine.save_state(tmp_path, model_only=True)
    assert len(freed) == 2
