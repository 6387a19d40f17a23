"""Comparison of final answers: by hand, on a table of 764 pairs, and invariants."""

import json
from pathlib import Path

import pytest

from trigon.rewards.verifiers.equivalence import MAX_ANSWER_CHARACTERS, extract_boxed, is_same_answer
from trigon.rewards.verifiers.expression import NotAnExpression, TooComplex, is_equal, parse

# Answers as people and models write them. "mathruler" is the verdict of mathruler 0.1.0, on which
# EasyR1's rewards are based; a pair with another verdict here has a reason.
TABLE = json.loads((Path(__file__).parent / "data" / "answers.json").read_text(encoding="utf-8"))


def test_ordinary_answers_have_the_verdicts_of_the_table():
    verdicts = {(pair["answer"], pair["truth"]): is_same_answer(pair["answer"], pair["truth"]) for pair in TABLE}
    assert len(verdicts) == len(TABLE) >= 300
    expected = {(pair["answer"], pair["truth"]): pair["equal"] for pair in TABLE}
    assert {pair: verdict for pair, verdict in verdicts.items() if verdict != expected[pair]} == {}


def test_a_verdict_that_differs_from_mathruler_has_a_reason():
    assert [pair for pair in TABLE if (pair["equal"] != pair["mathruler"]) != bool(pair.get("reason"))] == []
    assert sum(pair["equal"] == pair["mathruler"] for pair in TABLE) > 0.85 * len(TABLE)


def test_every_answer_equals_itself_and_equality_is_symmetric():
    answers = [pair["answer"] for pair in TABLE if pair["answer"]]  # an empty one equals nothing
    assert [answer for answer in answers if not is_same_answer(answer, answer)] == []
    assert [pair for pair in TABLE if is_same_answer(pair["truth"], pair["answer"]) != pair["equal"]] == []


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} or \boxed{ 2 }", "2"),
        (r"\boxed{\{1,2\}} }", r"\{1,2\}"),
        (r"\boxed{\text{a } b}} c}", r"\text{a } b"),
        (r"\boxed{1 \boxed{2}}", "2"),
        (r"\boxed{}", ""),
        (r"\boxed{7", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed {7}", None),
        (r"\boxed7", None),
        (r"\boxed{7} \boxed{8", None),  # the last box counts
        ("7", None),
        ("", None),
    ],
)
def test_extraction_of_the_last_box(response, content):
    assert extract_boxed(response) == content


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("1/2", "0.5", True),
        ("-2^2", "-4", True),
        ("1/2x", "x/2", True),
        ("-1&1/2", "-3/2", True),
        ("sqrt(12)", "2sqrt(3)", True),
        ("sqrt(3+2sqrt(2))", "1+sqrt(2)", True),
        ("sqrt(2)", "1.41421356237309504880168872420969807", False),
        ("sqrt(x^2)", "x", False),  # not for negative x
        ("(x^2-1)/(x-1)", "x+1", True),
        ("sqrt(x-5)", "sqrt(5-x)", False),
        ("sin(pi/6)", "1/2", True),
        ("cosx^2", "cos(x^2)", True),
        ("sin^2(x)+cos^2(x)", "1", True),
        ("log(8)", "3log(2)", True),
        ("log(100)", "2", False),  # the base is not known
        ("log_2(8)", "3", True),
        ("1/0", "1/0", False),  # has no value
    ],
)
def test_values_by_hand(left, right, equal):
    assert is_equal(left, right) is equal


@pytest.mark.parametrize(
    "text", ["", "cat", "x=1", "1,2", "(1", "1)", "2+", "*2", "1..2", "1.2.3", "a'b", "inf", "x__y", "1&2"]
)
def test_other_text_is_not_an_expression(text):
    with pytest.raises(NotAnExpression):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9",
        "51!",
        "7" * 201,
        "(" * 50 + "1" + ")" * 50,
        "1+" * 200 + "1",
        "sin(10^9)",
        "a+b+c+d+f+g+h",
        "((3/7)^999)^2",
    ],
)
def test_what_exceeds_the_bounds_is_too_complex(text):
    with pytest.raises(TooComplex):
        is_equal(text, text + "+0")


def test_a_long_answer_is_only_right_as_the_same_text():
    long = "1+" * MAX_ANSWER_CHARACTERS + "1"
    assert is_same_answer(long, long)
    assert not is_same_answer(long, long + "+0")
    assert is_same_answer("9^{9^9}", " 9^{9^9} ")
