"""Training from Python in a process like a notebook's: no __main__ file, and a running event loop.

The numbers are those of the command line on the same data.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.runs import assert_learned, finish, lines, rollouts, start

STEPS = 3

# Read from standard input, as a kernel reads cells: functions of __main__ have no file.
SCRIPT = """
import asyncio, io, signal, sys
from PIL import Image
from pyarrow.parquet import read_table
import trigon
from trigon.errors import CheckpointError

assert "__file__" not in globals()
made, folder, *workers = sys.argv[1:]


def rows(name):
    table = read_table(f"{made}/data/{name}.parquet").to_pylist()
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
    def log(self, step, metrics): self.logged.append(step)
    def log_metrics(self, step, metrics): self.logged.append(step)
    def log_samples(self, step, split, samples): pass
    def rollouts(self, step, rows, images): pass
    def close(self): pass


def on_step(step, metrics):
    steps.append(step)
    if step == 2 and len(steps) == 2 + 1:
        signal.raise_signal(signal.SIGINT)


def train(data, **changes):
    arguments = dict(
        config=OPTIONS, model=f"{made}/model", data=data, val_data=rows("validation"),
        reward=lambda response, ground_truth: sum(map(ord, response)) % MODULO / MODULO,
        options=CHANGES, trainer={"save_checkpoint_path": folder, "n_gpus_per_node": int(workers[0]) if workers else 1},
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


def options_of(made: Path, folder: Path) -> dict[str, object]:
    """Return the options that support.runs.start gives a run, but for its data and its reward."""
    process = start(made, folder, "data.shuffle=maybe", steps=STEPS)  # ends at the wrong value
    command = process.args
    process.kill()
    process.wait()
    assert isinstance(command, list)
    pairs = [argument.split("=", 1) for argument in command if "=" in argument and not argument.startswith("config=")]
    kept = ("data.train_files", "data.val_files", "data.shuffle", "trainer.save_checkpoint_path", "worker.reward")
    return {key: value for key, value in pairs if not key.startswith(kept)}


def run_script(made: Path, folder: Path, *workers: str) -> str:
    """Run SCRIPT as an interactive process would, and return its output."""
    options = json.dumps({key: value for key, value in options_of(made, folder).items() if key != "x"})
    script = SCRIPT.replace("OPTIONS", repr("trigon/tiny/quickstart.yaml")).replace("CHANGES", options)
    script = script.replace("STEPS", str(STEPS))
    done = subprocess.run(
        [sys.executable, "-", str(made), str(folder), *workers],
        input=script,
        capture_output=True,
        text=True,
        timeout=500,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def without_files(folder: Path) -> dict[str, list[dict]]:
    """Return the rollouts without what differs between an image in memory and its file."""
    return {
        name: [{key: value for key, value in json.loads(line).items() if key != "image_files"} for line in text.splitlines()]
        for name, text in rollouts(folder).items()
    }


def test_a_run_from_python_has_the_numbers_of_the_command_line_stops_resumes_and_notices_other_data(
    made: Path, tmp_path: Path
) -> None:
    run_script(made, tmp_path / "python")
    finish(start(made, tmp_path / "command", steps=STEPS), tmp_path / "command")
    assert_learned(tmp_path / "command")
    assert lines(tmp_path / "python") == lines(tmp_path / "command")
    assert without_files(tmp_path / "python") == without_files(tmp_path / "command")


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_two_workers_have_the_numbers_of_the_command_line(made: Path, tmp_path: Path) -> None:
    run_script(made, tmp_path / "python", "2")
    process = start(made, tmp_path / "command", "trainer.n_gpus_per_node=2", steps=STEPS)
    finish(process, tmp_path / "command")
    assert lines(tmp_path / "python") == lines(tmp_path / "command")
