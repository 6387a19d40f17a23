r"""Mathematics in the format `<think> ... </think> ... \boxed{answer}`. Copy this file and make it yours.

    worker.reward.reward_function=examples/reward_function/math.py:compute_score

docs/rewards.md says what a reward function gets and what it may return.
"""

from typing import Any

from trigon.rewards.verifiers.math import accuracy_reward, format_reward, tidy

REWARD_TYPE = "batch"


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        response = tidy(reward_input["response"])
        accuracy = accuracy_reward(response, reward_input["ground_truth"])
        form = format_reward(response)
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "format": form, "accuracy": accuracy})
    return scores
