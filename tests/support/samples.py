"""A run and samples for tests of loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from trigon.report.delivery import LoggedRun, Sample
from trigon.report.rollouts import RolloutRow

HOSTILE = "![pixel](http://evil/x.png)\x1b[2J\n<script>alert(1)</script> 4"

ROW = RolloutRow(
    prompt_id="val:3",
    sample=0,
    prompt="<image> How many?",
    response=HOSTILE,
    reward=1.0,
    parts={"overall": 1.0, "accuracy": 1.0},
    outcome="ok",
    error="",
    finish_reason="stop",
    num_tokens=3,
    policy_version=7,
    images=("a.png", "b.png"),
    ground_truth=4,
    ground_truth_type="int",
    row={},
    filtered="",
)

SAMPLES = [
    Sample(ROW, (Image.new("RGB", (6, 4), "red"), Image.new("RGB", (8, 8), "blue"))),
    Sample(ROW, ()),
]


def logged_run(folder: Path, **changes: Any) -> LoggedRun:
    values = {
        "project": "easy_r1",
        "experiment": "demo",
        "config": {"data": {"train_files": ["a.parquet"]}, "trainer": {"max_steps": 3, "load": None}},
        "folder": folder,
        "first_step": 0,
    }
    return LoggedRun(**(values | changes))
