r"""Geometry with answers such as `145°`, `10√3` or `25π cm²`.

The format is `<think> ... </think> <answer> ... </answer>`. GeoQA (arXiv:2105.14517) writes answers
in plain typography, models often in LaTeX; both are converted to LaTeX and compared as mathematics.
Follows the sequential contract.
"""

from __future__ import annotations

import re
from typing import Any

from trigon.rewards.verifiers.equivalence import is_same_answer
from trigon.rewards.verifiers.math import weighted
from trigon.rewards.verifiers.notation import after_name
from trigon.rewards.verifiers.r1v import extract_answer, format_reward, strip_tags

REWARD_TYPE = "sequential"

MAX_ANSWER_CHARACTERS = 500
"""A longer answer is wrong; it is not compared."""

_EXPONENTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_SYMBOLS = str.maketrans({"π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "−": "-", "－": "-", "＝": "=", "$": None})
_DEGREES = re.compile(r"\s*(?:°|º|\^\s*\{?\s*\\circ\s*\}?|\\degrees?\b|\bdegrees?\b)")
_LENGTHS = re.compile(
    r"\s*(?:\\(?:text|mathrm)\s*\{\s*)?"
    r"(?<![a-zA-Z])(?:mm|cm|dm|km|m|meters?|metres?|centimeters?|centimetres?|units?)(?:\s*\^\s*\{?\s*[23]\s*\}?)?\s*\}?"
    r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?$"
)


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, with both parts."""
    accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
    format_score = format_reward(reward_input["response"])
    return weighted(accuracy, format_score, format_weight)


def accuracy_reward(response: str, ground_truth: object) -> float:
    """Return 1.0 if the answer equals the ground truth without units, else 0.0.

    An empty answer is always wrong.
    Raises: RewardError if the ground truth is not text or a number.
    """
    truth = to_latex(strip_tags(ground_truth))
    answer = extract_answer(response)
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0
    answer = to_latex(answer)
    return 1.0 if answer and is_same_answer(answer, truth) else 0.0


def to_latex(value: str) -> str:
    r"""Return a value as LaTeX, without its name and unit.

    Examples: "∠A = 145°" gives "145", and "10√3 cm" gives "10\sqrt{3}".
    """
    value = after_name(value.strip().rstrip(".。").translate(_SYMBOLS))
    value = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"^{{{match[0].translate(_EXPONENTS)}}}", value)
    value = re.sub(
        r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[a-z]))", lambda match: rf"\sqrt{{{match[1] or match[2]}}}", value
    )
    value = _LENGTHS.sub("", _DEGREES.sub("", value).strip())
    return value.strip()
