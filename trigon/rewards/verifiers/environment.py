"""The reward of an environment: the sum of what it gave for each turn.

Follows the sequential contract.
"""

from __future__ import annotations

from typing import Any

REWARD_TYPE = "sequential"


def compute_score(reward_input: dict[str, Any]) -> dict[str, float]:
    """Return the sum of the rewards of all turns as overall.

    A turn after which the environment gave none counts 0: the last one of an episode that was cut.
    0 without turns, as the completions have on which reward functions are tried before a run; that
    it needs an environment is checked in config/checks.py.
    """
    return {"overall": float(sum(turn["reward"] or 0.0 for turn in reward_input["turns"]))}
