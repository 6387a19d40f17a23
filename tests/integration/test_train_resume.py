"""Killed at any moment and started again, a run writes the numbers that it would have written uninterrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS = 6
MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/")  # the only keys that may differ between two equal runs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model and data, barely warmed up: what they know does not matter here."""
    folder = tmp_path_factory.mktemp("made")
    command = [sys.executable, "-m", "trigon.cli", "tiny", str(folder), "--max-updates", "6"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


def start(made: Path, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "trigon.trainer.main",
        f"config={Path(__file__).parents[2] / 'trigon' / 'cli' / 'quickstart.yaml'}",
        f"data.train_files={made / 'data' / 'train.parquet'}",
        f"data.val_files={made / 'data' / 'validation.parquet'}",
        f"worker.actor.model.model_path={made / 'model'}",
        f"trainer.save_checkpoint_path={folder}",
        f"trainer.max_steps={STEPS}",
        "trainer.val_freq=3",
        "trainer.save_freq=2",
        "data.rollout_batch_size=4",
        "worker.actor.global_batch_size=2",  # two updates a step: old log-probabilities are really computed
        "algorithm.disable_kl=false",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_penalty=low_var_kl",
        "worker.ref.fsdp.torch_dtype=fp32",
        "worker.rollout.n=4",
        "worker.actor.optim.lr_warmup_ratio=0",  # a schedule over all steps would see a changed trainer.max_steps
        "worker.actor.optim.lr_scheduler_type=constant",
        *overrides,
    ]
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str], folder: Path) -> None:
    status = process.wait(timeout=300)
    assert status == 0, (folder.parent / f"{folder.name}.log").read_text()[-4000:]


def lines(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            "step": line["step"],
            "metrics": {key: value for key, value in line["metrics"].items() if not key.startswith(MEASURED)},
        }
        for line in found
    ]


def rollouts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "rollouts").iterdir())}


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def uninterrupted(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(start(made, folder), folder)
    assert [line["step"] for line in lines(folder)] == list(range(STEPS + 1))
    return folder


def wait_for(condition, process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, (folder.parent / f"{folder.name}.log").read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_run_killed_three_times_equals_one_that_never_was(made, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    process = start(made, folder)
    wait_for(lambda: num_lines(folder) >= 2, process, folder)  # after step 1: before any checkpoint
    kill(process)
    process = start(made, folder)
    wait_for(lambda: any(folder.glob(".saving_global_step_2")) or num_lines(folder) >= 3, process, folder)
    kill(process)  # about the first save
    process = start(made, folder)
    wait_for(lambda: num_lines(folder) >= 6, process, folder)  # after step 5, which is in no checkpoint
    kill(process)
    finish(start(made, folder), folder)
    assert lines(folder) == lines(uninterrupted)
    assert rollouts(folder) == rollouts(uninterrupted)


def test_a_finished_run_started_again_changes_nothing(made, uninterrupted):
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    finish(start(made, uninterrupted), uninterrupted)
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


def test_sigterm_saves_the_step_in_hand_and_says_so(made, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    process = start(made, folder, "trainer.save_freq=-1")
    wait_for(lambda: num_lines(folder) >= 2, process, folder)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 143
    assert len(list(folder.glob("global_step_*"))) == 1
    finish(start(made, folder, "trainer.save_freq=-1"), folder)
    assert lines(folder) == lines(uninterrupted)


def test_a_damaged_checkpoint_is_passed_over_loudly(made, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    finish(start(made, folder, f"trainer.max_steps={STEPS - 2}", "trainer.save_limit=-1"), folder)
    weights = folder / f"global_step_{STEPS - 2}" / "actor" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-7] ^= 1
    weights.write_bytes(content)
    finish(start(made, folder, "trainer.save_limit=-1"), folder)
    assert f"global_step_{STEPS - 2}" in (tmp_path / "run.log").read_text()
    assert lines(folder) == lines(uninterrupted)
