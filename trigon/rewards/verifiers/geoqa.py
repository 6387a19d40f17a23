r"""Geometry with answers such as `145°`, `10√3` or `25π cm²`, in `<think> ... </think> <answer> ... </answer>`.

Knows the typography of such answers: GeoQA (arXiv:2105.14517) writes them as people do, models often in LaTeX. Values
are then compared as mathematics. Keeps the sequential contract.
"""

from __future__ import annotations

import re
from typing import Any

from trigon.rewards.verifiers.math import is_same_answer, weighted
from trigon.rewards.verifiers.r1v import format_reward, given_answer, untagged

REWARD_TYPE = "sequential"

MAX_ANSWER_CHARACTERS = 500
"""A longer answer is no value; it is not compared."""

_EXPONENTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_SYMBOLS = str.maketrans({"π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "−": "-", "－": "-", "＝": "=", "$": None})
_DEGREES = re.compile(r"\s*(?:°|º|\^\s*\{?\s*\\circ\s*\}?|\\degrees?\b|\bdegrees?\b)")
_LENGTHS = re.compile(
    r"\s*(?:\\(?:text|mathrm)\s*\{\s*)?"
    r"(?<![a-zA-Z])(?:mm|cm|dm|km|m|meters?|metres?|centimeters?|centimetres?|units?)(?:\s*\^\s*\{?\s*[23]\s*\}?)?\s*\}?"
    r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?$"
)


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, and both parts."""
    accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
    form = format_reward(reward_input["response"])
    return weighted(accuracy, form, format_weight)


def accuracy_reward(response: str, ground_truth: object) -> float:
    """Return 1.0 if the given value is the ground truth, units aside, else 0.0. An empty answer is never right."""
    given = given_answer(response)
    if not given or len(given) > MAX_ANSWER_CHARACTERS:
        return 0.0
    given = as_latex(given)
    return 1.0 if given and is_same_answer(given, as_latex(untagged(ground_truth))) else 0.0


def as_latex(value: str) -> str:
    r"""Return a value without its name, unit and typography: "∠A = 145°": "145"; "10√3 cm": "10\sqrt{3}"."""
    value = value.strip().rstrip(".。").translate(_SYMBOLS).rpartition("=")[2]
    value = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda found: f"^{{{found[0].translate(_EXPONENTS)}}}", value)
    value = re.sub(
        r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[a-z]))", lambda found: rf"\sqrt{{{found[1] or found[2]}}}", value
    )
    value = _LENGTHS.sub("", _DEGREES.sub("", value).strip())
    return value.strip()
