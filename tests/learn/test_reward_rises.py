"""GRPO raises the accuracy of the tiny model, with real command line, vLLM and rewards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 30


def run(*arguments: str) -> str:
    """Run a trigon command and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "trigon", *arguments], capture_output=True, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(tiny_folder: Path) -> Path:
    folder = tiny_folder / "run"
    run(
        "train",
        str(ROOT / "trigon" / "tools" / "quickstart" / "quickstart.yaml"),
        f"data.train_files={tiny_folder / 'data' / 'train.parquet'}",
        f"data.val_files={tiny_folder / 'data' / 'validation.parquet'}",
        f"worker.actor.model.model_path={tiny_folder / 'model'}",
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


def test_engine_and_trainer_have_equal_logprobs_in_every_step(trained):
    assert max(metric(trained, "parity/logprobs_diff_max")) < 1e-4
    assert max(metric(trained, "mismatch/logprobs_diff_max")) < 1e-4


@pytest.mark.long
def test_on_blank_images_the_trained_model_has_the_accuracy_of_chance(tiny_folder, trained):
    exported = tiny_folder / "exported"
    run("export", str(trained), "--output", str(exported))
    folder = tiny_folder / "blank"
    run(
        "train",
        str(ROOT / "trigon" / "tools" / "quickstart" / "quickstart.yaml"),
        f"data.train_files={tiny_folder / 'data' / 'train.parquet'}",
        f"data.val_files={tiny_folder / 'data' / 'validation_blank.parquet'}",
        f"worker.actor.model.model_path={exported}",
        f"trainer.save_checkpoint_path={folder}",
        "trainer.val_only=true",
    )
    rows = [json.loads(line) for line in (folder / "rollouts" / "validation_000000.jsonl").read_text().splitlines()]
    accuracy = sum(row["parts"]["accuracy"] for row in rows) / len(rows)
    # Chance is 1/6. More than 54 correct of 192 guesses have a probability below 1 in 10,000.
    assert accuracy <= 54 / 192
