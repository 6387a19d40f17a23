"""Actions on a screen, as JSON in `<answer>`. A template to copy and modify.

    worker.reward.reward_function=examples/reward_function/android_gui.py:compute_score
    worker.reward.reward_function_kwargs='{response_scale: 1000, truth_scale: 1}'

docs/rewards.md describes the arguments and the return value of a reward function, and the ground
truths of this one.
"""

from typing import Any

from trigon.rewards.verifiers import android_gui

REWARD_TYPE = "sequential"


def compute_score(
    reward_input: dict[str, Any],
    format_weight: float = 0.1,
    response_scale: float = 1000.0,
    truth_scale: float = 1.0,
    radius: float = 0.14,
) -> dict[str, float]:
    parts = android_gui.compute_score(
        reward_input, response_scale=response_scale, truth_scale=truth_scale, radius=radius
    )
    overall = (1 - format_weight) * parts["accuracy"] + format_weight * parts["format"]
    return {**parts, "overall": overall}
