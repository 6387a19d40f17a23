"""Run folders are read back as they were written, also as tables; other content is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pytest

import trigon
from trigon.errors import DataError
from trigon.report.rollouts import SCHEMA_VERSION, RolloutRow, TokenRecord, read_rollouts, row_to_line
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
    for read in (open_run, trigon.load_run):
        with pytest.raises(DataError, match="is not the folder of a run"):
            read(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        open_run(tmp_path / "missing")


def test_a_configuration_is_flat_with_dotted_keys():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_mappings_that_are_values_stay_whole():
    config = {"a": {"b": {"c": 1}, "d": {}}}
    assert flatten(config) == {"a.b.c": 1, "a.d": {}}
    assert flatten(config, mappings=["a.b"]) == {"a.b": {"c": 1}}


# Tables

PLAIN = replace(
    ROW, prompt_id="train:3", sample=0, response="2", reward=1.0, parts={"overall": 1.0, "accuracy": 1.0}, images=(),
    row={"level": 3}, image_files=(), advantage=None, tokens=None,
)  # fmt: skip


@pytest.fixture
def tables_folder(tmp_path):
    """A run of two steps, with one validation."""
    lines = [
        {"step": 0, "metrics": {"val/reward_score": 0.5}},
        {"step": 1, "metrics": {"reward/overall": None, "lr": 1}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("trainer: {max_steps: 2}")
    (tmp_path / "rollouts").mkdir()
    tokens = TokenRecord(ids=[5, 6], texts=["2", ""], sampling_logprobs=[-0.5, -0.25], advantages=[1.0, 1.0])
    files = {
        "step_000001": [
            replace(PLAIN, tokens=tokens, advantage=1.0, images=("train:3/images/0",)),
            replace(PLAIN, sample=1, parts={}, outcome="failed"),
        ],
        "validation_000001": [replace(PLAIN, ground_truth={"x": [1, 2]}, response="half \ud83d")],
        "step_000002": [replace(PLAIN, prompt_id="train:4", parts={"overall": 0.0, "brevity": 0.25})],
    }
    for name, rows in files.items():
        (tmp_path / "rollouts" / f"{name}.jsonl").write_bytes(b"".join(map(row_to_line, rows)))
    return tmp_path


def test_metrics_have_a_row_per_step(tables_folder):
    run = trigon.load_run(tables_folder)
    metrics = run.metrics()
    assert list(metrics.index) == [0, 1]
    assert metrics.loc[0, "val/reward_score"] == 0.5
    assert math.isnan(metrics.loc[1, "reward/overall"])
    assert run.metrics_arrow().column_names == ["step", "lr", "reward/overall", "val/reward_score"]
    assert run.metrics_arrow()["lr"].to_pylist() == [None, 1.0]
    assert (run.config(), run.folder) == ({"trainer": {"max_steps": 2}}, tables_folder)


def test_a_validation_that_was_added_later_is_in_the_row_of_its_step(tables_folder):
    added = [{"step": 1, "metrics": {"val/reward_score": 0.75, "lr": 2}}, {"step": 0, "metrics": {"val/n": 4}}]
    with (tables_folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in added)
    metrics = trigon.load_run(tables_folder).metrics()
    assert list(metrics.index) == [0, 1]
    assert metrics["val/reward_score"].tolist() == [0.5, 0.75]
    assert (metrics.loc[1, "lr"], metrics.loc[0, "val/n"]) == (2, 4)
    assert math.isnan(metrics.loc[1, "reward/overall"])


def test_rollouts_have_a_row_per_completion_and_a_column_per_part(tables_folder):
    table = trigon.load_run(str(tables_folder)).rollouts()
    assert table[["step", "split", "prompt_id", "sample"]].values.tolist() == [
        [1, "train", "train:3", 0],
        [1, "train", "train:3", 1],
        [1, "validation", "train:3", 0],
        [2, "train", "train:4", 0],
    ]
    assert table["parts.accuracy"].tolist()[0] == 1.0
    assert table["parts.brevity"].isna().tolist() == [True, True, True, False]
    assert table["ground_truth"].tolist() == ["2", "2", '{"x": [1, 2]}', "2"]
    assert json.loads(table["row"][0]) == {"level": 3}
    assert list(table["images"][0]) == ["train:3/images/0"]
    assert table["response"][2] == r"half \ud83d"
    assert "tokens" not in table


def test_rollouts_can_be_chosen_by_split_and_step_and_read_with_tokens(tables_folder):
    run = trigon.load_run(tables_folder)
    table = run.rollouts_arrow(splits=["train"], steps=range(1, 2), tokens=True)
    first, second = table["tokens"].to_pylist()
    assert (first["texts"], first["advantages"], first["entropy"]) == (["2", ""], [1.0, 1.0], None)
    assert second is None
    nothing = run.rollouts_arrow(splits=["filtered"])
    assert nothing.num_rows == 0
    assert nothing.schema.field("reward").type == table.schema.field("reward").type


def test_unknown_splits_are_errors_and_one_may_be_text(tables_folder):
    run = trigon.load_run(tables_folder)
    with pytest.raises(ValueError, match="splits has 'val'; choose of train, filtered, validation; did you mean val"):
        run.rollouts(splits=["val"])
    with pytest.raises(ValueError, match=r"splits has 'rain'.* did you mean train"):
        run.rollouts_arrow(splits="rain")
    assert run.rollouts(splits="validation")["step"].tolist() == [1]
