"""What the text of an option refers to: a template or its file, a local path or a hub id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from trigon.errors import ConfigError
from trigon.system.terminal import nearest

DATASET_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv")
"""Suffixes of dataset files. A dataset with one of them is a local file, not a hub id."""


PYTHON_PREFIX = "python:"
"""Begins the text of an option whose value a program gave as a Python object: `python:train`."""


def is_python_object(text: str) -> bool:
    """Return whether a dataset or a reward function was given as a Python object."""
    return text.startswith(PYTHON_PREFIX)


def is_inline_template(text: str) -> bool:
    """Return whether a text is a Jinja template itself, not the path of its file."""
    return "{{" in text or "{%" in text


def expand_path(text: str) -> Path:
    """Return the path of a text, with `~` as the home folder; of an unknown user, as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def path_exists(text: str) -> bool:
    """Return whether a text names a file or a folder. One that cannot, being too long, does not."""
    try:
        return expand_path(text).exists()
    except OSError:
        return False


def read_template(text: str | None) -> str | None:
    """Return the text of a template, which is given inline or as a file; None for None.

    Raises: ConfigError if the file cannot be read.
    """
    if text is None or is_inline_template(text):
        return text
    try:
        return expand_path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the template {text}: {error}") from error


def local_path(text: str, *, suffixes: Sequence[str] = ()) -> Path | None:
    """Return the local path that a text names, or None if it is a hub id (`name`, `owner/name`).

    What exists on this machine is always local. Otherwise a text is a path, of something missing,
    if it cannot be a hub id: it starts with `.`, `/` or `~`, has more than one slash, or ends in
    one of the suffixes.
    """
    path = expand_path(text)
    is_no_hub_id = text.startswith((".", "/", "~")) or text.count("/") > 1 or path.suffix in suffixes
    return path if is_no_hub_id or path_exists(text) else None


def nearest_path(text: str) -> str:
    """Return "; did you mean runs/model?" for a path that does not exist, or "" if none is similar.

    The part of it that does not exist is compared with what its folder holds.
    """
    path = expand_path(text)
    missing = path
    while not path_exists(str(missing.parent)):
        missing = missing.parent
    try:
        entries = sorted(entry.name for entry in missing.parent.iterdir() if not entry.name.startswith("."))
    except OSError:  # not a folder, or not readable
        return ""
    name = nearest(missing.name, entries) if missing.name else None
    if name is None:
        return ""
    found = missing.with_name(name)
    whole = found / path.relative_to(missing)
    return f"; did you mean {whole if whole.exists() else found}?"


def split_dataset(text: str) -> tuple[str, str | None]:
    """Return the location and the split of `location@split`; the split is None if there is none.

    An `@` in the name of an existing file belongs to the name.
    """
    location, at, split = text.rpartition("@")
    if not at or not location or path_exists(text):
        return text, None
    return location, split


def is_local_dataset(spec: str) -> bool:
    """Return whether a dataset is a file or folder, and neither on a hub nor a Python object."""
    return not is_python_object(spec) and local_path(split_dataset(spec)[0], suffixes=DATASET_SUFFIXES) is not None


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
