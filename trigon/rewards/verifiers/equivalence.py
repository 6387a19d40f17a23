r"""Final answers of mathematics: extraction from `\boxed{}`, and comparison with the ground truth.

An answer is right if it has the same text after normalization, or the same value. Verdicts are
those of the answer checker of PRM800K (arXiv:2305.20050), which other projects use through
mathruler, except where tests/unit/data/answers.json gives a reason. Text of a model is only parsed
by our grammar (expression.py), never evaluated as Python, and every comparison is bounded in time:
what is too complex is not equal.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from trigon.errors import RewardError
from trigon.rewards.contract import short_repr
from trigon.rewards.verifiers.expression import NotAnExpression, TooComplex, is_equal
from trigon.rewards.verifiers.notation import OR, join_values, plain_form, without_name, without_text, without_unit

MAX_ANSWER_CHARACTERS = 2000
"""A longer answer is only right if it has the same text as the ground truth."""

MAX_SET_ELEMENTS = 20
_MAX_INTEGER_DIGITS = 400
_INTEGER_TOLERANCE = Decimal("1e-7")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?")
_FRACTION = re.compile(r"-?\d+\.?/0*[1-9]\d*\.?")
_SCIENTIFIC = re.compile(r"(-?)(?:(\d+\.?\d*|\.\d+)\*)?10\^\(?\+?(\d{1,3})\)?")
_RATIO = re.compile(r"([^:=]+):([^:=]+)")
_NAMED = re.compile(r"([^\W\d]\w?)=([^=]+)")
_LABEL = re.compile(r"\(?([A-J])(?:[.):]\s*(.*))?", re.IGNORECASE | re.DOTALL)
_OTHER_LABEL = re.compile(r"\b[A-J]\s*[.):]|^[A-J]$|(?:\bor\b|\band\b|[,;/&])\s*\(?[A-J]\b")
_EMPTY = re.compile(r"\\text\s*\{\s*\}|[\s$]")
_STYLE = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|rm|bf)(?![a-zA-Z])|\\[ ,;]|\\quad|[{}$*~]")
_OPENING, _CLOSING = "([{", ")]}"
_SIGNS = {True: ("+", "-"), False: ("±",)}


def extract_boxed(response: str) -> str | None:
    r"""Return the content of the last \boxed{...}, or None if there is none or it is not closed."""
    start = response.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for brace in re.finditer(r"[{}]", response[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return response[start : start + brace.start()].strip()
    return None


def ground_truth_text(ground_truth: object) -> str:
    """Return a ground truth as text. Raises: RewardError if it is not text or a number."""
    if isinstance(ground_truth, str | int | float):
        return str(ground_truth)
    kind = "empty" if ground_truth is None else f"a {type(ground_truth).__name__}"
    raise RewardError(
        f"the ground truth {short_repr(ground_truth)} is {kind}, expected text or a number; "
        "set data.answer_key to the column that contains the final answer itself, or use a reward function of your own"
    )


def is_same_answer(answer: str, ground_truth: object) -> bool:
    """Return whether two final answers are equal, as text or as mathematics.

    Integers and simple fractions must be written out: 2+2 is not 4, and 2/4 is not 1/2; 10^3 is
    1000. A list without brackets has no order, and is not "1 or 2". An empty answer equals nothing.
    Raises: RewardError as ground_truth_text.
    """
    truth = ground_truth_text(ground_truth)
    if not _EMPTY.sub("", answer):
        return False
    if without_text(answer.strip()) == without_text(truth.strip()):
        return True
    if max(len(answer), len(truth)) > MAX_ANSWER_CHARACTERS:
        return False
    if _is_same_choice(answer, truth):
        return True
    answer, truth = join_values(answer, truth)
    try:
        if _is_same(plain_form(answer), plain_form(truth)):
            return True
        bare_answer, bare_truth = (without_name(without_unit(text).strip()) for text in (answer, truth))
        return _is_same(plain_form(bare_answer), plain_form(bare_truth))
    except TooComplex:
        return False


def _is_same_choice(answer: str, truth: str) -> bool:
    """Return whether one is a choice's letter, and the other this letter with a text: "B. 12"."""
    found = [_LABEL.fullmatch(_STYLE.sub(" ", text).strip()) for text in (answer, truth)]
    if found[0] is None or found[1] is None or found[0][1].upper() != found[1][1].upper():
        return False
    texts = [(match[2] or "").strip() for match in found if match is not None]
    return not all(texts) and not any(map(_OTHER_LABEL.search, texts))


def _is_same(answer: str, truth: str) -> bool:
    """Return whether two answers in plain form are equal. Raises: TooComplex."""
    answer, truth = (_normalize_integer(text) for text in (answer, truth))
    if not _without_braces(answer):  # only a unit, or only commands that are not known
        return False
    if _without_braces(answer) == _without_braces(truth):
        return True
    (answers, separators), (truths, true_separators) = _elements(answer), _elements(truth)
    answers, truths = _without_common_name(answers, truths), _without_common_name(truths, answers)
    if separators != true_separators or (len(truths) > 1 and _brackets(answer) != _brackets(truth)):
        return False
    if len(truths) > 1 and _brackets(truth) in ("", "{}"):
        return _is_same_set(answers, truths)
    return all(map(_is_same_element, answers, truths))


def _is_same_set(answers: list[str], truths: list[str]) -> bool:
    """Return whether each element has an equal one that no other element equals."""
    if len(truths) > MAX_SET_ELEMENTS:
        raise TooComplex(f"a set of more than {MAX_SET_ELEMENTS} elements")
    remaining = list(truths)
    for answer in answers:
        match = next((truth for truth in remaining if _is_same_element(answer, truth)), None)
        if match is None:
            return False
        remaining.remove(match)
    return True


def _without_common_name(elements: list[str], others: list[str]) -> list[str]:
    """Return the elements ["1", "2"] of "x=1,x=2", if the others have no names."""
    found = [_NAMED.fullmatch(element) for element in elements]
    names = {match[1] if match else "" for match in found}
    if len(elements) == 1 or len(names) > 1 or "" in names or any("=" in other for other in others):
        return elements
    return [match[2] for match in found if match]


def _is_same_element(answer: str, truth: str) -> bool:
    answer, truth = (_normalize_integer(_without_ratio(_without_braces(text))) for text in (answer, truth))
    if answer == truth:
        return True
    if _FRACTION.fullmatch(answer) and _FRACTION.fullmatch(truth):
        return False  # a fraction that is not reduced is not accepted
    if _is_integer(answer) != _is_integer(truth):
        return False
    try:
        return is_equal(answer, truth)
    except NotAnExpression:
        return False


def _elements(text: str) -> tuple[list[str], str]:
    """Return the elements of a list, tuple, interval, set or matrix, and the separators.

    ([text], "") for other texts.
    """
    inner = text[1:-1] if _brackets(text) else text
    elements, separators, depth, start = [], "", 0, 0
    for position, character in enumerate(inner):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character in (",", ";", OR) and depth == 0:
            elements.append(inner[start:position])
            separators += character
            start = position + 1
    elements.append(inner[start:])
    if _brackets(text) in ("", "{}") and any(element.count("±") == 1 for element in elements):
        elements = [element.replace("±", sign) for element in elements for sign in _SIGNS[element.count("±") == 1]]
        return [element.removeprefix("+") for element in elements], "," * (len(elements) - 1)
    return elements, separators


def _brackets(text: str) -> str:
    """Return the brackets around a text, such as "(]", or "" if they do not enclose all of it."""
    if len(text) < 3 or text[0] not in _OPENING or text[-1] not in _CLOSING:
        return ""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return text[0] + text[-1] if position == len(text) - 1 else ""
    return ""


def _without_ratio(text: str) -> str:
    """Return the ratio "2:3" as "2/3"."""
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return text
    first, second = (each if each.isdigit() else f"({each})" for each in ratio.groups())
    return f"{first}/{second}"


def _without_braces(text: str) -> str:
    return text.replace("{", "").replace("}", "")


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"-?\d+", _normalize_integer(text)) is not None


def _normalize_integer(text: str) -> str:
    """Return "1234.0" and "1.234*10^3" as "1234", and text that is not an integer unchanged."""
    scientific = _SCIENTIFIC.fullmatch(text)
    number = f"{scientific[1]}{scientific[2] or 1}e{scientific[3]}" if scientific else text
    if len(number) > _MAX_INTEGER_DIGITS or not _NUMBER.fullmatch(number):
        return text
    try:
        value = Decimal(number)
        integer = value.to_integral_value()
        is_integer = abs(value - integer) <= _INTEGER_TOLERANCE
    except InvalidOperation:  # more digits than the precision of the context
        return text
    return f"{integer:f}" if is_integer and integer != 0 else "0" if is_integer else text
