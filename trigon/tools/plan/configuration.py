"""Reads the configuration of a run that is planned, which may lack what only training needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trigon.config.load import LoadedConfig, inspect_config, load_config
from trigon.config.paths import PYTHON_PREFIX, is_python_object
from trigon.config.schema import reward_specs

_REWARD = "worker.reward.reward_function"
_VAL_REWARD = "worker.reward.val_reward_function"
_DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")
# Of its arguments a run wrote no secrets.
_NO_ARGUMENTS = {"worker.reward.reward_function_kwargs": None}


def load_planned(
    path: Path | None, overrides: Sequence[str], *, arguments: Sequence[Mapping[str, Any]] = ()
) -> LoadedConfig:
    """Return the checked configuration of a run that is planned.

    Unlike a run, a plan needs no reward function and none of its arguments; and the datasets, the
    reward function, the environment and the tools may be Python objects that an earlier run was
    given, of which its config.yaml has the names only. What depends on the number of workers is
    checked by trigon.tools.plan.plan.plan, which is told the devices.
    Args: as trigon.config.load.load_config. Raises: ConfigError with all problems.
    """
    arguments = [*arguments, _NO_ARGUMENTS]
    inspected = inspect_config(path, overrides, arguments=arguments, undecided=_DEVICES)
    config = inspected.loaded.config
    data, rollout, reward = config.data, config.worker.rollout, config.worker.reward.reward_function
    if not reward and _REWARD not in inspected.uncertain:
        reward = f"{PYTHON_PREFIX}any"
        arguments = [*arguments, {_REWARD: reward}]
    if reward and not isinstance(reward, str):
        arguments = [*arguments, {_REWARD: [entry.model_dump(exclude={"kwargs"}) for entry in reward]}]
    arguments = [*arguments, {_VAL_REWARD: None}]
    named = (*data.train_files, *data.val_files, *reward_specs(reward), rollout.environment or "", *rollout.tools)
    objects = set(filter(is_python_object, named))
    return load_config(path, overrides, arguments=arguments, python_objects=objects, undecided=_DEVICES)
