"""Digests of files: small ones entirely, large ones by blocks, weights by tensor."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trigon.system.content import FULL_BYTES, file_digest, text_digest, weights_digest


def test_a_small_file_is_compared_entirely(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"x" * 100_000)
    before = file_digest(file)
    os.utime(file, (0, 0))
    assert file_digest(file) == before
    file.write_bytes(b"x" * 70_000 + b"y" + b"x" * 29_999)
    assert file_digest(file) != before
    (tmp_path / "empty").touch()
    assert file_digest(tmp_path / "empty") != before
    assert text_digest("a") != text_digest("b")
    assert len(text_digest("\udc80")) == 32


@pytest.mark.parametrize("place", [0, FULL_BYTES, FULL_BYTES // 2])
def test_a_large_file_is_compared_by_size_and_blocks(tmp_path, place):
    file = tmp_path / "large"
    with file.open("wb") as stream:
        stream.truncate(FULL_BYTES + 1000)  # takes no space
    before = file_digest(file)
    with file.open("r+b") as stream:  # another content, not a byte: blocks are 64 KiB apart
        stream.seek(min(place, FULL_BYTES + 1000 - 70_000))
        stream.write(b"y" * 70_000)
    assert file_digest(file) != before
    with file.open("wb") as stream:
        stream.truncate(FULL_BYTES + 1001)
    assert file_digest(file) != before


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{i}": torch.randn(60, 100, generator=generator) for i in range(4)} | {"norm": torch.ones(8)}


def write(folder: Path, *shards: dict[str, torch.Tensor]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    return sorted(folder.iterdir())


def test_weights_are_the_same_however_they_are_divided_over_files(tmp_path):
    weights = tensors()
    first, *rest = weights.items()
    whole = weights_digest(write(tmp_path / "whole", weights))
    assert weights_digest(write(tmp_path / "parts", dict([first]), dict(rest))) == whole
    assert weights_digest(list(reversed(write(tmp_path / "parts", dict([first]), dict(rest))))) == whole


@pytest.mark.parametrize("change", ["scaled", "renamed", "dtype", "shape", "missing", "norm"])
def test_another_tensor_is_noticed(tmp_path, change):
    weights = tensors()
    before = weights_digest(write(tmp_path / "before", weights))
    match change:
        case "scaled":
            weights["layer.2"] = weights["layer.2"] * 1.0001
        case "renamed":
            weights["layer.9"] = weights.pop("layer.2")
        case "dtype":
            weights["layer.2"] = weights["layer.2"].to(torch.bfloat16)
        case "shape":
            weights["layer.2"] = weights["layer.2"].reshape(100, 60)
        case "missing":
            del weights["layer.2"]
        case "norm":
            weights["norm"][3] += 1e-6
    assert weights_digest(write(tmp_path / "after", weights)) != before


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"short",
        (2**62).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"null",
        (40).to_bytes(8, "little") + json.dumps({"a": {"data_offsets": [1]}}).encode().ljust(40),
        (90_000).to_bytes(8, "little") + b"[" * 90_000,
    ],
)
def test_a_file_that_is_not_of_this_format_is_compared_as_any_file(tmp_path, header):
    file = tmp_path / "model.bin"
    file.write_bytes(header)
    before = weights_digest([file])
    assert weights_digest([file]) == before
    file.write_bytes(header + b"more")
    assert weights_digest([file]) != before
