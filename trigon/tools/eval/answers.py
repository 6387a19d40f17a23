r"""Finds the answer in a completion, and which completions of a prompt have equal answers.

Used by majority votes only. Whether a completion is right is decided by the reward function, which
may find the answer in another way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, assert_never

from trigon.rewards.verifiers.equivalence import extract_boxed, is_same_answer

AnswerForm = Literal["auto", "boxed", "tag", "line", "text"]
r"""Where the answer of a completion is.

boxed: the last \boxed{...}. tag: the last <answer>...</answer>. line: what follows the last
`Answer:` in its line. text: the whole completion. auto: the first of boxed, tag and line that the
completion has.
"""

SHIPPED_FORMS: dict[str, AnswerForm] = {
    "math": "boxed",
    "r1v": "tag",
    "counting": "tag",
    "geoqa": "tag",
    "vqa": "tag",
    "dapo": "line",
    "android_gui": "text",
    "environment": "text",
}
"""Where the shipped reward functions find the answer; others: auto."""

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def extract_answer(response: str, form: AnswerForm) -> str | None:
    """Return the answer of a completion without white space around it; None if it has none."""
    match form:
        case "boxed":
            answer = extract_boxed(response)
        case "tag":
            found = _TAG.findall(response)
            answer = found[-1] if found else None
        case "line":
            found = _LINE.findall(response)
            answer = found[-1] if found else None
        case "text":
            answer = response
        case "auto":
            forms: tuple[AnswerForm, ...] = ("boxed", "tag", "line")
            return next((answer for each in forms if (answer := extract_answer(response, each)) is not None), None)
        case _:
            assert_never(form)
    return answer.strip() or None if answer is not None else None


def number_answers(responses: Sequence[str], form: AnswerForm) -> list[int | None]:
    """Return the number of each completion's answer; equal answers have equal numbers.

    Answers are equal if they differ in letter case only, or if the comparison of the shipped reward
    functions takes them for equal, as text or as mathematics: 0.5 and 1/2. Each is compared with
    the first answer of each number.
    Returns: numbers from 0 in the order of first occurrence; None for no answer.
    """
    numbers: dict[str, int] = {}
    first: list[str] = []
    result: list[int | None] = []
    for response in responses:
        answer = extract_answer(response, form)
        if answer is None:
            result.append(None)
            continue
        key = answer.casefold()
        if key not in numbers:
            same = next((number for number, other in enumerate(first) if is_same_answer(answer, other)), None)
            if same is None:
                same = len(first)
                first.append(answer)
            numbers[key] = same
        result.append(numbers[key])
    return result
