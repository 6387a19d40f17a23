"""The device and the attention kernel that a configuration selects."""

import importlib.util

import pytest
import torch

from trigon.assemble.models import choose_device, choose_kernel
from trigon.config.schema import Config
from trigon.errors import ConfigError, ModelError


def make_config(**sections) -> Config:
    return Config(**sections)


def test_the_device_is_the_configured_one():
    assert choose_device(make_config(trainer={"device": "cpu"})) == torch.device("cpu")
    if torch.cuda.is_available():
        assert choose_device(make_config()).type == "cuda"
    else:
        assert choose_device(make_config()).type == "cpu"
        with pytest.raises(ConfigError, match=r"trainer\.device is cuda.*trainer\.device=cpu"):
            choose_device(make_config(trainer={"device": "cuda"}))


def test_the_kernel_is_the_configured_one_or_the_fastest_available(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    auto, sdpa, flex = (
        make_config(worker={"actor": {"model": {"attention_kernel": kernel}}}) for kernel in ("auto", "sdpa", "flex")
    )
    fp32 = make_config(worker={"actor": {"fsdp": {"mp_param_dtype": "fp32"}}})
    kernels = [choose_kernel(config, gpu) for config in (auto, sdpa, flex, fp32)]
    assert kernels == ["varlen", "sdpa", "flex", "sdpa"]
    assert [choose_kernel(config, cpu) for config in (auto, sdpa)] == ["sdpa", "sdpa"]
    with pytest.raises(ModelError, match="attention_kernel=flex needs a GPU"):
        choose_kernel(flex, cpu)


def test_liger_kernel_is_rejected_where_it_cannot_run():
    liger = make_config(worker={"actor": {"model": {"use_liger_kernel": True}}})
    with pytest.raises(ModelError, match="use_liger_kernel needs a GPU"):
        choose_kernel(liger, torch.device("cpu"))
    if importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(ModelError, match="pip install liger-kernel"):
            choose_kernel(liger, torch.device("cuda"))
