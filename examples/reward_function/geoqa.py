"""Geometry with degrees, roots and units, in `<answer>145°</answer>`.

A template to copy and modify.

    worker.reward.reward_function=examples/reward_function/geoqa.py:compute_score

docs/rewards.md describes the arguments and the return value of a reward function.
"""

from typing import Any

from trigon.rewards.verifiers.geoqa import accuracy_reward
from trigon.rewards.verifiers.r1v import format_reward

REWARD_TYPE = "sequential"


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
    format_score = format_reward(reward_input["response"])
    overall = (1 - format_weight) * accuracy + format_weight * format_score
    return {"overall": overall, "format": format_score, "accuracy": accuracy}
