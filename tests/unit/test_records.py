"""Run folders are read back as they were written, and other content is refused."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pytest

from trigon.errors import DataError
from trigon.report.rollouts import SCHEMA_VERSION, RolloutRow, TokenRecord, read_rollouts
from trigon.report.run import StepMetrics, find_runs, flatten, open_run
from trigon.report.run_folder import RunFolder
from trigon.tools.view.runs import open_runs

ROW = RolloutRow(
    prompt_id="train:17",
    sample=1,
    prompt="<image>How many?",
    response="two \ud800 <b>",
    reward=0.5,
    parts={"overall": 0.5, "accuracy": 1.0},
    outcome="ok",
    error="",
    finish_reason="stop",
    num_tokens=2,
    policy_version=3,
    images=("train:17/images/0 (a.png)",),
    ground_truth="2",
    ground_truth_type="str",
    row={"source": "a"},
    filtered="",
    image_files=("images/ab.png",),
    advantage=-0.25,
    tokens=TokenRecord([1, 2], ["two", " <b>"], [-0.5, -1.0], [-0.25, -0.25]),
    num_prompt_tokens=9,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with RunFolder(tmp_path) as run:
        run.write_config("trainer:\n  max_steps: 3\n")
        run.append_metrics(1, {"reward/overall": 0.5})
        run.append_metrics(2, {"reward/overall": nan})
        run.write_rollouts(1, "train", [ROW, replace(ROW, sample=2, tokens=None, advantage=None, reward=nan)])
        run.write_rollouts(1, "filtered", [replace(ROW, filtered="low")])
        run.write_rollouts(0, "validation", [replace(ROW, response="plain")])
    return tmp_path


def test_a_run_is_read_as_it_was_written(folder):
    run = open_run(folder)
    assert run.config() == {"trainer": {"max_steps": 3}}
    first, second = run.metrics()
    assert first == StepMetrics(1, {"reward/overall": 0.5})
    assert isnan(second.metrics["reward/overall"])
    assert [(file.step, file.split) for file in run.rollout_files()] == [
        (0, "validation"),
        (1, "train"),
        (1, "filtered"),
    ]
    rows = [row for _, row in run.rollouts(splits=("train",))]
    # JSON keeps an unpaired surrogate as its escape.
    assert rows[0] == ROW
    assert isnan(rows[1].reward)
    assert rows[1].tokens is None
    assert [row.filtered for _, row in run.rollouts(splits=("filtered",))] == ["low"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", r"line 1 is not a rollout \(JSONDecodeError"),
        ("[]", "line 1 is not a rollout"),
        (f'{{"prompt_id": "a", "version": {SCHEMA_VERSION}}}', "line 1 is not a rollout"),
        (f'{{"prompt_id": 3, "version": {SCHEMA_VERSION}}}', "line 1 is not a rollout"),
        (f'{{"version": {SCHEMA_VERSION - 1}}}', f"schema version {SCHEMA_VERSION - 1}, .* version {SCHEMA_VERSION}"),
    ],
)
def test_a_line_that_is_no_rollout_is_an_error(tmp_path, line, message):
    path = tmp_path / "step_000001.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        list(read_rollouts(path))


def test_a_folder_with_one_run_in_it_is_that_run(folder):
    assert open_run(folder.parent / folder.name).path == folder
    outer = folder / "outer"
    (outer / "run").mkdir(parents=True)
    (folder / "metrics.jsonl").rename(outer / "run" / "metrics.jsonl")
    assert open_run(outer).path == outer / "run"
    (outer / "another" / "rollouts").mkdir(parents=True)
    with pytest.raises(DataError, match=r"contains 2 runs; name one of them: .*another, .*run"):
        open_run(outer)
    (outer / "quickstart" / "run" / "rollouts").mkdir(parents=True)
    runs = [outer / "another", outer / "quickstart" / "run", outer / "run"]
    assert [run.path for run in find_runs(outer)] == runs
    viewed = open_runs([outer, runs[0]], cache=outer / "cache")
    assert [run.record.path for run in viewed] == runs
    assert len({run.name for run in viewed}) == 3
    assert [run.path for run in find_runs(outer / "run")] == [outer / "run"]


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match="is not the folder of a run"):
        find_runs(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        find_runs(tmp_path / "missing")
    with pytest.raises(DataError, match="is not the folder of a run"):
        open_run(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        open_run(tmp_path / "missing")


def test_a_configuration_is_flat_with_dotted_keys():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_mappings_that_are_values_stay_whole():
    config = {"a": {"b": {"c": 1}, "d": {}}}
    assert flatten(config) == {"a.b.c": 1, "a.d": {}}
    assert flatten(config, mappings=["a.b"]) == {"a.b": {"c": 1}}
