"""The command line of trigon eval: its grammar, its errors, and its tables."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.samples import ROW
from trigon.report.console import Console
from trigon.report.rollouts import RolloutRow
from trigon.tools.cli.eval import make_parser, split_models
from trigon.tools.cli.main import main
from trigon.tools.eval.results import (
    Blind,
    Comparison,
    Evaluation,
    ModelEvaluation,
    outcomes_of,
    show,
    summarize,
    summarize_by,
)
from trigon.tools.eval.statistics import compare_pairs

HOSTILE = "\x1b[2J\u202e"


def make_row(prompt: int, sample: int) -> RolloutRow:
    """Return a completion of a prompt; in each group the first ones are right."""
    right = float(sample < prompt % 5)
    return replace(
        ROW,
        prompt_id=f"val:{prompt}",
        sample=sample,
        response=rf"\boxed{{{int(right)}}}",
        reward=right,
        parts={"overall": right, "accuracy": right, HOSTILE: 0.5},
        finish_reason="length" if sample == 0 else "stop",
        ground_truth="1",
        row={"level": f"{HOSTILE}{prompt % 2}"},
    )


def make_evaluation() -> Evaluation:
    rows = [make_row(prompt, sample) for prompt in range(20) for sample in range(4)]
    outcomes = outcomes_of(rows, accuracy="accuracy", form="auto", ks=(1, 2, 4))
    summary = summarize(outcomes, accuracy="accuracy")
    difference = compare_pairs([each.accuracy for each in outcomes], [0.0] * 20, unit=0.25)
    model = ModelEvaluation(
        model=f"runs/{HOSTILE}a",
        path="model",
        step=3,
        folder=Path("out/1-a"),
        summary=summary,
        by={"level": summarize_by(outcomes, "level", accuracy="accuracy")},
        blind=Blind(summary, difference, 20, Path("out/1-a/blind")),
        num_rows=25,
        skipped={"overlong": 5},
        num_not_sampled=0,
    )
    other = replace(model, model="b", blind=None)
    settings = {
        "data": ["val.jsonl"],
        "reward_function": "math",
        "n": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 20,
        "seed": 1,
        "answers": "auto",
    }
    return Evaluation((model, other), (Comparison("b", "runs/a", difference, 0.02),), settings, Path("out"))


def test_the_tables_have_every_number_and_no_control_characters():
    stream = io.StringIO()
    show(make_evaluation(), Console(stream=stream))
    text = stream.getvalue()
    for expected in ("accuracy", "pass@4", "maj@4", "score overall", "cut at the limit", "25.0%", "20 / 80"):
        assert expected in text
    assert "accuracy with blank images" in text
    assert "It needs them: 100% of its accuracy is lost" in text
    assert "5 of 25 rows are not in it (5 overlong)" in text
    assert "raise --max-tokens" in text
    assert "0.0200" in text, "the adjusted p-value"
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_an_evaluation_is_readable_a_table_and_json():
    evaluation = make_evaluation()
    shown = repr(evaluation)
    assert len(shown.splitlines()) == 4
    for expected in ("accuracy 0.5000 [", "20 prompts, 80 completions", "b: ", "out"):
        assert expected in shown
    assert "\x1b" not in shown
    table = evaluation.to_pandas()
    assert list(table["accuracy"]) == [0.5, 0.5]
    assert table.loc["b", "pass@4"] == evaluation.models[1].summary.pass_at[4].value
    assert table.loc["b", "num_prompts"] == 20
    model = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))["models"][0]
    summary = model["summary"]
    assert [summary["accuracy"]["value"], summary["pass_at"]["4"]["value"]] == pytest.approx([0.5, 0.8])
    assert (model["folder"], model["blind"]["difference"]["num_prompts"]) == ("out/1-a", 20)


def test_the_last_name_is_the_dataset_unless_it_is_given_as_an_option():
    parser = make_parser()
    assert split_models(parser, ["a", "b", "c"], [], None) == (["a", "b"], ["c"])
    assert split_models(parser, ["a", "b"], ["c", "d"], None) == (["a", "b"], ["c", "d"])
    assert split_models(parser, ["run"], [], Path("a.yaml")) == (["run"], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MODEL ... DATA"),
        (["./missing"], "there is no model folder"),
        (["owner/model"], "name the dataset: trigon eval owner/model DATA"),
        (["worker.rollout.n=3"], "name a model"),
        (["owner/model", "{folder}"], "is a model or a run; name the dataset after the models, or with --data"),
        (["owner/model", "data.jsonl", "-n", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_wrong_usage_is_an_error_that_says_what_to_do(arguments, message, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    try:
        status = main(["eval", *(argument.format(folder=tmp_path) for argument in arguments)])
    except SystemExit as ending:
        status = ending.code
    assert status in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}", "{data}"], "worker.reward.reward_function is not set"),
        (["{model}", "{data}", "--reward", "math", "--k", "3"], "pass@3 needs at least 3 completions"),
        (["{model}", "{data}", "--reward", "math", "worker.rollot.n=3"], "did you mean worker.rollout.n"),
        (["{model}", "missing.jsonl", "--reward", "math"], "data.val_files: there is no missing.jsonl"),
        (["{model}", "{data}", "--reward", "math", "--output", "{folder}"], "is no earlier evaluation"),
    ],
)
def test_errors_come_before_a_model_is_loaded(arguments, message, capsys, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"prompt": "?", "answer": "1"}\n')
    places = {"model": tmp_path / "model", "data": tmp_path / "data.jsonl", "folder": tmp_path}
    output = ["--output", str(tmp_path / "out")] if "--output" not in arguments else []
    assert main(["eval", *(argument.format(**places) for argument in arguments), *output]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
