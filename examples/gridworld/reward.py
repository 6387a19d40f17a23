"""The reward of MiniGrid for an episode, and beside it whether the goal was reached."""

from typing import Any

REWARD_TYPE = "sequential"


def compute_score(reward_input: dict[str, Any]) -> dict[str, float]:
    """Return the sum of the turns' rewards, and success: 1 if the goal was reached, else 0."""
    reward = sum(turn["reward"] or 0.0 for turn in reward_input["turns"])
    return {"overall": reward, "success": float(reward > 0)}
