"""1 for the right pattern as the last word of the last turn, otherwise 0.

worker.reward.reward_function=examples/look_closer/reward.py:compute_score
"""

from typing import Any

REWARD_TYPE = "sequential"


def compute_score(reward_input: dict[str, Any]) -> dict[str, float]:
    words = reward_input["response"].split()
    accuracy = float(words[-1:] == [reward_input["ground_truth"]])
    return {"overall": accuracy, "accuracy": accuracy}
