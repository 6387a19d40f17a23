"""DAPO's reward: +1 or -1 for the line `Answer: ...`, less a soft punishment for answers near the length limit.

DAPO (arXiv:2503.14476), section 3.4. Answers are compared as text after the normalisation of Minerva (arXiv:2206.14858,
appendix D.1). Keeps the sequential contract.
"""

from __future__ import annotations

import re
from typing import Any

REWARD_TYPE = "sequential"

_READ_CHARACTERS = 300
"""Only the end of a response is searched for the answer."""

_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_REMOVED_WORDS = r"""square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents
degrees cm gm pounds meters meals edges students childrentickets multiples"""
_REMOVED_TEX = r"""\text{s} \text{.} \text{}^2 \text{}^3 \text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots"""
_REMOVED = (*_REMOVED_WORDS.split(), *_REMOVED_TEX.split())


def compute_score(
    reward_input: dict[str, Any],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float = 1.0,
) -> dict[str, float]:
    """Return overall = accuracy + overlong_penalty_factor * overlong, the parts, and accuracy mapped to 0 or 1.

    Args: max_response_length: tokens an answer may have. overlong_buffer_length: how many of these, the last ones, the
    punishment grows over. Online filtering wants accuracy_normalized.
    """
    accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
    overlong = overlong_punishment(reward_input["response_length"], max_response_length, overlong_buffer_length)
    return {
        "overall": accuracy + overlong_penalty_factor * overlong,
        "accuracy": accuracy,
        "overlong": overlong,
        "accuracy_normalized": (accuracy + 1.0) / 2.0,
    }


def accuracy_reward(response: str, ground_truth: object) -> float:
    """Return 1.0 if the last `Answer:` near the end of the response is the ground truth, else -1.0."""
    answers = re.findall(r"(?i)answer\s*:\s*([^\n]+)", response[-_READ_CHARACTERS:])
    return 1.0 if answers and normalize(answers[-1]) == normalize(str(ground_truth)) else -1.0


def overlong_punishment(response_length: int, max_response_length: int, overlong_buffer_length: int) -> float:
    """Return 0.0 up to the buffer, falling linearly to -1.0 at max_response_length, and -1.0 beyond (equation 13)."""
    free_length = max_response_length - overlong_buffer_length
    if response_length <= free_length:
        return 0.0
    if response_length > max_response_length:
        return -1.0
    return (free_length - response_length) / overlong_buffer_length


def normalize(answer: str) -> str:
    r"""Return a final answer in a form in which equal ones are mostly equal text: "x = $\frac12$ km": "\frac{1}{2}"."""
    answer = answer.rpartition("=")[2]
    for found, put in _REPLACED:
        answer = answer.replace(found, put)
    for found in _REMOVED:
        answer = answer.replace(found, "")
    answer = re.sub(r"^[^$]*\$([^$]*)\$.*", r"\1", answer)  # what stands between the first two dollar signs
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()
