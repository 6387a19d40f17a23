"""Loads the user's environment or tools once, before anything expensive starts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from trigon.environments.pool import EnvironmentPool
from trigon.environments.settings import EnvironmentSettings


def check_code(settings: EnvironmentSettings) -> tuple[Mapping[str, Any], ...]:
    """Return the descriptions of the tools for the chat template (JSON schemas); () without tools.

    Raises: EpisodeError if the code cannot be loaded, does not follow the protocol, does not accept
    its keyword arguments, or cannot be described. RewardError if a variable of passed_variables is
    not set.
    """
    with closing(EnvironmentPool(settings, describe=True)) as pool:
        return pool.schemas
