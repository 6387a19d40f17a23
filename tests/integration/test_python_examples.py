"""The programs of examples/python and the notebook, run with the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from support.runs import ROOT

NOTEBOOK = ROOT / "examples" / "notebooks" / "quickstart.ipynb"


def run_example(name: str, model: Path, folder: Path) -> str:
    """Run a program of examples/python in a folder, with 50 steps reduced to 2."""
    program = (
        (ROOT / "examples" / "python" / name).read_text(encoding="utf-8").replace('"max_steps": 50', '"max_steps": 2')
    )
    (folder / name).write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, name, str(model)], cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
def test_the_example_of_the_page_trains(made: Path, tmp_path: Path) -> None:
    run_example("grpo.py", made / "model", tmp_path)
    lines = (tmp_path / "checkpoints" / "easy_r1" / "sums" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.extended
def test_the_example_with_images_and_hooks_trains(made: Path, tmp_path: Path) -> None:
    printed = run_example("images_and_hooks.py", made / "model", tmp_path)
    assert "step 4: accuracy" in printed
    assert (tmp_path / "runs" / "colours_model" / "model.safetensors").is_file()
    [row, *_] = (tmp_path / "runs" / "colours" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert set(json.loads(row)["parts"]) == {"overall", "accuracy", "brevity", "brevity/is_short"}


def outputs_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_the_notebook_is_saved_with_its_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    outputs = outputs_of(notebook)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert [output for output in outputs if output.output_type == "error"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3  # a row, the curve, the completions


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs_and_its_model_learns(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert [output for output in outputs_of(notebook) if output.output_type == "error"] == []
    lines = (tmp_path / "notebook_run" / "run" / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["metrics"].get("reward/overall") for line in lines]
    rewards = [reward for reward in rewards if reward is not None]
    assert sum(rewards[-10:]) > sum(rewards[:10])
