"""The format `<think> ... </think> <answer> ... </answer>` of R1-V: 0.5 accuracy + 0.5 format.

Follows the sequential contract.
"""

from __future__ import annotations

import re
from typing import Any

from trigon.rewards.verifiers.equivalence import ground_truth_text, is_same_answer
from trigon.rewards.verifiers.math import weighted, with_opened_thoughts

REWARD_TYPE = "sequential"

_START, _END = "<think>", "</answer>"


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, with both parts."""
    accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
    format_score = format_reward(reward_input["response"])
    return weighted(accuracy, format_score, format_weight)


def format_reward(response: str) -> float:
    """Return 1.0 if the response is `<think>...</think> <answer>...</answer>` exactly, else 0.0.

    The <think> may be in the prompt, see with_opened_thoughts.
    """
    response = with_opened_thoughts(response)
    if not (response.startswith(_START) and response.endswith(_END)):
        return 0.0
    return 1.0 if re.search(r"</think>\s*<answer>", response[len(_START) : -len(_END)]) else 0.0


def accuracy_reward(response: str, ground_truth: object) -> float:
    """Return 1.0 if the final answer of the response equals the ground truth, else 0.0.

    Raises: RewardError if the ground truth is not text or a number.
    """
    return 1.0 if is_same_answer(extract_answer(response), strip_tags(ground_truth)) else 0.0


def extract_answer(response: str) -> str:
    """Return the content of the first <answer> tag, or the response if there is none."""
    _, opened, rest = response.partition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return (answer if opened and closed else response).strip()


def strip_tags(ground_truth: object) -> str:
    """Return the ground truth as text without <answer> tags, which some datasets include.

    Raises: RewardError if the ground truth is not text or a number.
    """
    return extract_answer(ground_truth_text(ground_truth))
