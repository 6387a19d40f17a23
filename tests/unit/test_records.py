"""Run folders are read back as they were written, also as tables; other content is refused."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from math import isnan, nan

import pytest

import trigon
from support.samples import ROW
from trigon.errors import DataError
from trigon.report.rollouts import SCHEMA_VERSION, TokenRecord, read_rollouts
from trigon.report.run import StepMetrics, find_runs, flatten, open_run
from trigon.report.run_folder import RunFolder
from trigon.tools.view.runs import open_runs

FIRST = replace(
    ROW,
    prompt_id="train:17",
    response="two \ud800 <b>",
    parts={"overall": 0.5, "accuracy": 1.0},
    row={"level": 3},
    image_files=("images/ab.png",),
    advantage=-0.25,
    tokens=TokenRecord([1, 2], ["two", " <b>"], [-0.5, -1.0], [-0.25, -0.25]),
    num_prompt_tokens=9,
)
SECOND = replace(FIRST, sample=1, tokens=None, advantage=None, reward=nan, parts={}, outcome="failed")
VALIDATED = replace(FIRST, ground_truth={"x": [1, 2]}, response="half \ud83d", tokens=None)
LATER = replace(FIRST, prompt_id="train:4", parts={"overall": 0.0, "brevity": 0.25}, tokens=None)


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a run of two steps, with validations that were added later."""
    with RunFolder(tmp_path) as run:
        run.write_config("trainer:\n  max_steps: 3\n")
        run.append_metrics(1, {"reward/overall": nan, "lr": 1})
        run.append_metrics(1, {"val/reward_score": 0.75})
        run.append_metrics(0, {"val/reward_score": 0.5})
        run.write_rollouts(1, "train", [FIRST, SECOND])
        run.write_rollouts(1, "filtered", [replace(FIRST, filtered="low")])
        run.write_rollouts(1, "validation", [VALIDATED])
        run.write_rollouts(2, "train", [LATER])
    return tmp_path


def test_a_run_is_read_as_it_was_written(folder):
    run = open_run(folder)
    assert run.config() == {"trainer": {"max_steps": 3}}
    assert run.metrics()[2] == StepMetrics(0, {"val/reward_score": 0.5})
    assert isnan(run.metrics()[0].metrics["reward/overall"])
    files = [(file.step, file.split) for file in run.rollout_files()]
    assert sorted(files) == [(1, "filtered"), (1, "train"), (1, "validation"), (2, "train")]
    first, second, _ = (row for _, row in run.rollouts(splits=("train",)))
    assert first == FIRST  # JSON keeps an unpaired surrogate as its escape
    assert isnan(second.reward)
    assert replace(second, reward=0.0) == replace(SECOND, reward=0.0)
    assert [row.filtered for _, row in run.rollouts(splits=("filtered",))] == ["low"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", r"line 1 is not a rollout \(JSONDecodeError"),
        ("[]", "line 1 is not a rollout"),
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


def test_folders_that_may_not_be_read_are_skipped(tmp_path):
    if os.getuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "a" / "rollouts").mkdir(parents=True)
    (tmp_path / "project" / "b" / "rollouts").mkdir(parents=True)
    for closed in (tmp_path / "lost+found", tmp_path / "project" / "closed"):
        closed.mkdir(mode=0o000)
    assert [run.path for run in find_runs(tmp_path)] == [tmp_path / "a", tmp_path / "project" / "b"]
    assert open_run(tmp_path).path == tmp_path / "a"


def test_a_folder_without_a_run_is_an_error(tmp_path):
    for read in (open_run, find_runs, trigon.load_run):
        with pytest.raises(DataError, match="is not the folder of a run"):
            read(tmp_path)
        with pytest.raises(DataError, match="does not exist"):
            read(tmp_path / "missing")


def test_a_configuration_is_flat_but_mappings_that_are_values_stay_whole():
    config = {"a": {"b": {"c": 1}, "d": {}}, "e": [1]}
    assert flatten(config) == {"a.b.c": 1, "a.d": {}, "e": [1]}
    assert flatten(config, mappings=["a.b"])["a.b"] == {"c": 1}


def test_metrics_have_a_row_per_step_in_order(folder):
    run = trigon.load_run(folder)
    metrics = run.metrics()
    assert list(metrics.index) == [0, 1]
    assert metrics["val/reward_score"].tolist() == [0.5, 0.75]
    assert math.isnan(metrics.loc[1, "reward/overall"])
    assert run.metrics_arrow().column_names == ["step", "lr", "reward/overall", "val/reward_score"]
    assert run.metrics_arrow()["lr"].to_pylist() == [None, 1.0]


def test_rollouts_have_a_row_per_completion_and_a_column_per_part(folder):
    run = trigon.load_run(str(folder))
    table = run.rollouts(splits=["train", "validation"])
    assert table[["step", "split", "prompt_id", "sample"]].values.tolist() == [
        [1, "train", "train:17", 0],
        [1, "train", "train:17", 1],
        [1, "validation", "train:17", 0],
        [2, "train", "train:4", 0],
    ]
    assert table["parts.accuracy"].tolist()[0] == 1.0
    assert table["parts.brevity"].isna().tolist() == [True, True, True, False]
    assert table["ground_truth"].tolist()[2] == '{"x": [1, 2]}'
    assert json.loads(table["row"][0]) == {"level": 3}
    assert list(table["images"][0]) == ["a.png", "b.png"]
    assert table["response"][2] == r"half \ud83d"
    assert "tokens" not in table
    with_tokens = run.rollouts_arrow(splits=["train"], steps=range(1, 2), tokens=True)
    first, second = with_tokens["tokens"].to_pylist()
    assert (first["texts"], first["advantages"], first["entropy"]) == (["two", " <b>"], [-0.25, -0.25], None)
    assert second is None
    nothing = run.rollouts_arrow(splits=["train"], steps=range(7, 8))
    assert nothing.num_rows == 0
    assert nothing.schema.field("reward").type == with_tokens.schema.field("reward").type
    with pytest.raises(ValueError, match=r"splits has 'rain'.* did you mean train"):
        run.rollouts_arrow(splits="rain")
