"""Files with weights: their dtype, and their modes, which follow the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trigon.models.weight_files import save_weights, stored_dtype
from trigon.tools.quickstart.model import make_tiny
from trigon.training.state import save_tensors


def test_the_dtype_of_a_folder_is_that_of_all_its_tensors(tmp_path: Path) -> None:
    assert stored_dtype(tmp_path) is None
    save_weights({"a": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    assert stored_dtype(tmp_path) == torch.bfloat16
    save_weights({"b": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "b.safetensors")
    assert stored_dtype(tmp_path) == torch.bfloat16
    save_weights({"c": torch.zeros(2, dtype=torch.float16)}, tmp_path / "c.safetensors")
    assert stored_dtype(tmp_path) is None
    for file in tmp_path.iterdir():
        file.unlink()
    save_weights({"d": torch.zeros(2, dtype=torch.int8)}, tmp_path / "d.safetensors")
    assert stored_dtype(tmp_path) is None


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the umask of this process during a test."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


def test_weights_are_written_with_the_mode_of_new_files(tmp_path: Path, umask: int) -> None:
    save_weights({"w": torch.arange(3.0)}, tmp_path / "model.safetensors")
    save_weights({"w": torch.arange(4.0)}, tmp_path / "model.safetensors")  # written again
    assert modes(tmp_path) == {0o666 & ~umask}
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], torch.arange(4.0))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_5_vl"])
def test_all_files_of_a_tiny_model_have_the_mode_of_new_files(tmp_path: Path, umask: int, model_type: str) -> None:
    make_tiny(tmp_path / "model", model_type=model_type, seed=0)
    assert modes(tmp_path) == {0o666 & ~umask}


@pytest.mark.parametrize("tensors", [{}, {"w": torch.arange(3.0)}], ids=["no tensors", "tensors"])
def test_shards_of_a_checkpoint_have_the_mode_of_new_files(
    tmp_path: Path, umask: int, tensors: dict[str, torch.Tensor]
) -> None:
    save_tensors(tensors, tmp_path / "weights", group=None)
    assert modes(tmp_path) == {0o666 & ~umask}
