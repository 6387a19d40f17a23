"""GRPO raises the accuracy of families whose layers differ from Qwen2.5-VL's; transformers samples.

Qwen3.5 has linear attention; its task needs the image. The language model of Gemma 3 has sliding
windows and bounded logits; its task needs a number at the start of the prompt, outside the window.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw

from trigon.config.load import load_config
from trigon.report.console import Console
from trigon.tools.cli.train import train
from trigon.tools.quickstart.model import make_tiny
from trigon.tools.quickstart.quickstart import warm_up

ROOT = Path(__file__).parents[2]
STEPS, NUM_ROWS, NUM_ANSWERS = 14, 960, 4
START = 0.35
"""The accuracy at which the warm start ends; guesses have 0.25."""

FILLER = ("Find", "the", "length", "of", "side", "angle", "area", "shaded", "part", "triangle")


def shade(answer: int, rng: random.Random) -> dict[str, Any]:
    """Return an image of four squares in random colours, of which the dark one is the answer."""
    image = Image.new("RGB", (84, 84), tuple(rng.randint(160, 255) for _ in range(3)))
    row, column = divmod(answer - 1, 2)
    corners = (42 * column, 42 * row, 42 * column + 41, 42 * row + 41)
    ImageDraw.Draw(image).rectangle(corners, fill=tuple(rng.randint(0, 90) for _ in range(3)))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return {"problem": "<image>Which part is shaded?", "images": [{"bytes": stream.getvalue(), "path": None}]}


def write(answer: int, rng: random.Random) -> dict[str, Any]:
    """Return a question of words that begins with its answer."""
    return {"problem": f"The side measures {answer}. {' '.join(rng.choices(FILLER, k=12))}"}


TASKS: dict[str, Callable[[int, random.Random], dict[str, Any]]] = {"qwen3_5": shade, "gemma3_text": write}
"""What makes the rows of each family's task."""


def train_metrics(folder: Path, model_type: str) -> list[dict[str, float]]:
    """Make a model and its task, train, and return the metrics of each step."""
    make_row, rng = TASKS[model_type], random.Random(0)
    answers = [1 + index % NUM_ANSWERS for index in range(NUM_ROWS)]
    rng.shuffle(answers)
    data, model = folder / "train.parquet", make_tiny(folder / "model", model_type=model_type)
    pq.write_table(pa.Table.from_pylist([make_row(answer, rng) | {"answer": str(answer)} for answer in answers]), data)
    config = json.loads((model / "config.json").read_text())
    if config.get("final_logit_softcapping"):  # the tiny model's, 2, leaves no token more than 5 %
        (model / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    warm_up(model, data, Console(), seed=0, skill=START, max_updates=120)
    loaded = load_config(
        ROOT / "trigon" / "tools" / "quickstart" / "quickstart.yaml",
        [
            f"data.train_files={data}",
            f"worker.actor.model.model_path={model}",
            f"trainer.save_checkpoint_path={folder / 'run'}",
            f"trainer.max_steps={STEPS}",
            # Completions of a prompt are sampled together, so that few prompts are fast.
            "data.rollout_batch_size=8",
            "worker.actor.global_batch_size=8",
            "worker.actor.micro_batch_size_per_device_for_update=8",
            "worker.rollout.n=16",
            "worker.rollout.name=transformers",
            "worker.actor.optim.lr_scheduler_type=constant",
            "worker.actor.optim.lr_warmup_ratio=0",
            "trainer.val_before_train=false",
            "trainer.val_freq=-1",
            "trainer.save_freq=-1",
        ],
    )
    assert train(loaded) == 0
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [line["metrics"] for line in lines if "reward/accuracy" in line["metrics"]]
    assert len(metrics) == STEPS
    return metrics


@pytest.mark.extended
@pytest.mark.timeout(1300)  # minutes on one core, more on a busy one
@pytest.mark.parametrize("model_type", TASKS)
def test_the_reward_rises(tmp_path: Path, model_type: str) -> None:
    metrics = train_metrics(tmp_path, model_type)
    accuracy = [each["reward/accuracy"] for each in metrics]
    before, after = sum(accuracy[:2]) / 2, sum(accuracy[-4:]) / 4
    assert after >= before + 0.2, accuracy  # from about 0.5 to about 0.88
    assert max(each["parity/logprobs_diff_max"] for each in metrics) < 1e-4
    assert max(each["mismatch/logprobs_diff_max"] for each in metrics) < 1e-4
