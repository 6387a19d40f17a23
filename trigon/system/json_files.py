"""Reads and writes JSON files, and makes JSON of what a dataset holds.

A file is replaced atomically: after a crash, it has its old or its new content. What is read may be
damaged or hostile: whatever is wrong with it is a ValueError.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 2**20
"""Default limit of read_json_object."""

_log = logging.getLogger(__name__)


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises: ValueError if it is not valid JSON, bytes are not UTF-8, or it is nested too deeply, of
    which json.loads makes a RecursionError.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def to_plain(value: object) -> object:
    """Return a date as text, a numpy scalar as number, an array as list.

    For `default` of json.dumps. Raises: TypeError for anything else.
    """
    if isinstance(value, date):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy
        return value.tolist()
    raise TypeError(f"JSON cannot represent a {type(value).__name__}")


def dump_columns(row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the columns of a row that JSON can represent, as an object, and the names of others.

    Numpy scalars and arrays become numbers and lists, dates ISO strings, tuples lists.
    """
    text = _dump(dict(row))
    if text is not None:
        return text, ()
    columns = {column: _dump(value) for column, value in row.items()}
    kept = [f"{json.dumps(column)}: {text}" for column, text in columns.items() if text is not None]
    return f"{{{', '.join(kept)}}}", tuple(column for column, text in columns.items() if text is None)


class OmittedColumns:
    """Warns once about each column of a dataset that user code does not get.

    receiver: of the rows, in the warning. expected: columns that are left out without a warning.
    """

    def __init__(self, receiver: str, *, expected: Collection[str] = ()) -> None:
        self._receiver = receiver
        self._known = set(expected)

    def warn(self, columns: Collection[str]) -> None:
        """Warn about the columns that dump_columns has left out of a row."""
        for column in set(columns) - self._known:
            self._known.add(column)
            _log.warning(
                "column %r of the dataset has values that JSON cannot represent; %s gets its rows without this column",
                column,
                self._receiver,
            )


def _dump(value: Any) -> str | None:
    try:
        return json.dumps(value, default=to_plain)
    except (TypeError, ValueError, RecursionError):
        return None


def read_json_object(path: Path, *, max_bytes: int | None = MAX_BYTES) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object.

    max_bytes: a larger file is refused; None: no limit. Raises: ValueError, whose text continues
    "the file cannot be read:"; OSError.
    """
    with path.open("rb") as file:
        content = file.read(-1 if max_bytes is None else max_bytes + 1)
    if max_bytes is not None and len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError(f"it contains a {type(value).__name__} instead of an object")
    return value


def write_json(
    path: Path,
    content: Mapping[str, Any],
    *,
    indent: int = 2,
    ensure_ascii: bool = True,
    allow_nan: bool = True,
    sync: bool = False,
) -> None:
    """Write content to path as JSON that ends with a newline, by a temporary file and a rename.

    Args:
        indent: spaces per level.
        ensure_ascii: escape characters outside ASCII; False writes them as UTF-8.
        allow_nan: write NaN and infinity as the literals `NaN` and `Infinity`, which are not JSON.
        sync: flush the content to the disk before the rename. The caller flushes the folder.
    Raises: ValueError for NaN or infinity with allow_nan=False; OSError.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=indent, ensure_ascii=ensure_ascii, allow_nan=allow_nan)
        file.write("\n")
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
