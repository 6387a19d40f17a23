r"""What the comparison of final answers must tell apart, and what it must not: by hand.

Each case is also tried with answer and ground truth exchanged.
"""

import itertools

import pytest

from trigon.rewards.verifiers import dapo, geoqa, math, r1v
from trigon.rewards.verifiers.equivalence import is_same_answer


def matrix(name):
    return rf"\begin{{{name}}}1&2\\3&4\end{{{name}}}"


DIFFERENT = {
    "a comma within brackets separates": [
        ("(0,100)", "100"),
        ("(0,100)", "0100"),
        ("[0, 360]", "360"),
        ("(0,100]", "[0,100)"),
        ("(1,000)", "1000"),
    ],
    "a comma before a space, or not before three digits, separates": [
        ("1, 200", "1200"),
        ("1,2", "12"),
        ("1,23", "123"),
        ("1,2345", "12345"),
        ("1{,}2", "12"),
    ],
    "Greek letters and other symbols count": [
        (r"2\psi", "2"),
        (r"\frac{h\nu}{2}", r"\frac{h}{2}"),
        (r"3\hbar", "3"),
        (r"\Gamma(5)", "5"),
        (r"\zeta(2)", "2"),
    ],
    "commands with brackets count": [
        (r"\lfloor x\rfloor", "x"),
        (r"\lceil x\rceil", r"\lfloor x\rfloor"),
        (r"\|x\|", "|x|"),
        (r"\binom{5}{2}", "52"),
        (r"\binom{52}{3}", r"\binom{5}{23}"),
        (matrix("pmatrix"), matrix("vmatrix")),
    ],
    "relations and logic count": [
        (r"x\ll y", r"x\gg y"),
        (r"x\ll y", r"y\ll x"),
        (r"\forall x", r"\exists x"),
        (r"A\subset B", r"A\supset B"),
        (r"A\subset B", r"A\subseteq B"),
        (r"A\subset B", "AB"),
    ],
    "unknown commands count": [
        (r"\foo", r"\bar"),
        (r"2\foo", "2"),
        (r"\foo{1}{23}", r"\foo{12}{3}"),
        (r"\foo x", r"\foox"),
        (r"a\foo b", r"b\foo a"),
    ],
    "marks on letters count": [
        (r"\vec{v}", "v"),
        (r"\hat{x}", r"\bar{x}"),
        (r"\overline{z}", "z"),
        (r"\overline{x+y}", "x+y"),
        (r"\overrightarrow{AB}", "AB"),
    ],
    "characters that only look like digits and letters": [
        ("①②", "12"),
        ("①②", "②①"),
        ("⑴⑵", "2"),
        ("xᵃ", "xa"),
        ("xⁿ", "xn"),
    ],
    "a repeating decimal": [
        (r"0.\overline{3}", "0.33333"),
        (r"0.1\overline{6}", r"0.\overline{16}"),
        (r"1.\bar{3}", "1.3"),
        (r"0.\dot{3}", "0.3"),
    ],
    "several values where one is asked for": [
        (r"1\text{ or }2", "1"),
        (r"1\text{ or }2", "2"),
        (r"1\text{ or 2}", "1"),
        (r"1 \text{ and } 2", "1"),
        (r"1\mbox{ or }2", "1"),
        ("1 or 2", "1"),
    ],
    "another choice": [
        ("B. 12", "C"),
        ("B. 12", "12 B"),
        ("A or B", "A"),
        ("A. or B", "A"),
        ("(A) (B)", "A"),
        ("A. B. C.", "A"),
    ],
    "what has to be written out, and order where it counts": [
        ("10^3+1", "1001"),
        ("310^2", "31000"),
        ("10^{-3}", "1000"),
        ("(3,5)", "(5,3)"),
        ("[3,5]", "[5,3]"),
        ("3,5", "5,5"),
    ],
    "nothing": [("", ""), (" ", ""), ("", "0"), ("$$", ""), (r"\%", "%^\\circ"), (r"\text{}", "$")],
}

EQUAL = {
    "thousands": [
        ("1,234", "1234"),
        ("12,345,678", "12345678"),
        ("1{,}234", "1234"),
        (r"1,\!234", "1234"),
        ("1,234.5", "1234.5"),
        (r"\(1,000\)", "1000"),
    ],
    "powers of ten": [
        ("10^{6}", "1,000,000"),
        (r"3\times10^6", "3000000"),
        (r"1.5 \cdot 10^3", "1500"),
        ("-10^2", "-100"),
    ],
    "a choice with its text": [
        ("B. 12", "B"),
        ("(B) 12", "B"),
        ("B) 12", "(B)"),
        ("B: twelve apples", "B"),
        (r"\text{(B) }12", "B"),
        (r"\textbf{(B)}\ 12", "B"),
    ],
    "lists and sets have no order": [
        ("3, 5", "5, 3"),
        ("5,3", "3, 5"),
        (r"\{3, 5\}", r"\{5, 3\}"),
        (r"x=3, x=5", "5, 3"),
        (r"x = 3 \text{ or } x = 5", "5, 3"),
        (r"x = -3 \text{ or } 3", "-3, 3"),
        (r"1\text{ or }2", "2 or 1"),
    ],
    "ratios": [
        ("2/3", "2:3"),
        (r"\frac{2}{3}", "2:3"),
        ("2 : 3", "2:3"),
        (r"2\colon 3", "2:3"),
        (r"\sqrt{2}:1", r"\sqrt2/1"),
    ],
    "symbols, as a command and as a character": [
        (r"\psi", "ψ"),
        (r"\Psi", "Ψ"),
        (r"\zeta+1", "1+ζ"),
        (r"2\hbar", r"\hbar\cdot 2"),
        (r"\frac{h\nu}{2}", r"\frac12 \nu h"),
        (r"A\subset B", "A ⊂ B"),
        (r"\forall x", "∀x"),
        (r"p\land q", r"p \wedge q"),
    ],
    "layout": [
        (r"\mathrm{B}", "B"),
        (r"\bigl(1,2\bigr)", "(1,2)"),
        (r"\displaystyle\frac{1}{2}", r"\frac12"),
        (r"5\;\mathrm{cm}", "5"),
        (r"30\circ", "30"),
    ],
    "repeating decimals": [
        (r"0.\overline{3}", r"\frac13"),
        (r"0.\bar{3}", "1/3"),
        (r"0.\dot{3}", "1/3"),
        (r"0.\dot{1}4285\dot{7}", "1/7"),
        (r"0.1\overline{6}", "1/6"),
    ],
    "units": [(r"5\text{ apples}", "5"), (r"5\text{ cm}^2", "5"), (r"x=5\text{ m}.", "5")],
}


def cases(groups):
    return [pytest.param(*pair, id=f"{name}: {pair[0]}") for name, pairs in groups.items() for pair in pairs]


@pytest.mark.parametrize(("answer", "truth"), cases(DIFFERENT))
def test_different_answers_are_told_apart(answer, truth):
    assert not is_same_answer(answer, truth)
    assert not is_same_answer(truth, answer)


@pytest.mark.parametrize(("answer", "truth"), cases(EQUAL))
def test_equal_answers_are_recognized(answer, truth):
    assert is_same_answer(answer, truth)
    assert is_same_answer(truth, answer)


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("1,2", "12", False),
        ("1,234", "1234", True),
        ("$1{,}234$", "1234", True),
        (r"0.\overline{3}", "0.3", False),
        (r"\overline{AB}", "AB", True),
        ("$1$ or $2$", "1", False),
        ("x = 1 or x = 2", "2", False),
        ("x = 1, x = 2", "2", False),
        ("x = 2 + 3 = 5", "5", True),
        ("The area is $5$ square cm", "5", True),
    ],
)
def test_dapo_compares_text_by_the_same_rules(answer, truth, right):
    assert dapo.accuracy_reward(f"Answer: {answer}", truth) == (1.0 if right else -1.0)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        *itertools.product([r"1\text{ or }2", "1 or 2", r"x=1\text{ or }x=2"], ["1", "2", "12", "1.0"]),
        *itertools.product([r"1\text{ or }2", "1 or 2", r"\text{1 or 2}"], ["1,2", "1, 2"]),
    ],
)
def test_an_answer_that_names_two_values_is_neither_one_of_them_nor_the_list_of_both(answer, truth):
    assert accuracies(answer, truth) == [0.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize("truth", ["", " ", "$$", r"\text{}", "%"])
@pytest.mark.parametrize("answer", ["", " ", "$$", r"\text{ }", r"\text{}", "{}"])
def test_an_empty_answer_is_wrong_even_for_an_empty_ground_truth(answer, truth):
    assert all(accuracy <= 0 for accuracy in accuracies(answer, truth))
    if not answer.strip():
        assert r1v.accuracy_reward("", truth) == geoqa.accuracy_reward("", truth) == 0.0


def accuracies(answer, truth):
    tagged = f"<think>a</think><answer>{answer}</answer>"
    return [
        math.accuracy_reward(rf"<think>a</think>\boxed{{{answer}}}", truth),
        r1v.accuracy_reward(tagged, truth),
        geoqa.accuracy_reward(tagged, truth),
        dapo.accuracy_reward(f"Answer: {answer}", truth),
    ]
