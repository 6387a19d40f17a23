"""Configurations of tests, by the last parts of the names of options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trigon.config.load import load_config
from trigon.config.options import options, with_options
from trigon.config.schema import Config
from trigon.errors import ConfigError

NEEDED = (
    "data.train_files=owner/train",
    "data.val_files=owner/val",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
    "worker.rollout.n=4",
)
"""Overrides with which a configuration can run, without a warning."""

NAMES = {option.path[-1]: option.name for option in reversed(options().values())}
"""The first option in the order of the schema of each last part: lr is that of worker.actor."""


def with_short(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with options, by the last parts of their names."""
    return with_options(config, {NAMES[name]: value for name, value in changes.items()})


def refusal(*overrides: str | Mapping[str, Any], path: Path | None = None) -> str:
    """Return why a configuration is refused that has what a run needs, and these overrides."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, (*NEEDED, *overrides))
    return str(caught.value)
