"""How many are there? `<think> ... </think> <answer> 3 </answer>`: half for the count, half for the format.

Knows how people write a small number: in digits, with separators, as a word, in a short sentence. Refuses to choose: an
answer with two different numbers is no count. Keeps the sequential contract.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from trigon.rewards.verifiers.math import weighted
from trigon.rewards.verifiers.r1v import format_reward, given_answer, untagged

REWARD_TYPE = "sequential"

MAX_ANSWER_CHARACTERS = 200
"""A longer answer is no count; it is not searched."""

_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty"""

NUMBER_WORDS = {word: number for number, word in enumerate(_WORDS.split())} | {"none": 0}
"""English words for the numbers that are counted to."""

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
"""Words of larger numbers: whoever says one of them has not said the small number beside it."""

# No digit, letter, point or comma stands before: of "v2" and "1.2.3" no part is a number. [-−]: hyphen and minus sign.
_NUMBER = re.compile(r"(?<![\w.,])[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|[.,]\d)")


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, and both parts.

    Raises: ValueError if the ground truth is no count.
    """
    accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
    form = format_reward(reward_input["response"])
    return weighted(accuracy, form, format_weight)


def accuracy_reward(response: str, ground_truth: object) -> float:
    """Return 1.0 if the answer's only number is the ground truth, else 0.0. Raises: as compute_score."""
    wanted = count_in(untagged(ground_truth))
    if wanted is None:
        raise ValueError(f"the ground truth {ground_truth!r} is no count")
    return 1.0 if count_in(given_answer(response)) == wanted else 0.0


def count_in(text: str) -> Decimal | None:
    """Return the number that a text says, None if it says none or several. Words count where there are no digits."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    numbers = {Decimal(found.replace(",", "").replace("−", "-")) for found in _NUMBER.findall(text)}
    if not numbers and not re.search(r"\d", text):
        words = re.findall(r"[a-z]+", text.lower())
        if _LARGER.intersection(words):
            return None
        numbers = {Decimal(NUMBER_WORDS[word]) for word in words if word in NUMBER_WORDS}
    return numbers.pop() if len(numbers) == 1 else None
