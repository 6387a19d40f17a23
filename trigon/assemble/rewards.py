"""The reward workers of a run: those of training, and of validation if it has its own function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trigon.assemble.objects import NO_OBJECTS, RunObjects
from trigon.config.paths import expand_path
from trigon.config.schema import Config, RewardConfig
from trigon.rewards.load import RewardSource, RewardTerm, find_reward
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import dummy_requests
from trigon.system.confinement.options import Confinement
from trigon.types import Prompt

if TYPE_CHECKING:
    from trigon.data.stream import Prompts


def open_rewards(config: Config, objects: RunObjects = NO_OBJECTS) -> RewardPool:
    """Start the reward workers."""
    reward = config.worker.reward
    assert reward.reward_function is not None
    source = find_reward(reward.reward_function) if objects.reward is None else objects.reward
    return _open_pool(reward, source, reward.reward_function_kwargs)


def open_validation_rewards(config: Config, objects: RunObjects = NO_OBJECTS) -> RewardPool | None:
    """Start reward workers for validation, if there is any, with a reward function of its own."""
    reward = config.worker.reward
    if reward.val_reward_function is None or not config.data.val_files:
        return None
    source = find_reward(reward.val_reward_function) if objects.val_reward is None else objects.val_reward
    return _open_pool(reward, source, {})


def _open_pool(
    reward: RewardConfig, source: RewardSource | Sequence[RewardTerm], kwargs: Mapping[str, Any]
) -> RewardPool:
    return RewardPool(
        source,
        kwargs=kwargs,
        num_workers=reward.num_cpus,
        timeout_seconds=reward.timeout_seconds,
        max_failed_fraction=reward.max_failed_fraction,
        concurrency=reward.concurrency,
        passed_variables=reward.env,
        confinement=make_confinement(reward),
    )


def make_confinement(reward: RewardConfig) -> Confinement:
    """Return what is kept from the user's code: reward functions, environments and tools."""
    return Confinement(
        level=reward.confinement,
        network=reward.network,
        readable=tuple(str(expand_path(path).absolute()) for path in reward.readable),
        writable=tuple(str(expand_path(path).absolute()) for path in reward.writable),
        max_memory_bytes=int(reward.max_memory_gb * 2**30),
    )


def check_rewards(rewards: RewardPool, prompts: Prompts | Sequence[Prompt] | None) -> None:
    """Call the reward function on dummy completions of the first prompt, before the models load.

    Raises: RewardError if it does not score them.
    """
    assert prompts is not None, "val_only needs val_files"
    prompt = prompts[0]
    rewards.check(dummy_requests(prompt), described=f"a dummy completion of {prompt.prompt_id}")
