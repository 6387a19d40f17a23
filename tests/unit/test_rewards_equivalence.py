"""Comparison of final answers: by hand, on a table of 764 pairs, and invariants."""

import json
from pathlib import Path

import pytest

from trigon.rewards.verifiers.equivalence import MAX_ANSWER_CHARACTERS, extract_boxed, is_same_answer
from trigon.rewards.verifiers.expression import NotAnExpression, TooComplex, parse
from trigon.rewards.verifiers.notation import plain_form, short_form
from trigon.rewards.verifiers.values import is_equal

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


def test_the_migration_page_gives_the_numbers_of_the_table():
    page = (Path(__file__).parents[2] / "docs" / "from-easyr1.md").read_text(encoding="utf-8")
    same = sum(pair["equal"] == pair["mathruler"] for pair in TABLE)
    assert f"{len(TABLE)} pairs" in page
    assert f"{same} verdicts" in page


def test_every_answer_equals_itself_and_equality_is_symmetric():
    answers = [pair["answer"] for pair in TABLE if pair["answer"]]  # an empty one equals nothing
    assert [answer for answer in answers if not is_same_answer(answer, answer)] == []
    assert [pair for pair in TABLE if is_same_answer(pair["truth"], pair["answer"]) != pair["equal"]] == []


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} or \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
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
    ("answer", "plain", "short"),
    [
        (r"x = \dfrac12", "x=1/2", r"\frac{1}{2}"),
        (r"-1\frac{1}{2}", "-1&1/2", r"-1\frac{1}{2}"),
        (r"\frac{x+1}{2\sqrt{3}}", "(x+1)/(2sqrt(3))", r"\frac{x+1}{2\sqrt{3}}"),
        (r"12.0\text{ cm}^2", "12.0", "12.0"),
        (r"2^{-1} x^{n+1}", "2^-1x^(n+1)", "2^{-1}x^{n+1}"),
        (r"\left\{ \text{A}, B \right\}", "{a,b}", r"\{\text{A},B\}"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "[1,2;3,4]", r"\begin{pmatrix}1&2\3&4\end{pmatrix}"),
        ("2√12 m²", "2sqrt(12)m^2", "2√12m²"),
    ],
)
def test_normal_forms_by_hand(answer, plain, short):
    assert plain_form(answer) == plain
    assert short_form(answer) == short


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("1/2", "0.5", True),
        ("1/3", "0.3333333333333333333333333333", False),
        ("-2^2", "-4", True),
        ("2^3^2", "512", True),
        ("2^-1", "1/2", True),
        ("1/2x", "x/2", True),
        ("-1&1/2", "-3/2", True),
        ("5!", "120", True),
        ("sqrt(12)", "2sqrt(3)", True),
        ("sqrt(2)sqrt(3)", "sqrt(6)", True),
        ("sqrt(3+2sqrt(2))", "1+sqrt(2)", True),
        ("sqrt(2)", "1.41421356237309504880168872420969807", False),
        ("root(3,-8)", "-2", True),
        ("sqrt(x^2)", "x", False),  # not for negative x
        ("(x^2-1)/(x-1)", "x+1", True),
        ("sqrt(x-5)", "(x-5)^(1/2)", True),
        ("sqrt(x-5)", "sqrt(5-x)", False),
        ("sin(pi/6)", "1/2", True),
        ("cosx^2", "cos(x^2)", True),
        ("sin^2(x)+cos^2(x)", "1", True),
        ("tan(x)", "sin(x)/cos(x)", True),
        ("log(8)", "3log(2)", True),
        ("log(100)", "2", False),  # the base is not known
        ("log_2(8)", "3", True),
        ("exp(x+y)", "exp(x)exp(y)", True),
        ("x_1+x_2", "x_2+x_1", True),
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
        "2^1001",
        "10^-2000",
        "1e999",
        "7" * 201,
        "(" * 50 + "1" + ")" * 50,
        "-" * 99 + "1",
        "1+" * 200 + "1",
        "sin(10^9)",
        "exp(10^7)",
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
