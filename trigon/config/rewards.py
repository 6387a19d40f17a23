"""Reward functions as options name them: one, or several with weights."""

from __future__ import annotations

from collections.abc import Sequence

from trigon.config.schema import Config, WeightedReward

RewardOption = str | Sequence[WeightedReward] | None
"""The value of worker.reward.reward_function."""


def validation_option(config: Config) -> RewardOption:
    """Return the reward functions of validation: its own, or those of training."""
    reward = config.worker.reward
    return reward.reward_function if reward.val_reward_function is None else reward.val_reward_function


def reward_specs(option: RewardOption) -> tuple[str, ...]:
    """Return the functions that an option names: `file.py:function`, or shipped names."""
    if option is None or isinstance(option, str):
        return (option,) if option else ()
    return tuple(entry.function for entry in option)


def describe_option(option: RewardOption) -> str | None:
    """Return an option as text: "math", or "0.5 * math + 1 * judge.py:main"; None if it is null."""
    if option is None or isinstance(option, str):
        return option
    return " + ".join(f"{entry.weight:g} * {entry.function}" for entry in option)
