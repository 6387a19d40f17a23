"""DAPO's reward: +1 or -1 for the line `Answer: ...`, minus a penalty near the length limit.

DAPO (arXiv:2503.14476), section 3.4. Answers are compared as text after the normalization of
Minerva (arXiv:2206.14858, appendix D.1). Follows the sequential contract.
"""

from __future__ import annotations

import re
from typing import Any

from trigon.rewards.verifiers.equivalence import ground_truth_text
from trigon.rewards.verifiers.notation import after_name, join_thousands

REWARD_TYPE = "sequential"

_READ_CHARACTERS = 300
"""The length of the end of a response that is searched for the answer."""

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
_REMOVED_TEX = r"""\text{s} \text{.} \text{}^2 \text{}^3 \text{} \mathrm{th} ^\circ ^{\circ} \; " \dots"""
_REMOVED = (*_REMOVED_WORDS.split(), *_REMOVED_TEX.split())


def compute_score(
    reward_input: dict[str, Any],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float = 1.0,
) -> dict[str, float]:
    """Return overall = accuracy + overlong_penalty_factor * overlong, with both parts.

    accuracy_normalized is the accuracy mapped to 0 or 1, which online filtering needs.
    Args: max_response_length: maximum number of tokens of a completion. overlong_buffer_length: the
    number of tokens before this maximum over which the penalty grows.
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
    """Return 1.0 if the last `Answer:` of the response equals the ground truth, else -1.0.

    An empty answer is always wrong.
    Raises: RewardError if the ground truth is not text or a number.
    """
    truth = normalize(ground_truth_text(ground_truth))
    answers = re.findall(r"(?i)answer\s*:\s*([^\n]+)", response[-_READ_CHARACTERS:])
    answer = normalize(answers[-1]) if answers else ""
    return 1.0 if answer and answer == truth else -1.0


def overlong_punishment(response_length: int, max_response_length: int, overlong_buffer_length: int) -> float:
    """Return the soft overlong punishment of DAPO (equation 13).

    It is 0.0 up to the buffer, falls linearly to -1.0 at max_response_length, and is -1.0 beyond.
    """
    free_length = max_response_length - overlong_buffer_length
    if response_length <= free_length:
        return 0.0
    if response_length > max_response_length:
        return -1.0
    return (free_length - response_length) / overlong_buffer_length


def normalize(answer: str) -> str:
    r"""Return a final answer in normal form: "x = $\frac12$ km" gives "\frac{1}{2}"."""
    answer = join_thousands(after_name(answer))
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    answer = re.sub(
        r"^[^$]*\$([^$]*)\$[^$]*$", r"\1", answer
    )  # the text between two dollar signs, if there are no more
    for command in ("text", "textbf"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\overline\{([A-Za-z]+)\}", r"\1", answer)  # a segment; a repeating decimal keeps it
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    return answer.replace("$", "").strip()
