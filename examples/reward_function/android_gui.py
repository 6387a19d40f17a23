"""The next action on a screen, as JSON in `<answer>`; a click must land in its box. Copy this file and make it yours.

    worker.reward.reward_function=examples/reward_function/android_gui.py:compute_score
    worker.reward.reward_function_kwargs='{response_scale: 1000, truth_scale: 1}'

docs/rewards.md says what a reward function gets and what it may return, and which ground truths this one understands.
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
