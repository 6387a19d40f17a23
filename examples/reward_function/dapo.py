"""DAPO: +1 or -1 for the last `Answer: ...`, minus a penalty near the length limit.

A template to copy and modify.

    worker.reward.reward_function=examples/reward_function/dapo.py:compute_score
    worker.reward.reward_function_kwargs='{max_response_length: 20480, overlong_buffer_length:
    4096}'

docs/rewards.md describes the arguments and the return value of a reward function.
"""

from typing import Any

from trigon.rewards.verifiers.dapo import accuracy_reward, overlong_punishment

REWARD_TYPE = "batch"


def compute_score(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float = 1.0,
) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
        overlong = overlong_punishment(reward_input["response_length"], max_response_length, overlong_buffer_length)
        scores.append(
            {
                "overall": accuracy + overlong_penalty_factor * overlong,
                "accuracy": accuracy,
                "overlong": overlong,
                "accuracy_normalized": (accuracy + 1.0) / 2.0,
            }
        )
    return scores
