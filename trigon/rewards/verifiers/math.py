r"""Mathematics in the format `<think> ... </think> ... \boxed{answer}`: 0.9 accuracy + 0.1 format.

Final answers are compared by equivalence.py. Follows the sequential contract. Completions are
arbitrary text, so all searches here take time linear in its length.
"""

from __future__ import annotations

import re
from typing import Any

from trigon.rewards.verifiers.equivalence import extract_boxed, ground_truth_text, is_same_answer

REWARD_TYPE = "sequential"


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.1) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, with both parts."""
    response = tidy(reward_input["response"])
    accuracy = accuracy_reward(response, reward_input["ground_truth"])
    format_score = format_reward(response)
    return weighted(accuracy, format_score, format_weight)


def tidy(response: str) -> str:
    """Return the response without white space around <, > and /; some models write `< think >`."""
    response = re.sub(r"([<>/])\s+", r"\1", response)
    return re.sub(r"(?<!\s)\s+([<>/])", r"\1", response)


def format_reward(response: str) -> float:
    r"""Return 1.0 if the response starts with `<think>...</think>...\boxed{...}`, else 0.0.

    The first <think> may be in the prompt, see with_opened_thoughts.
    """
    response = with_opened_thoughts(response)
    position = 0
    for piece in ("<think>", "</think>", r"\boxed{", "}"):
        found = response.find(piece, position)
        if found < 0 or (position == 0 and found > 0):
            return 0.0
        position = found + len(piece)
    return 1.0


def with_opened_thoughts(response: str) -> str:
    """Return a response that closes thoughts which it has not opened, with <think> before it.

    The chat templates of reasoning models, such as DeepSeek-R1's distills, end in <think>, so that
    completions begin with the thoughts themselves.
    """
    return f"<think>{response}" if "</think>" in response and "<think>" not in response else response


def accuracy_reward(response: str, ground_truth: object) -> float:
    r"""Return 1.0 if the content of the last \boxed{} equals the ground truth, else 0.0.

    Raises: RewardError if the ground truth is not text or a number.
    """
    truth = ground_truth_text(ground_truth)
    answer = extract_boxed(response)
    return 1.0 if answer is not None and is_same_answer(answer, truth) else 0.0


def weighted(accuracy: float, format_score: float, format_weight: float) -> dict[str, float]:
    """Return the parts, and overall = (1 - format_weight) * accuracy + format_weight * format."""
    overall = (1 - format_weight) * accuracy + format_weight * format_score
    return {"overall": overall, "format": format_score, "accuracy": accuracy}
