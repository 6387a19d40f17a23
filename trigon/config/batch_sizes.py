"""Sizes of a step that are null in schema.py: they follow from the data and from each other.

Each resolve function returns the configured value, or the default where the option is null. Before
the data is read, the default is the largest that it can be. fill_batch_sizes puts all of them into
the configuration once the number of training prompts is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from trigon.config.names import SINGLE_COMPLETION_ESTIMATORS
from trigon.config.options import with_options
from trigon.config.schema import Config

GROUP_SIZE = 8
"""Default of worker.rollout.n for estimators that compare the completions of a group."""

MAX_PROMPTS_PER_STEP = 512
"""Largest default of data.rollout_batch_size. EasyR1's default."""

EASYR1_PROMPTS_PER_UPDATE = 256
"""EasyR1's default of global_batch_size, which files may rely on that set rollout_batch_size."""


def compares_groups(config: Config) -> bool:
    """Return whether the estimator compares the completions of a prompt, of which it needs two."""
    estimator = config.algorithm.adv_estimator
    return estimator != "gae" and estimator not in SINGLE_COMPLETION_ESTIMATORS


def resolve_group_size(config: Config) -> int:
    """Return the completions per prompt. Default: 8 where they are compared in training, else 1."""
    if config.worker.rollout.n is not None:
        return config.worker.rollout.n
    return GROUP_SIZE if compares_groups(config) and not config.trainer.val_only else 1


def resolve_prompts_per_step(config: Config, num_train_prompts: int | None = None) -> int:
    """Return the prompts per step. Default: as many as the data has, and at most 512.

    The default is a multiple of the configured prompts per update.
    num_train_prompts: usable training prompts of an epoch; None: not known yet.
    """
    if config.data.rollout_batch_size is not None:
        return config.data.rollout_batch_size
    per_update = lcm(*(size for size in _configured_updates(config) if size is not None))
    most = MAX_PROMPTS_PER_STEP if num_train_prompts is None else min(MAX_PROMPTS_PER_STEP, num_train_prompts)
    return max(1, most // per_update) * per_update


def resolve_prompts_per_update(config: Config, num_train_prompts: int | None = None) -> int:
    """Return the prompts per update of the policy. Default: those of a step, see the description.

    num_train_prompts: as for resolve_prompts_per_step.
    """
    return config.worker.actor.global_batch_size or _default_update(config, num_train_prompts)


def resolve_prompts_per_critic_update(config: Config, num_train_prompts: int | None = None) -> int:
    """Return the prompts per update of the critic; with a shared trunk those of the policy."""
    if config.worker.critic.share_trunk:
        return resolve_prompts_per_update(config, num_train_prompts)
    return config.worker.critic.global_batch_size or _default_update(config, num_train_prompts)


def find_unknown_sizes(config: Config) -> list[str]:
    """Return the names of options that are null, and whose value depends on the data."""
    data, worker = config.data, config.worker
    sizes = {
        "data.rollout_batch_size": data.rollout_batch_size,
        "data.mini_rollout_batch_size": data.mini_rollout_batch_size or data.rollout_batch_size,
        "worker.actor.global_batch_size": worker.actor.global_batch_size,
        "worker.critic.global_batch_size": worker.critic.global_batch_size,
    }
    return [name for name, size in sizes.items() if size is None]


def fill_batch_sizes(config: Config, num_train_prompts: int) -> tuple[Config, Mapping[str, int]]:
    """Return the configuration without null among these sizes, and those that were null, by name.

    num_train_prompts: usable training prompts of an epoch.
    """
    worker, chosen = config.worker, {}
    if worker.rollout.n is None:
        chosen["worker.rollout.n"] = resolve_group_size(config)
    if config.data.rollout_batch_size is None:
        chosen["data.rollout_batch_size"] = resolve_prompts_per_step(config, num_train_prompts)
    if worker.actor.global_batch_size is None:
        chosen["worker.actor.global_batch_size"] = resolve_prompts_per_update(config, num_train_prompts)
    if worker.critic.global_batch_size is None and config.algorithm.adv_estimator == "gae":
        chosen["worker.critic.global_batch_size"] = resolve_prompts_per_critic_update(config, num_train_prompts)
    return with_options(config, chosen), chosen


def describe_chosen(chosen: Mapping[str, int], num_train_prompts: int) -> str:
    """Return one line that says which sizes were chosen for so many usable training prompts."""
    sizes = " ".join(f"{name}={size}" for name, size in chosen.items())
    return f"not set, and chosen for {num_train_prompts:,} training prompts: {sizes}"


def _configured_updates(config: Config) -> tuple[int | None, ...]:
    """Return the configured prompts per update that a step must be a multiple of."""
    has_own_critic = config.algorithm.adv_estimator == "gae" and not config.worker.critic.share_trunk
    critic = config.worker.critic.global_batch_size if has_own_critic else None
    return config.worker.actor.global_batch_size, critic


def _default_update(config: Config, num_train_prompts: int | None) -> int:
    per_step = resolve_prompts_per_step(config, num_train_prompts)
    is_configured = config.data.rollout_batch_size is not None
    return EASYR1_PROMPTS_PER_UPDATE if is_configured and per_step % EASYR1_PROMPTS_PER_UPDATE == 0 else per_step
