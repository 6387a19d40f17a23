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
    for name, dtype, expected in (
        ("a", torch.bfloat16, torch.bfloat16),
        ("b", torch.bfloat16, torch.bfloat16),
        ("c", torch.float16, None),
    ):
        save_weights({name: torch.zeros(2, dtype=dtype)}, tmp_path / f"{name}.safetensors")
        assert stored_dtype(tmp_path) == expected


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the umask of this process during a test."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_all_files_with_weights_have_the_mode_of_new_files(tmp_path: Path, umask: int) -> None:
    save_weights({"w": torch.arange(3.0)}, tmp_path / "model.safetensors")
    save_weights({"w": torch.arange(4.0)}, tmp_path / "model.safetensors")  # written again
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], torch.arange(4.0))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    make_tiny(tmp_path / "model", model_type="qwen2_5_vl", seed=0)
    save_tensors({}, tmp_path / "empty", group=None)
    save_tensors({"w": torch.arange(3.0)}, tmp_path / "weights", group=None)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {0o666 & ~umask}
