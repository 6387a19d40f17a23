"""Counting in the format `<think> ... </think> <answer> 3 </answer>`: 0.5 accuracy + 0.5 format.

A count may be written in digits, with separators, as a word, or in a short sentence. An answer with
two different numbers is not a count. Follows the sequential contract.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from trigon.rewards.verifiers.math import weighted
from trigon.rewards.verifiers.r1v import extract_answer, format_reward, strip_tags

REWARD_TYPE = "sequential"

MAX_ANSWER_CHARACTERS = 200
"""A longer answer is wrong; it is not searched for a number."""

_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty"""

NUMBER_WORDS = {word: number for number, word in enumerate(_WORDS.split())} | {"none": 0}
"""English words for small numbers."""

_LARGER = {
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
    "dozen",
    "hundred",
    "thousand",
    "million",
}
"""Words of larger numbers: in "thirty-one", "one" is not the count."""

# Not preceded by a digit, letter, point or comma: no part of "v2" or "1.2.3" is a number.
# [-−]: hyphen and minus sign.
_NUMBER = re.compile(r"(?<![\w.,])[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|[.,]\d)")


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, with both parts.

    Raises: ValueError if the ground truth is not a count.
    """
    accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
    format_score = format_reward(reward_input["response"])
    return weighted(accuracy, format_score, format_weight)


def accuracy_reward(response: str, ground_truth: object) -> float:
    """Return 1.0 if the only number in the answer is the ground truth, else 0.0.

    Raises: as compute_score.
    """
    expected = read_count(strip_tags(ground_truth))
    if expected is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a count")
    return 1.0 if read_count(extract_answer(response)) == expected else 0.0


def read_count(text: str) -> Decimal | None:
    """Return the only number in a text, or None. Number words are read if there are no digits."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    numbers = {Decimal(found.replace(",", "").replace("−", "-")) for found in _NUMBER.findall(text)}
    if not numbers and not re.search(r"\d", text):
        words = re.findall(r"[a-z]+", text.lower())
        if _LARGER.intersection(words):
            return None
        numbers = {Decimal(NUMBER_WORDS[word]) for word in words if word in NUMBER_WORDS}
    return numbers.pop() if len(numbers) == 1 else None
