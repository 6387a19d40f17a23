"""Short answers and choices about one image or several, in `<think> ... </think> <answer> ... </answer>`.

Knows when two short answers are the same: letter case, articles, punctuation, number words and the spelling of numbers
do not matter, in the manner of VQA's own evaluation (arXiv:1505.00468); of a choice, its letter counts. Keeps the
sequential contract.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from trigon.rewards.verifiers.counting import NUMBER_WORDS
from trigon.rewards.verifiers.math import weighted
from trigon.rewards.verifiers.r1v import format_reward, given_answer, untagged

REWARD_TYPE = "sequential"

MAX_ANSWER_CHARACTERS = 1000
"""A longer answer is no short answer; it is not compared."""

_ARTICLES = ("a", "an", "the")
_TOKEN = re.compile(r"(?<!\w)-?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)|\w+")
_NEGATED = re.compile(r"\b(?:not|never|neither|nor)\b|n't\b", re.IGNORECASE)
_SECOND_CHOICE = re.compile(r"(?:\bor\b|\band\b|[,/&])\s*\(?[a-z]\)?[.:]?$", re.IGNORECASE)  # "A. or B.", "(A) and (B)"
_TRUE_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:]?")  # "B", "(B)", "B." and nothing else
_GIVEN_CHOICE = re.compile(
    # "B", "(b)", "B."; "B. a dog", "(B) a dog", "B: a dog", not "a dog"; "the answer is B", "option (B)".
    r"\(?([a-z])\)?[.:]?|\(([a-z])\).*|([a-z])[.:)].*|(?:.*\b)?(?:answer|choice|option)(?: is)?:? ?\(?([a-z])\)?\.?",
    re.IGNORECASE | re.DOTALL,
)


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.1) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, and both parts."""
    accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
    form = format_reward(reward_input["response"])
    return weighted(accuracy, form, format_weight)


def accuracy_reward(response: str, ground_truth: object) -> float:
    """Return 1.0 if the response gives the ground truth, or one of them where it is a list, else 0.0."""
    given = given_answer(response)
    if not given or len(given) > MAX_ANSWER_CHARACTERS:
        return 0.0
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return 1.0 if any(is_same(given, untagged(truth)) for truth in truths) else 0.0


def is_same(given: str, truth: str) -> bool:
    """Say whether two short answers mean the same. A truth of one letter is a choice."""
    if wanted := _TRUE_CHOICE.fullmatch(truth.strip()):
        chosen = _GIVEN_CHOICE.fullmatch(" ".join(given.split()))
        if chosen is None or _SECOND_CHOICE.search(given.strip()) or (chosen[4] and _NEGATED.search(given)):
            return False
        return wanted[1].upper() == "".join(filter(None, chosen.groups())).upper()
    return normalized(given) == normalized(truth)


def normalized(answer: str) -> str:
    """Return an answer in a form in which equal ones are equal text: "The Two red cars.": "2 red cars"."""
    answer = unicodedata.normalize("NFKC", answer).casefold().replace("−", "-")
    tokens = [_token(token) for token in _TOKEN.findall(answer) if token not in _ARTICLES]
    return " ".join(tokens) or answer.strip()  # of symbols alone, or an article alone, nothing would be left


def _token(token: str) -> str:
    """Return a word, or a number as it is usually written: "1,000.50": "1000.5"; "three": "3"."""
    if token in NUMBER_WORDS:
        return str(NUMBER_WORDS[token])
    if not re.fullmatch(r"-?[\d,]*(\.\d+)?", token):
        return token
    whole, _, fraction = token.replace(",", "").partition(".")
    digits = whole.lstrip("-").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    sign = "-" if token.startswith("-") and (digits != "0" or fraction) else ""
    return sign + digits + (f".{fraction}" if fraction else "")
