"""`trigon doctor --gpu` runs to its end on a machine without a GPU, and reports what fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support.processes import is_running, wait_until
from trigon.tools.cli.doctor import main
from trigon.tools.doctor.catalogue import CHECKS
from trigon.tools.doctor.engines import OTHER_VARIANTS, VARIANTS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it would use the GPUs of this machine")

ONLY_ON_A_GPU = {variant.name for variant in (*VARIANTS, *OTHER_VARIANTS)} - {"vllm-v1-sync-eager"}

HIDE_VLLM = """
import importlib.machinery

find_spec = importlib.machinery.PathFinder.find_spec
hidden = ("vllm", "flash_attn")
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *others: None if name in hidden else find_spec(name, *others)
)
"""


def results(folder: Path) -> dict[str, dict]:
    return {check["name"]: check for check in json.loads((folder / "report.json").read_text())["checks"]}


def doctor(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> dict[str, dict]:
    """Run the command in a process of its own, and return its results."""
    command = [sys.executable, "-m", "trigon", "doctor", "--gpu", "--folder", str(folder)]
    subprocess.run([*command, *arguments], check=False, env={**os.environ, **(environment or {})})
    return results(folder)


@pytest.mark.extended
def test_a_few_checks_pass_and_are_reported(tmp_path, capsys):
    names = ["environment", "kernels", "optimizer-memory"]
    assert main(["--gpu", "--folder", str(tmp_path), *(f"--only={name}" for name in names)]) == 0
    assert {name: check["status"] for name, check in results(tmp_path).items()} == dict.fromkeys(names, "pass")
    printed = capsys.readouterr().out
    assert "no GPU: the checks run in small shapes on the CPU" in printed
    assert "3 passed, 0 failed, 0 skipped" in printed
    report = (tmp_path / "report.md").read_text()
    assert f"torch {torch.__version__}" in report
    assert "groups sdpa float32, output" in report
    assert not (tmp_path / "work").exists()


@pytest.mark.extended
def test_a_wrong_tolerance_and_a_short_limit_make_checks_fail(tmp_path, capsys):
    assert main(["--folder", str(tmp_path / "one"), "--only", "optimizer-memory", "--tolerance-factor", "1e-9"]) == 1
    failed = results(tmp_path / "one")["optimizer-memory"]
    assert failed["status"] == "fail"
    assert "accepted" in failed["reason"]
    assert "FAIL" in (tmp_path / "one" / "report.md").read_text()
    assert main(["--folder", str(tmp_path / "two"), "--only", "optimizer-memory", "--limit", "0.2"]) == 1
    assert "did not end within" in results(tmp_path / "two")["optimizer-memory"]["reason"]
    assert capsys.readouterr().out.count("FAIL") == 2


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_check_comes_to_its_end_on_a_cpu(tmp_path):
    found = doctor(tmp_path)
    assert list(found) == [check.name for check in CHECKS]
    skipped = (
        ONLY_ON_A_GPU if has_vllm() else ONLY_ON_A_GPU | {"vllm-v1-sync-eager", "qwen3-vl-text", "tp2", "fsdp2-tp2"}
    )
    assert {name for name, check in found.items() if check["status"] == "skipped"} == skipped
    failed = {name: check["last_lines"] for name, check in found.items() if check["status"] == "fail"}
    assert not failed, "\n".join(failed.values())


@pytest.mark.extended
@pytest.mark.timeout(1200)
def test_without_vllm_its_checks_are_skipped_and_the_quickstart_uses_transformers(tmp_path):
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(HIDE_VLLM)
    path = os.pathsep.join([str(tmp_path / "hide"), os.environ.get("PYTHONPATH", "")])
    names = ("quickstart", "vllm-v1-sync-eager", "qwen3-vl-text", "fsdp2", "tp2")
    found = doctor(tmp_path, *(f"--only={name}" for name in names), environment={"PYTHONPATH": path})
    assert {name: check["status"] for name, check in found.items()} == {
        "environment": "pass",
        "quickstart": "pass",
        "vllm-v1-sync-eager": "skipped",
        "qwen3-vl-text": "skipped",
        "fsdp2": "pass",
        "tp2": "skipped",
    }
    assert "needs vllm" in found["tp2"]["reason"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_vllm() -> bool:
    try:
        import vllm  # noqa: F401
    except ImportError:
        return False
    return True


def test_ending_the_command_ends_the_check_that_runs(tmp_path):
    command = [sys.executable, "-m", "trigon", "doctor", "--folder", str(tmp_path), "--only", "logprobs"]
    process = subprocess.Popen(command)
    task = tmp_path / "work" / "checks" / "logprobs" / "task.pickle"
    wait_until(lambda: task.exists() and len(children_of(process.pid)) == 1)
    [child] = children_of(process.pid)
    time.sleep(0.5)  # the command waits for it by now
    process.terminate()
    assert process.wait(timeout=60) == 143
    wait_until(lambda: not is_running(child))  # killed, but not a child of this process
    assert "environment" in results(tmp_path)
