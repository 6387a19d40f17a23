r"""Mathematics in the format `<think> ... </think> ... \boxed{answer}`.

A template to copy and modify.

    worker.reward.reward_function=examples/reward_function/math.py:compute_score

docs/rewards.md describes the arguments and the return value of a reward function.
"""

from typing import Any

from trigon.rewards.verifiers.math import accuracy_reward, format_reward, tidy

REWARD_TYPE = "batch"


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        response = tidy(reward_input["response"])
        accuracy = accuracy_reward(response, reward_input["ground_truth"])
        format_score = format_reward(response)
        overall = (1 - format_weight) * accuracy + format_weight * format_score
        scores.append({"overall": overall, "format": format_score, "accuracy": accuracy})
    return scores
