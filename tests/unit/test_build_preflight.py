"""Errors of data, model folder and reward come before heavy libraries are imported."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from trigon.api import make_objects, read_arguments
from trigon.assemble.preflight import open_early
from trigon.config.load import load_config
from trigon.data.sources import open_python_rows
from trigon.errors import DataError, ModelError, RewardError

ROWS = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(5)]


# Lambdas are sent to the reward workers with their code: the workers cannot import this module.
REWARDS = {
    "half": lambda response, ground_truth: 0.5,
    "fails": lambda response, ground_truth: {}["overall"],
    "fails at 1": lambda response, ground_truth: 1 / (int(ground_truth) - 1),
}


def open_run(model, *, data=None, val_data=None, reward="half"):
    data = ROWS if data is None else data
    given = read_arguments(
        model=model, data=data, reward=REWARDS[reward], val_data=val_data, config=None, loggers=None, options=None,
        keyword_options={},
    )  # fmt: skip
    loaded = load_config(given.config, given.options, python_objects=given.objects)
    sources = {spec: open_python_rows(rows, spec=spec, name="rows") for spec, rows in given.data.items()}
    with ExitStack() as stack:
        objects = make_objects(loaded.config, sources=sources, reward=REWARDS[reward], environment=None, tools=None)
        opened = open_early(loaded.config, objects, stack)
        return sorted(opened.sources)


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    return tmp_path / "model"


def test_what_can_be_wrong_with_data_model_and_reward_is_found(model, tmp_path):
    (tmp_path / "rows.csv").write_text("question,answer\n1 + 1?,2\n")
    other = [{"question": "1 + 1?", "answer": "2"}]
    for arguments, error, part in (
        ({"data": other}, DataError, "no column 'prompt'"),
        ({"val_data": other}, DataError, "python:validation has no column 'prompt'"),
        ({"data": tmp_path / "rows.csv"}, DataError, "no column 'prompt'"),
        ({"reward": "fails"}, RewardError, "KeyError: 'overall'"),
    ):
        with pytest.raises(error, match=part):
            open_run(model, **arguments)
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        open_run(model)
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_run(model)


def test_what_is_right_or_cannot_be_known_yet_passes(model):
    assert open_run(model) == ["python:train"]
    assert open_run(model, reward="fails at 1") == ["python:train"]  # one row alone
    assert open_run(model, data="owner/data", val_data=ROWS) == ["python:validation"]


SCRIPT = """
import atexit, sys, trigon
atexit.register(lambda: print("heavy:", [name for name in ("torch", "transformers", "vllm") if name in sys.modules]))
def run(data):
    trigon.train(model=sys.argv[1], data=data, reward=lambda response, ground_truth: 1 / len(ground_truth[1:]))
for data in sys.argv[2:]:
    try:
        run(data)
    except trigon.TrigonError as error:
        print(str(error).splitlines()[0])
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
shell.user_ns["run"] = run
shell.run_cell("run([{'question': '?', 'answer': '1'}])")
run([{"question": "?", "answer": "1"}])
"""


@pytest.mark.extended
def test_the_traceback_of_a_script_ends_in_the_script_and_nothing_heavy_was_imported(model, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "rows.jsonl").write_text('{"question": "?", "answer": "1"}')
    image = {"bytes": b"png", "path": "a.png"}
    for name, column in (("columns", "question"), ("reward", "prompt")):
        rows = [{column: "?", "answer": "1", "images": [image], "extra": {"field": 1}}]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    done = subprocess.run(
        [sys.executable, "script.py", str(model), "rows.jsonl", "columns.parquet", "reward.parquet"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    text, table, reward, *notebook, heavy = done.stdout.splitlines()
    assert heavy == "heavy: []", done.stderr
    assert any(line.startswith("Cell In") for line in notebook)
    assert not any("errors.py" in line for line in notebook)
    assert "has no column 'prompt'" in notebook[-1]
    assert "rows.jsonl has no column 'prompt'" in text
    assert "columns.parquet has no column 'prompt', only answer, extra, extra.field, images, question;" in table
    assert "ZeroDivisionError" in reward
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert [frame.partition(", in ")[2] for frame in frames] == ["<module>", "run"]
    assert "has no column 'prompt'" in done.stderr.splitlines()[-1]
