"""GRPO teaches the tiny model to see: through the real command line, real vLLM, real graders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 40


def run(*arguments: str) -> str:
    """Run a command of ours and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "trigon.cli", *arguments], capture_output=True, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(with_gradient: Path) -> Path:
    folder = with_gradient / "run"
    run(
        "train",
        str(ROOT / "trigon" / "tiny" / "quickstart.yaml"),
        f"data.train_files={with_gradient / 'data' / 'train.parquet'}",
        f"data.val_files={with_gradient / 'data' / 'validation.parquet'}",
        f"worker.actor.model.model_path={with_gradient / 'model'}",
        f"trainer.save_checkpoint_path={folder}",
        f"trainer.max_steps={STEPS}",
        "trainer.val_freq=-1",
    )
    return folder


def metric(folder: Path, key: str) -> list[float]:
    lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def test_the_reward_rises(trained):
    accuracy = metric(trained, "reward/accuracy")
    assert len(accuracy) == STEPS
    before, after = sum(accuracy[:8]) / 8, sum(accuracy[-8:]) / 8
    assert after >= before + 0.15, accuracy


def test_engine_and_trainer_agree_all_the_way(trained):
    assert max(metric(trained, "parity/logprobs_diff_max")) < 1e-4
    assert max(metric(trained, "mismatch/logprobs_diff_max")) < 1e-4


def test_without_the_drawings_the_trained_model_is_at_chance(with_gradient, trained):
    exported = with_gradient / "exported"
    run("export", str(trained), "--output", str(exported))
    folder = with_gradient / "blank"
    run(
        "train",
        str(ROOT / "trigon" / "tiny" / "quickstart.yaml"),
        f"data.train_files={with_gradient / 'data' / 'train.parquet'}",
        f"data.val_files={with_gradient / 'data' / 'validation_blank.parquet'}",
        f"worker.actor.model.model_path={exported}",
        f"trainer.save_checkpoint_path={folder}",
        "trainer.val_only=true",
    )
    answers = [json.loads(line) for line in (folder / "rollouts" / "validation_000000.jsonl").read_text().splitlines()]
    accuracy = sum(answer["parts"]["accuracy"] for answer in answers) / len(answers)
    # Chance is 1/6. Of 192 guesses, more than 54 right has a probability below 1 in 10,000.
    assert accuracy <= 54 / 192
