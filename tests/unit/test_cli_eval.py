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
    settings = {"data": ["val.jsonl"], "reward_function": "math", "n": 4, "temperature": 1.0, "top_p": 1.0}
    settings |= {"max_tokens": 20, "seed": 1, "answers": "auto"}
    return Evaluation((model, other), (Comparison("b", "runs/a", difference, 0.02),), settings, Path("out"))


def test_the_tables_have_every_number_and_no_control_characters():
    stream = io.StringIO()
    show(make_evaluation(), Console(stream=stream))
    text = stream.getvalue()
    for expected in ("accuracy", "pass@4", "maj@4", "score overall", "cut at the limit", "25.0%", "20 / 80"):
        assert expected in text
    for expected in ("accuracy with blank images", "It needs them: 100% of its accuracy is lost", "raise --max-tokens"):
        assert expected in text
    assert "5 of 25 rows are not in it (5 overlong)" in text
    assert "0.0200" in text, "the adjusted p-value"
    assert not set("\x1b\u202e") & set(text)


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
    ("names", "message"),
    [
        ([], "name a model"),
        (["owner/model"], "name the dataset: trigon eval owner/model DATA"),
        (["owner/model", "{folder}"], "is a model or a run; name the dataset after the models, or with --data"),
    ],
)
def test_names_that_are_no_models_and_a_dataset_are_wrong_usage(names, message, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        split_models(make_parser(), [name.format(folder=tmp_path) for name in names], [], None)
    assert message in capsys.readouterr().err
