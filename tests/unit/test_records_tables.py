"""Runs as tables of pandas and Arrow."""

import json
import math

import pytest

import trigon
from trigon.errors import DataError
from trigon.report.rollouts import RolloutRow, TokenRecord, row_to_line


def row(**changes):
    fields = {
        "prompt_id": "train:3",
        "sample": 0,
        "prompt": "What is 1 + 1?",
        "response": "2",
        "reward": 1.0,
        "parts": {"overall": 1.0, "accuracy": 1.0},
        "outcome": "ok",
        "error": "",
        "finish_reason": "stop",
        "num_tokens": 2,
        "policy_version": 0,
        "images": (),
        "ground_truth": "2",
        "ground_truth_type": "str",
        "row": {"level": 3},
        "filtered": "",
    }
    return RolloutRow(**(fields | changes))


@pytest.fixture
def folder(tmp_path):
    """A run of two steps, with one validation."""
    lines = [
        {"step": 0, "metrics": {"val/reward_score": 0.5}},
        {"step": 1, "metrics": {"reward/overall": None, "lr": 1}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("trainer: {max_steps: 2}")
    (tmp_path / "rollouts").mkdir()
    tokens = TokenRecord(ids=[5, 6], texts=["2", ""], sampling_logprobs=[-0.5, -0.25], advantages=[1.0, 1.0])
    first = [row(tokens=tokens, advantage=1.0, images=("train:3/images/0",)), row(sample=1, parts={}, outcome="failed")]
    for name, rows in (
        ("step_000001", first),
        ("validation_000001", [row(ground_truth={"x": [1, 2]}, ground_truth_type="dict", response="half \ud83d")]),
        ("step_000002", [row(prompt_id="train:4", parts={"overall": 0.0, "brevity": 0.25})]),
    ):
        (tmp_path / "rollouts" / f"{name}.jsonl").write_bytes(b"".join(map(row_to_line, rows)))
    return tmp_path


def test_metrics_have_a_row_per_step(folder):
    run = trigon.load_run(folder)
    metrics = run.metrics()
    assert list(metrics.index) == [0, 1]
    assert metrics.loc[0, "val/reward_score"] == 0.5
    assert math.isnan(metrics.loc[1, "reward/overall"])
    assert run.metrics_arrow().column_names == ["step", "lr", "reward/overall", "val/reward_score"]
    assert run.metrics_arrow()["lr"].to_pylist() == [None, 1.0]
    assert (run.config(), run.folder) == ({"trainer": {"max_steps": 2}}, folder)


def test_a_validation_that_was_added_later_is_in_the_row_of_its_step(folder):
    added = [{"step": 1, "metrics": {"val/reward_score": 0.75, "lr": 2}}, {"step": 0, "metrics": {"val/n": 4}}]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in added)
    metrics = trigon.load_run(folder).metrics()
    assert list(metrics.index) == [0, 1]
    assert metrics["val/reward_score"].tolist() == [0.5, 0.75]
    assert (metrics.loc[1, "lr"], metrics.loc[0, "val/n"]) == (2, 4)
    assert math.isnan(metrics.loc[1, "reward/overall"])


def test_rollouts_have_a_row_per_completion_and_a_column_per_part(folder):
    table = trigon.load_run(str(folder)).rollouts()
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


def test_rollouts_can_be_chosen_by_split_and_step_and_read_with_tokens(folder):
    run = trigon.load_run(folder)
    table = run.rollouts_arrow(splits=["train"], steps=range(1, 2), tokens=True)
    first, second = table["tokens"].to_pylist()
    assert (first["texts"], first["advantages"], first["entropy"]) == (["2", ""], [1.0, 1.0], None)
    assert second is None
    nothing = run.rollouts_arrow(splits=["filtered"])
    assert nothing.num_rows == 0
    assert nothing.schema.field("reward").type == table.schema.field("reward").type


def test_unknown_splits_are_errors_and_one_may_be_text(folder):
    run = trigon.load_run(folder)
    with pytest.raises(ValueError, match="splits has 'val'; choose of train, filtered, validation; did you mean val"):
        run.rollouts(splits=["val"])
    with pytest.raises(ValueError, match=r"splits has 'rain'.* did you mean train"):
        run.rollouts_arrow(splits="rain")
    assert run.rollouts(splits="validation")["step"].tolist() == [1]


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match="is not the folder of a run"):
        trigon.load_run(tmp_path)
