"""Finds secrets among the values of a configuration that were left out, or that others can read.

What looks like a secret is decided in trigon/system/secrets.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trigon.config.options import options
from trigon.config.schema import Config
from trigon.system.secrets import MASKED, REWARD, USER_ARGUMENTS, VAL_REWARD, masked_names, secrets_in

_ENV_HINT = ", or export a variable and write env:NAME in its place"


def find_masked(config: Config, sources: Mapping[str, str]) -> list[str]:
    """Return problems of values that are not there: the file was written by a run, without secrets.

    sources: where each option was written, by its name.
    """
    problems = []
    for name in masked_names("", config.model_dump()):
        place = next((source for option, source in sources.items() if _is_at_or_below(name, option)), "")
        hint = f"; {name}=env:NAME reads it from the environment variable NAME" if _takes_variables(name) else ""
        if name.startswith((f"{REWARD}[", f"{VAL_REWARD}[")):  # an element of a list has no name on the command line
            hint = ", or env:NAME, which reads it from the environment variable NAME"
        problems.append(
            f"{name}{f' ({place})' if place else ''} is {MASKED!r}: the file was written by a run, which writes no "
            f"secrets; give the value again{hint}"
        )
    return problems


def find_exposed(config: Config, names: Collection[str]) -> list[str]:
    """Return warnings of secrets on the command line. names: the options that were given there."""
    values = config.model_dump()
    exposed = []
    for option in options().values():
        if option.name in names:
            value = values
            for key in option.path:
                value = value[key]
            if secrets_in(option.name, value):
                exposed.append(option.name)
    return [
        f"{name} has a secret on the command line, which every user of this machine can read while the run lasts, and "
        f"which trackers may record; write it into a file{_ENV_HINT if _takes_variables(name) else ''}"
        for name in exposed
    ]


def _takes_variables(name: str) -> bool:
    """Return whether env:NAME has a meaning in this option or value."""
    return any(_is_at_or_below(name, option) for option in USER_ARGUMENTS)


def _is_at_or_below(name: str, option: str) -> bool:
    return name == option or name.startswith((f"{option}.", f"{option}["))
