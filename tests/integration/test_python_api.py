"""Training from Python in a process like a notebook's: functions of a stream, a running event loop.

The numbers are those of the command line on the same data.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from support.runs import CONFIG, assert_learned, finish, lines, overrides_of, restore_sigint, rollouts, start

pytestmark = pytest.mark.extended

STEPS = 4

# Read from standard input, as a kernel reads cells: functions of __main__ have no file.
SCRIPT = """
import asyncio, io, signal, sys
from PIL import Image
from pyarrow.parquet import read_table
import trigon
from trigon.errors import CheckpointError

model, data_folder, folder, *workers = sys.argv[1:]


def rows(name):
    table = read_table(f"{data_folder}/{name}.parquet").to_pylist()
    for row in table:
        row["images"] = [Image.open(io.BytesIO(image["bytes"])) for image in row["images"]]
        for image in row["images"]:
            image.load()
    return table


MODULO = 7
steps, learned = [], []


class Logger:
    name = "mine"
    logged = []
    def log_metrics(self, step, metrics): self.logged.append(step)
    def log_samples(self, step, split, samples): pass


def on_step(step, metrics):
    steps.append(step)
    if step == 2 and len(steps) == 2 + 1 and not workers:
        signal.raise_signal(signal.SIGINT)


def train(data, **changes):
    arguments = dict(
        config=CONFIG, model=model, data=data, val_data=rows("validation"),
        reward=lambda response, ground_truth: sum(map(ord, response)) % MODULO / MODULO,
        options=OPTIONS, trainer={"save_checkpoint_path": folder, "n_gpus_per_node": int(workers[0]) if workers else 1},
        on_step=on_step, on_rollouts=lambda groups: learned.append(len(groups)), loggers=["file", Logger()],
    )
    return trigon.train(**{**arguments, **changes})


async def cells():
    data = rows("train")
    if not workers:
        stopped = train(data)
        assert stopped.stopped and stopped.step == 3 and steps == [0, 1, 2, 3], (stopped, steps)
        other = rows("train")
        other[5]["answer"] = "7"
        try:
            train(other)
            raise AssertionError("other data were not noticed")
        except CheckpointError as error:
            assert "python:train has other rows" in str(error), error
    result = train(data, export_to=f"{folder}_model")
    assert not result.stopped and result.step == STEPS, result
    assert result.checkpoints[-1] == result.checkpoint
    assert list(result.metrics.index) == list(range(STEPS + 1))
    assert (result.run.rollouts(splits=["train"]).groupby("step").size() == 16).all()
    assert result.run.config()["data"]["train_files"] == ["python:train"]
    assert Logger.logged == steps, (Logger.logged, steps)
    model = result.load_model()
    assert sum(each.numel() for each in model.parameters()) > 0
    print("learned", learned)


asyncio.run(cells())
"""


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """Return a folder with few rows of the data, which are scanned several times."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, rows in (("train", 48), ("validation", 16)):
        pq.write_table(pq.read_table(made / "data" / f"{name}.parquet").slice(0, rows), folder / f"{name}.parquet")
    return folder


def run_script(made: Path, data: Path, folder: Path, *workers: str) -> None:
    """Run SCRIPT in a process that reads it as a kernel reads cells."""
    pairs = dict(override.split("=", 1) for override in overrides_of(made, folder, steps=STEPS))
    given_as_objects = ("data.train_files", "data.val_files", "worker.reward", "worker.actor.model", "trainer.save_ch")
    options = {key: yaml.safe_load(text) for key, text in pairs.items() if not key.startswith(given_as_objects)}
    script = f"STEPS, CONFIG, OPTIONS = {STEPS}, {str(CONFIG)!r}, {options!r}\n{SCRIPT}"
    command = [sys.executable, "-", str(made / "model"), str(data), str(folder), *workers]
    done = subprocess.run(
        command, input=script, capture_output=True, text=True, timeout=500, check=False, preexec_fn=restore_sigint
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def run_command(made: Path, data: Path, folder: Path, *overrides: str) -> None:
    """Run the command on the same data."""
    files = [f"data.train_files={data / 'train.parquet'}", f"data.val_files={data / 'validation.parquet'}"]
    finish(start(made, folder, *files, *overrides, steps=STEPS), folder)
    assert_learned(folder)


def without_files(folder: Path) -> dict[str, list[dict]]:
    """Return the rollouts without what differs between an image in memory and its file."""
    return {
        name: [
            {key: value for key, value in json.loads(line).items() if key != "image_files"}
            for line in text.splitlines()
        ]
        for name, text in rollouts(folder).items()
    }


def test_a_run_from_python_has_the_numbers_of_the_command_line_stops_resumes_and_notices_other_data(
    made: Path, data: Path, tmp_path: Path
) -> None:
    run_script(made, data, tmp_path / "python")
    run_command(made, data, tmp_path / "command")
    assert lines(tmp_path / "python") == lines(tmp_path / "command")
    assert without_files(tmp_path / "python") == without_files(tmp_path / "command")


def without_bytes(folder: Path) -> list[dict]:
    """Return the metrics without the bytes that were sent: images in memory are other files."""
    return [
        line | {"metrics": {key: value for key, value in line["metrics"].items() if not key.startswith("moved/")}}
        for line in lines(folder)
    ]


@pytest.mark.long
def test_two_workers_have_the_numbers_of_the_command_line(made: Path, data: Path, tmp_path: Path) -> None:
    run_script(made, data, tmp_path / "python", "2")
    run_command(made, data, tmp_path / "command", "trainer.n_gpus_per_node=2")
    assert without_bytes(tmp_path / "python") == without_bytes(tmp_path / "command")


# As a notebook's cells: read from standard input.
THREE_ARGUMENTS = """
import sys, trigon

rows = [{"prompt": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(3)]
[model] = sys.argv[1:]


def reward(response, ground_truth):
    return sum(map(ord, response)) % 7 / 7


result = trigon.train(model=model, data=rows, reward=reward, on_step=lambda *_: "stop")
config = result.run.config()
print("numbers", config["data"]["rollout_batch_size"], config["worker"]["actor"]["global_batch_size"],
      config["worker"]["rollout"]["n"], len(result.run.rollouts(steps=[1])))
print("ended", result.step, result.stopped, result.checkpoint.name)
"""


@pytest.mark.long
def test_three_arguments_suffice_and_a_hook_stops_and_saves(made: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-", str(made / "model")]
    done = subprocess.run(
        command, input=THREE_ARGUMENTS, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-2:] == ["numbers 3 3 8 24", "ended 1 True global_step_1"]
    said = " ".join((done.stdout + done.stderr).split())
    for chosen in ("worker.rollout.n=8", "data.rollout_batch_size=3", "worker.actor.global_batch_size=3"):
        assert chosen in said
