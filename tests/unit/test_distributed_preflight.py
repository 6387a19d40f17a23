"""inspect_node and check_node_reports: problems of a node are reported before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from trigon.assemble.memory import Hardware
from trigon.assemble.pools import smallest_hardware
from trigon.distributed.preflight import (
    SAME_EVERYWHERE,
    NodeReport,
    check_node_reports,
    find_token_warning,
    inspect_node,
    require_gpu,
)
from trigon.errors import ConfigError, EngineError

REPORT = NodeReport("one", {"python": "3.12", **dict.fromkeys(SAME_EVERYWHERE, "1.0")}, "")

CPU = torch.device("cpu")


@dataclass
class TwoRanks:
    """A process group of two ranks. found: how many of them an all-reduce counts."""

    found: int = 2
    size: int = 2
    rank: int = 1
    device: torch.device = CPU

    def count_ranks(self) -> int:
        return self.found


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").touch()
    return {"model": tmp_path / "model", "run": tmp_path / "run"}


def inspect(folders: dict[str, Path], ranks: TwoRanks | None = None) -> NodeReport:
    return inspect_node(
        ranks or TwoRanks(), model_paths=[str(folders["model"])], run_folder=folders["run"], marker="run.lock"
    )


def test_a_run_has_the_memory_of_the_smallest_device_and_node():
    reports = [
        replace(REPORT, device_bytes=device, host_bytes=host) for device, host in ((80, 900), (40, None), (60, 500))
    ]
    assert smallest_hardware("cuda", reports) == Hardware("cuda", 40, 500)
    assert smallest_hardware("cpu", [REPORT]) == Hardware("cpu", 0, None)


def test_a_node_without_problems(folders):
    report = inspect(folders)
    assert report.problem == ""
    assert report.device_bytes == 0
    assert report.host_bytes is not None
    assert report.host_bytes > 2**28
    assert report.versions["torch"]
    check_node_reports([report, report])
    assert inspect({**folders, "model": Path("Qwen/Qwen2.5-VL-3B-Instruct")}).problem == ""  # a hub id is not checked


def test_a_missing_model_or_run_folder_is_a_problem(folders, tmp_path):
    report = inspect({"model": tmp_path / "elsewhere", "run": tmp_path / "nowhere"})
    with pytest.raises(ConfigError) as caught:
        check_node_reports([REPORT, report])
    message = str(caught.value)
    assert message.startswith(f"rank 1 on {report.host}: there is no model in {tmp_path / 'elsewhere'}")
    assert "it must be on a disk that all nodes share (trainer.save_checkpoint_path)" in message


def test_a_disk_too_small_for_the_weights_is_a_problem(folders):
    with (folders["model"] / "model.safetensors").open("wb") as file:
        file.truncate(2**43)  # a sparse file
    assert "bytes free, and the model alone has 8,796,093,022,208; make room" in inspect(folders).problem


def test_an_all_reduce_that_misses_a_rank_is_an_error(folders):
    with pytest.raises(EngineError, match="2 workers add up to 1"):
        inspect(folders, TwoRanks(found=1))


def test_different_versions_are_reported_with_both_nodes():
    other = replace(REPORT, host="two", versions={**REPORT.versions, "torch": "2.0", "vllm": ""})
    with pytest.raises(ConfigError) as caught:
        check_node_reports([REPORT, REPORT, other])
    assert str(caught.value) == (
        "rank 2 on two has other versions: torch 2.0 (rank 0 on one: 1.0), vllm missing (rank 0 on one: 1.0); install "
        "the same versions on all nodes"
    )


@pytest.mark.parametrize(("free_gib", "is_enough"), [(48, True), (47, False)])
def test_a_gpu_that_another_process_uses_is_an_error_before_anything_is_loaded(monkeypatch, free_gib, is_enough):
    """vLLM would refuse it, after minutes of loading."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    require_gpu("cpu", free_fraction=1.0)
    if is_enough:
        require_gpu("cuda", free_fraction=0.6)
        return
    with pytest.raises(ConfigError, match=r"H100\) has 47\.0 GiB of 80\.0 GiB free, and vLLM is to take 60% of all"):
        require_gpu("cuda", free_fraction=0.6)


@pytest.mark.faults
def test_nodes_on_which_ray_requires_no_token_are_named(folders):
    assert find_token_warning([REPORT, replace(REPORT, host="two")]) is None
    open_to_all = replace(REPORT, requires_token=False)
    warning = find_token_warning([REPORT, replace(open_to_all, host="two"), replace(open_to_all, host="three")])
    assert warning is not None
    assert warning.startswith("Ray requires no token on three, two: ")
    assert "RAY_AUTH_MODE=token" in warning
