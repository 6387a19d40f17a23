r"""Sums in the format `\boxed{12}`, with partial reward for a right number without the box.

    worker.reward.reward_function=examples/reward_function/arithmetic.py:compute_score

A small model seldom writes the box, and almost never the right number in it. With a reward for the
complete answer alone, most groups would have equal rewards, from which nothing can be learned. The
reward therefore has three parts: a box is there, the last number is right, and both at once.
"""

import re
from typing import Any

REWARD_TYPE = "batch"


def compute_score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        response, truth = reward_input["response"], str(reward_input["ground_truth"])
        boxes = re.findall(r"\\boxed\{\s*(-?\d+)\s*\}", response)
        numbers = re.findall(r"-?\d+", response)
        format_score = float(len(boxes) == 1)
        last_number = float(numbers[-1:] == [truth])
        accuracy = float(boxes == [truth])
        overall = 0.2 * format_score + 0.3 * last_number + 0.5 * accuracy
        scores.append({"overall": overall, "format": format_score, "last_number": last_number, "accuracy": accuracy})
    return scores
