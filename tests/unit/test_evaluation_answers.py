"""Where the answer of a completion is, and which answers are equal in a vote."""

import pytest

from trigon.config.names import SHIPPED_REWARDS
from trigon.tools.eval.results import extract_answer, number_answers
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
    responses = [
        r"\boxed{0.5}",
        r"\boxed{\frac{1}{2}}",
        r"\boxed{Yes}",
        r"\boxed{yes}",
        "nothing",
        r"\boxed{1/2}",
        r"\boxed{2}",
    ]
    assert number_answers(responses, "boxed") == [0, 0, 1, 1, None, 0, 2]


def test_hostile_completions_take_no_time():
    hostile = ["<answer>" * 20_000, r"\boxed{" * 20_000, "answer:" * 20_000, r"\boxed{" + "9" * 100_000 + "}"]
    assert len(number_answers(hostile, "auto")) == 4


def test_every_shipped_reward_function_has_a_form():
    assert set(SHIPPED_FORMS) == set(SHIPPED_REWARDS)
