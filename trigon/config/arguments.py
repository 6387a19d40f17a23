"""Writes options that are Python values as YAML, so that they are read as those of a file are.

{"trainer.max_steps": 3, "data": {"train_files": Path("a.jsonl")}}

trainer.max_steps: 3
data:
  train_files: a.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import yaml

from trigon.config.options import options
from trigon.config.yaml_nodes import MAX_DEPTH
from trigon.errors import ConfigError


def write_arguments(values: Mapping[str, Any]) -> str:
    """Return options as YAML text. Tuples become lists, paths text, numpy scalars numbers.

    Raises: ConfigError if a name is not text, or a value is none of the values that YAML has.
    """
    return yaml.safe_dump(_plain(values, "options", 0), sort_keys=False, allow_unicode=True) if values else ""


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return options that are Python values as `key=value`. Raises: as write_arguments."""
    return list(_overrides(_plain(values, "options", 0), ""))


def _overrides(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    by_name = {option.name: option for option in options().values()}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _overrides(value, f"{name}.")
        elif isinstance(value, str) and name in by_name and by_name[name].kind in ("text", "text or list"):
            yield f"{name}={value}"  # which is not read as YAML
        else:
            yield f"{name}={json.dumps(value, ensure_ascii=False)}"


def dataset_names(data: Any) -> str | list[str] | None:
    """Return the paths and hub ids that were given as data, or None for a Python object."""
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):  # not a DatasetDict
        raise ConfigError(
            "data is a dict; give rows as a list of dicts, and options of the section data in "
            "options={'data.max_prompt_length': ...}"
        )
    if isinstance(data, str | PurePath):
        return str(data)
    if isinstance(data, list | tuple) and data and all(isinstance(each, str | PurePath) for each in data):
        return [str(each) for each in data]
    return None


def _plain(value: Any, name: str, depth: int) -> Any:
    """Return a copy of a value that consists of what YAML has."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{name[:60]}... has more than {MAX_DEPTH} levels")
    match value:
        case None | bool() | int() | float() | str():
            # Not a subclass, such as an enum, which YAML would write as an object of its class.
            return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)
        case PurePath():
            return str(value)
        case list() | tuple():
            return [_plain(item, f"{name}[{number}]", depth + 1) for number, item in enumerate(value)]
        case Mapping():
            plain: dict[str, Any] = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    raise ConfigError(f"{name} has the key {key!r}, a {type(key).__name__}; names of options are text")
                plain[str(key)] = _plain(item, key if depth == 0 else f"{name}.{key}", depth + 1)
            return plain
        case _ if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            return _plain(value.item(), name, depth + 1)
        case _:
            raise ConfigError(
                f"{name} is a {type(value).__module__}.{type(value).__name__}, which no option takes; options are "
                "text, numbers, True, False, None, lists and dicts"
            )
