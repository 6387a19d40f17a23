"""GRPO raises the accuracy of the tiny model, with real command line, vLLM and rewards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 24
NUM_PROMPTS = 512  # more than the steps draw; every row is checked before the first


@pytest.fixture(scope="module")
def trained(tiny_folder: Path) -> Path:
    """Return the folder of a run, which ends with a validation on blank images."""
    folder = tiny_folder / "run"
    overrides = [
        f"data.train_files={tiny_folder / 'data' / 'train.parquet'}@train[:{NUM_PROMPTS}]",
        f"data.val_files={tiny_folder / 'data' / 'validation_blank.parquet'}",
        f"worker.actor.model.model_path={tiny_folder / 'model'}",
        f"trainer.save_checkpoint_path={folder}",
        f"trainer.max_steps={STEPS}",
        f"trainer.val_freq={STEPS}",
        "trainer.val_before_train=false",
    ]
    config = ROOT / "trigon" / "tools" / "quickstart" / "quickstart.yaml"
    command = [sys.executable, "-m", "trigon", "train", str(config), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
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


def test_on_blank_images_the_trained_model_has_the_accuracy_of_chance(trained):
    validation = trained / "rollouts" / f"validation_{STEPS:06d}.jsonl"
    rows = [json.loads(line) for line in validation.read_text().splitlines()]
    accuracy = sum(row["parts"]["accuracy"] for row in rows) / len(rows)
    # Chance is 1/6. More than 54 correct of 192 guesses have a probability below 1 in 10,000.
    assert len(rows) == 192
    assert accuracy <= 54 / 192
