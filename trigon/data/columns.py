"""Finds the columns of a row by name; a dotted name reaches into structs.

    {"reward_model": {"style": "rule", "ground_truth": "48"}}    reward_model.ground_truth -> "48"

A name that a mapping has as it is, dots included, is preferred to a nested one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from trigon.errors import DataError
from trigon.system.suggestions import nearest


def has_column(row: Mapping[str, Any], name: str) -> bool:
    """Return whether a row has a column, or one in which a field of this name would be."""
    return any(column == name or name.startswith(f"{column}.") for column in row)


def column_value(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column; None if there is none, or if a struct on the way is null."""
    value: Any = row
    for key in _path(row, name) or ():
        value = None if value is None else value[key]
    return None if value is row else value


def without_column(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of a row without a column; structs that lead to it are copied too."""
    path = _path(row, name)
    return dict(row) if path is None else _without(row, path)


def column_names(columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of all columns, each followed by those of its fields, which have dots.

    columns: a row, or the types of a table's columns, in which a struct is a mapping too.
    """
    return tuple(_names(columns))


def require_columns(columns: Collection[str], where: str, *, prompt_key: str, answer_key: str) -> None:
    """Raise DataError, with the existing columns, if the question or the ground truth is missing.

    columns: the names of all columns and structs' fields (column_names). where: the name of the
    dataset, for the error. prompt_key, answer_key: as in the section data.
    """
    for option, key in (("prompt_key", prompt_key), ("answer_key", answer_key)):
        if key not in columns:
            fields = [column for column in columns if column.endswith(f".{key}")]
            column = nearest(key, fields or columns, cutoff=0.0 if fields else 0.4)
            hint = f"; did you mean data.{option}={column}?" if column else f"; set data.{option}"
            raise DataError(f"{where} has no column {key!r}, only {', '.join(sorted(columns))}{hint}")


def _path(row: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """Return the keys that lead to a column, or None if there is no such column.

    A null struct ends the search: whether it has the field, other rows know.
    """
    if name in row:
        return (name,)
    for position in reversed([index for index, character in enumerate(name) if character == "."]):
        key, rest = name[:position], name[position + 1 :]
        if key in row and row[key] is None:
            return (key,)
        if isinstance(row.get(key), Mapping) and (path := _path(row[key], rest)) is not None:
            return (key, *path)
    return None


def _without(row: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    key, *rest = path
    if not rest:
        return {other: value for other, value in row.items() if other != key}
    return {other: _without(value, tuple(rest)) if other == key else value for other, value in row.items()}


def _names(columns: Mapping[str, Any]) -> Iterator[str]:
    for name, value in columns.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{field}" for field in _names(value))
