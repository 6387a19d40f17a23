r"""Mathematics in the format `<think> ... </think> ... \boxed{answer}`: nine tenths for the answer, one for the format.

Knows this format and how two mathematical answers are compared (mathruler, nowhere else imported). Keeps the sequential
contract. It reads hostile text, so every search here takes time linear in the answer; comparing may hang in sympy.
"""

from __future__ import annotations

import re
from typing import Any

from mathruler.grader import extract_boxed_content, grade_answer

REWARD_TYPE = "sequential"


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.1) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, and both parts."""
    response = tidy(reward_input["response"])
    accuracy = accuracy_reward(response, reward_input["ground_truth"])
    form = format_reward(response)
    return weighted(accuracy, form, format_weight)


def tidy(response: str) -> str:
    """Return the response without white space around <, > and /: some models write `< think >`."""
    response = re.sub(r"([<>/])\s+", r"\1", response)
    return re.sub(r"(?<!\s)\s+([<>/])", r"\1", response)


def format_reward(response: str) -> float:
    r"""Return 1.0 if the response is `<think>...</think>...\boxed{...}...` from its first character, else 0.0."""
    position = 0
    for piece in ("<think>", "</think>", r"\boxed{", "}"):
        found = response.find(piece, position)
        if found < 0 or (position == 0 and found > 0):
            return 0.0
        position = found + len(piece)
    return 1.0


def accuracy_reward(response: str, ground_truth: object) -> float:
    r"""Return 1.0 if the last \boxed{} of the response holds the ground truth, else 0.0."""
    if r"\boxed{" not in response:  # mathruler's reading of no box, "None", might just equal a ground truth
        return 0.0
    return 1.0 if is_same_answer(extract_boxed_content(response), ground_truth) else 0.0


def weighted(accuracy: float, form: float, format_weight: float) -> dict[str, float]:
    """Return a reply of two parts: overall = (1 - format_weight) * accuracy + format_weight * format."""
    return {"overall": (1 - format_weight) * accuracy + format_weight * form, "format": form, "accuracy": accuracy}


def is_same_answer(given: str, ground_truth: object) -> bool:
    """Say whether two mathematical expressions are equal, as text or to sympy."""
    return bool(grade_answer(given, str(ground_truth)))
