"""What is computed from rollouts: answers and their votes, means, what is left out, and columns."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import isnan

import pytest

from support.samples import ROW
from trigon.config.names import SHIPPED_REWARDS
from trigon.errors import DataError
from trigon.report.rollouts import RolloutRow, to_json
from trigon.tools.eval.results import (
    accuracy_name,
    check_columns,
    compare_outcomes,
    default_ks,
    extract_answer,
    number_answers,
    outcomes_of,
    summarize,
    summarize_by,
)
from trigon.tools.eval.settings import SHIPPED_FORMS


@pytest.mark.parametrize(
    ("form", "response", "answer"),
    [
        ("boxed", r"first \boxed{1}, then \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("boxed", "<answer>3</answer>", None),
        ("tag", "<answer>1</answer> no, <answer>\n2 </answer>", "2"),
        ("tag", "<answer>1<answer>2</answer>", "2"),
        ("tag", "<answer></answer>", None),
        ("line", "Answer: 1\nanswer : 2 \nmore", "2"),
        ("text", "  all of it ", "all of it"),
        ("text", " ", None),
        ("auto", r"\boxed{1} <answer>2</answer> Answer: 3", "1"),
        ("auto", "<answer>2</answer> Answer: 3", "2"),
        ("auto", "Answer: 3", "3"),
        ("auto", "three", None),
    ],
)
def test_the_answer_is_found_in_its_form(form, response, answer):
    assert extract_answer(response, form) == answer


def test_equal_answers_have_equal_numbers():
    responses = [rf"\boxed{{{text}}}" for text in ("0.5", r"\frac{1}{2}", "Yes", "yes", "1/2", "2")]
    assert number_answers([*responses, "nothing"], "boxed") == [0, 0, 1, 1, 0, 2, None]


def test_hostile_completions_take_no_time():
    hostile = ["<answer>" * 20_000, r"\boxed{" * 20_000, "answer:" * 20_000, r"\boxed{" + "9" * 100_000 + "}"]
    assert len(number_answers(hostile, "auto")) == 4


def test_every_shipped_reward_function_has_a_form():
    assert set(SHIPPED_FORMS) == set(SHIPPED_REWARDS)


def make_row(prompt: int, sample: int, accuracy: float | None, **changes) -> RolloutRow:
    """Return a rollout; accuracy None: its scoring failed."""
    scored = accuracy is not None
    row = replace(
        ROW,
        prompt_id=f"val:{prompt}",
        sample=sample,
        response=rf"\boxed{{{'right' if accuracy == 1 else f'wrong {sample}'}}}",
        reward=0.9 * accuracy if scored else 0.0,
        parts={"overall": 0.9 * accuracy, "accuracy": accuracy} if scored else {},
        outcome="ok" if scored else "failed",
        error="" if scored else "ValueError: no",
        num_tokens=10 + sample,
        ground_truth="right",
        row={"level": prompt % 2, "meta": {"topic": "area"}},
        num_prompt_tokens=5,
    )
    return replace(row, **changes)


def outcomes(rows, ks=(1, 2)):
    return outcomes_of(rows, accuracy="accuracy", form="auto", ks=ks)


ROWS = [make_row(0, 0, 1.0), make_row(0, 1, 0.0), make_row(1, 0, 1.0), make_row(1, 1, 1.0), make_row(2, 0, 0.0)]


def test_means_are_over_completions_and_pass_at_k_over_prompts():
    summary = summarize(outcomes([*ROWS, make_row(2, 1, 0.0, finish_reason="length")]), accuracy="accuracy")
    assert summary.accuracy.value == 0.5
    assert summary.parts["overall"].value == pytest.approx(0.45)
    assert summary.pass_at[1].value == 0.5
    assert summary.pass_at[2].value == pytest.approx(2 / 3)
    assert summary.majority_at[2].value == pytest.approx((0.5 + 1 + 0) / 3)
    assert (summary.num_prompts, summary.num_completions) == (3, 6)
    assert summary.length.value == 10.5
    assert summary.max_length == 11
    assert summary.cut.value == pytest.approx(1 / 6)
    assert summary.prompt_length == 5
    assert summary.pass_at[1].low == pytest.approx(summary.accuracy.low)
    nothing = summarize([], accuracy="accuracy")
    assert isnan(nothing.accuracy.value)
    assert json.loads(json.dumps(to_json(asdict(nothing)), allow_nan=False))["accuracy"]["value"] is None
    assert accuracy_name(ROWS) == "accuracy"
    assert accuracy_name([replace(row, parts={"overall": 0.0}) for row in ROWS]) == "overall"


def test_completions_that_were_not_scored_are_counted_and_in_no_mean():
    failed = make_row(2, 1, None)
    summary = summarize(outcomes([*ROWS, failed, make_row(3, 0, None), make_row(3, 1, None)]), accuracy="accuracy")
    assert summary.num_failed == 3
    assert summary.accuracy.value == pytest.approx(3 / 5)
    assert summary.pass_at[2].num_prompts == 2, "two prompts have fewer than 2 scored completions"
    assert summary.num_prompts == 4


def test_summaries_by_column():
    found = summarize_by(outcomes(ROWS), "level", accuracy="accuracy")
    assert {value: summary.num_prompts for value, summary in found.items()} == {"0": 2, "1": 1}
    assert list(summarize_by(outcomes(ROWS), "meta.topic", accuracy="accuracy")) == ["area"]
    assert list(summarize_by(outcomes(ROWS), "dataset", accuracy="accuracy")) == ["val"]


def test_rows_without_the_column_are_shown_as_such_and_an_unknown_column_is_an_error():
    rows = [*ROWS, make_row(9, 0, 1.0, row={})]
    assert "(none)" in summarize_by(outcomes(rows), "level", accuracy="accuracy")
    nulls = [make_row(0, 0, 1.0, row={"meta": None}), *ROWS]
    assert list(summarize_by(outcomes(nulls), "meta.topic", accuracy="accuracy")) == ["area", "(none)"]
    with pytest.raises(DataError, match="no column 'lvel'; did you mean level"):
        check_columns([row.row for row in ROWS], ["lvel"])


def test_models_are_compared_on_the_prompts_that_both_have():
    second = [replace(row, parts={"overall": 0.0, "accuracy": 0.0}) for row in ROWS if row.prompt_id != "val:2"]
    difference = compare_outcomes(outcomes(ROWS), outcomes(second))
    assert difference.num_prompts == 2
    assert difference.value == pytest.approx((0.5 + 1.0) / 2)
    assert difference.num_better == 2


def test_k_is_a_power_of_two_or_n():
    assert [default_ks(n) for n in (1, 6, 8)] == [(1,), (1, 2, 4, 6), (1, 2, 4, 8)]
