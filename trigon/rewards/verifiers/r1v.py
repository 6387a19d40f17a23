"""The format `<think> ... </think> <answer> ... </answer>` of R1-V: half for the answer, half for the format.

Knows this format. Keeps the sequential contract.
"""

from __future__ import annotations

import re
from typing import Any

from trigon.rewards.verifiers.math import is_same_answer, weighted

REWARD_TYPE = "sequential"

_START, _END = "<think>", "</answer>"


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, and both parts."""
    accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
    form = format_reward(reward_input["response"])
    return weighted(accuracy, form, format_weight)


def format_reward(response: str) -> float:
    """Return 1.0 if the response is a thought and then an answer, each in its tags, and nothing else; or 0.0."""
    if not (response.startswith(_START) and response.endswith(_END)):
        return 0.0
    return 1.0 if re.search(r"</think>\s*<answer>", response[len(_START) : -len(_END)]) else 0.0


def accuracy_reward(response: str, ground_truth: object) -> float:
    """Return 1.0 if the answer that the response gives is the ground truth, else 0.0."""
    return 1.0 if is_same_answer(given_answer(response), untagged(ground_truth)) else 0.0


def given_answer(response: str) -> str:
    """Return what stands in the first <answer> of the response, or, without one, the whole response."""
    _, opened, rest = response.partition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return (answer if opened and closed else response).strip()


def untagged(ground_truth: object) -> str:
    """Return the ground truth as text, without the tags that some datasets keep: "<answer> 3 </answer>" gives "3"."""
    return given_answer(str(ground_truth))
