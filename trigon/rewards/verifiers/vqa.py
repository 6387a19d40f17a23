"""Short and multiple-choice answers, in `<think> ... </think> <answer> ... </answer>`.

Answers are compared as in the evaluation of VQA (arXiv:1505.00468): letter case, articles,
punctuation, number words and the notation of numbers are ignored. Multiple-choice answers are
compared by their letter. Follows the sequential contract.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from trigon.rewards.verifiers.counting import NUMBER_WORDS
from trigon.rewards.verifiers.math import weighted
from trigon.rewards.verifiers.r1v import extract_answer, format_reward, strip_tags

REWARD_TYPE = "sequential"

MAX_ANSWER_CHARACTERS = 1000
"""A longer answer is wrong; it is not compared."""

_ARTICLES = ("a", "an", "the")
_TOKEN = re.compile(r"(?<!\w)-?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)|\w+")
_NEGATED = re.compile(r"\b(?:not|never|neither|nor)\b|n't\b", re.IGNORECASE)
_SECOND_CHOICE = re.compile(r"(?:\bor\b|\band\b|[,/&])\s*\(?[a-z]\)?[.:]?$", re.IGNORECASE)  # "A. or B.", "(A) and (B)"
_TRUE_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:]?")  # only "B", "(B)", "B."
_ANSWER_CHOICE = re.compile(
    # "B", "(b)", "B."; "B. a dog", "(B) a dog", "B: a dog", not "a dog"; "the answer is B",
    # "option (B)".
    r"\(?([a-z])\)?[.:]?|\(([a-z])\).*|([a-z])[.:)].*|(?:.*\b)?(?:answer|choice|option)(?: is)?:? ?\(?([a-z])\)?\.?",
    re.IGNORECASE | re.DOTALL,
)


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.1) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, with both parts."""
    accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
    format_score = format_reward(reward_input["response"])
    return weighted(accuracy, format_score, format_weight)


def accuracy_reward(response: str, ground_truth: object) -> float:
    """Return 1.0 if the answer equals the ground truth, or one of a list of them, else 0.0.

    Raises: RewardError if a ground truth is not text or a number.
    """
    listed = ground_truth if isinstance(ground_truth, list | tuple) and ground_truth else [ground_truth]
    truths = [strip_tags(truth) for truth in listed]
    answer = extract_answer(response)
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0
    return 1.0 if any(is_same(answer, truth) for truth in truths) else 0.0


def is_same(answer: str, truth: str) -> bool:
    """Return whether two short answers are equivalent. A truth of one letter is multiple-choice."""
    if true_choice := _TRUE_CHOICE.fullmatch(truth.strip()):
        chosen = _ANSWER_CHOICE.fullmatch(" ".join(answer.split()))
        if chosen is None or _SECOND_CHOICE.search(answer.strip()) or (chosen[4] and _NEGATED.search(answer)):
            return False
        return true_choice[1].upper() == "".join(filter(None, chosen.groups())).upper()
    return normalize(answer) == normalize(truth)


def normalize(answer: str) -> str:
    """Return an answer in normal form: "The Two red cars." gives "2 red cars"."""
    answer = unicodedata.normalize("NFKC", answer).casefold().replace("−", "-")
    tokens = [_token(token) for token in _TOKEN.findall(answer) if token not in _ARTICLES]
    return " ".join(tokens) or answer.strip()  # symbols or articles only: keep them


def _token(token: str) -> str:
    """Return a token in normal form: "1,000.50" gives "1000.5", and "three" gives "3"."""
    if token in NUMBER_WORDS:
        return str(NUMBER_WORDS[token])
    if not re.fullmatch(r"-?[\d,]*(\.\d+)?", token):
        return token
    integer, _, fraction = token.replace(",", "").partition(".")
    digits = integer.lstrip("-").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    sign = "-" if token.startswith("-") and (digits != "0" or fraction) else ""
    return sign + digits + (f".{fraction}" if fraction else "")
