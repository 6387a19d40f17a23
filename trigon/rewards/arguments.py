"""Resolves the arguments of a reward function: `env:NAME` is the value of an environment variable.

A configuration has the text `env:NAME` everywhere, in the run folder and in trackers too. Only what
is sent to the reward workers has the value. Every secret among the values is then known to
trigon.system.secrets.scrub, since a reward function may print it or have it in an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trigon.errors import RewardError
from trigon.system.secrets import ARGUMENTS, masked_names, remember, secrets_in, variable_of


def resolve_arguments(kwargs: Mapping[str, Any], term: str = "", *, option: str = ARGUMENTS) -> dict[str, Any]:
    """Return the keyword arguments with the value of its variable in place of each `env:NAME`.

    term: which of several functions they are of, for errors. option: in which they are: those of a
    reward function, or of an environment.
    Raises: RewardError if a variable is not set, or if a secret is missing, since a run wrote the
    file that the arguments are from.
    """
    place = f"kwargs of the reward function {term!r}: " if term else f"{option}."
    for name in masked_names(option, kwargs):
        name = f"{place}{name.removeprefix(f'{option}.')}"
        raise RewardError(f"{name} is a secret that the run folder does not have; give it again, or write env:NAME")
    remember(secrets_in(option, kwargs))
    return {key: _resolve(f"{place}{key}", value) for key, value in kwargs.items()}


def _resolve(name: str, value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _resolve(f"{name}.{key}", item) for key, item in value.items()}
        case list() | tuple():
            return [_resolve(f"{name}[{number}]", item) for number, item in enumerate(value)]
        case str() if (variable := variable_of(value)) is not None:
            return _read(name, variable)
        case _:
            return value


def _read(name: str, variable: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise RewardError(
            f"{name} is env:{variable}, but the environment variable {variable} is not set, or empty; export it before "
            "the run is started"
        )
    remember([value])
    return value
