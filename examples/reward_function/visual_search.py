"""Short answers after any number of calls of tools, with a bonus for right ones after a call.

A template to copy and modify.

    worker.reward.reward_function=examples/reward_function/visual_search.py:compute_score

Without the bonus a model that often answers right at once may stop calling tools; it is given for
right completions only, as in DeepEyes (arXiv:2505.14362), so that a call alone earns nothing.
docs/rewards.md describes the arguments and the return value of a reward function.
"""

from typing import Any

from trigon.rewards.verifiers.r1v import format_reward
from trigon.rewards.verifiers.vqa import accuracy_reward

REWARD_TYPE = "sequential"


def compute_score(
    reward_input: dict[str, Any], format_weight: float = 0.1, closer_weight: float = 0.2
) -> dict[str, float]:
    turns = reward_input["turns"]
    # Only the last turn can have the answer; in the others the model asks.
    last = turns[-1]["text"] if turns else reward_input["response"]
    accuracy = accuracy_reward(last, reward_input["ground_truth"])
    format_score = format_reward(last.strip())
    closer = float(len(turns) > 1)
    overall = (1 - format_weight - closer_weight) * accuracy
    overall += format_weight * format_score + closer_weight * accuracy * closer
    return {"overall": overall, "format": format_score, "accuracy": accuracy, "closer": closer}
