"""Datasets that a program gives as Python objects: lists of dicts, and `datasets.Dataset`.

They become a Source as files do, so that every check and every count is the same. Rows of a list
are copied, but for their images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path, PurePath
from typing import Any

from PIL import Image

from trigon.data.columns import column_names
from trigon.data.images import OpenedFile, undecoded_file
from trigon.data.sources import Source, dataset_source
from trigon.data.text_rows import MAX_DEPTH
from trigon.errors import DataError

_MAX_ARRAY_DIMENSIONS = 2
"""Arrays with more dimensions are pixels."""


def open_python_rows(data: Any, *, spec: str, name: str) -> Source:
    """Return a list of dicts, or a datasets.Dataset, as a source.

    Values of a list's rows are text, numbers, True, False, None, dates, bytes, paths, PIL images,
    and lists and dicts of these; arrays become lists. A column that a row lacks is None there.
    Relative paths of images start from the working folder, out of which no path may lead.
    spec: names the data in errors. name: prefix of the prompt ids.
    Raises: DataError if it is neither, has no rows, or has a value of another type.
    """
    if type(data).__module__.partition(".")[0] == "datasets":
        return dataset_source(data, spec=spec, name=name, folder=Path.cwd())
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Sequence):
        kind = f"{type(data).__module__}.{type(data).__name__}"
        hint = "; of a table, give datasets.Dataset.from_pandas(table)" if kind.startswith("pandas.") else ""
        raise DataError(f"{spec} is a {kind}; give a list of dicts, a datasets.Dataset or a path{hint}")
    if not data:
        raise DataError(f"{spec} has no rows; it is an empty list")
    columns: dict[str, None] = {}
    for index, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise DataError(f"{spec}: row {index} is a {type(row).__name__}; each row is a dict of its columns")
        _check_keys(row, f"{spec}: row {index}")
        columns |= dict.fromkeys(row)
    rows = [
        {key: _plain(row.get(key), f"{spec}: row {index}, {key!r}", 0) for key in columns}
        for index, row in enumerate(data)
    ]
    names = dict.fromkeys(name for row in rows for name in column_names(row))
    return Source(
        name=name,
        rows=rows,
        folder=Path.cwd(),
        columns=tuple(names),
        image_columns=tuple(key for key in columns if any(_has_image(row[key]) for row in rows)),
        video_columns=(),
    )


def _plain(value: Any, where: str, depth: int) -> Any:
    """Return a copy of a value. Raises: DataError if it is of none of the types of a row.

    The content of every type can be compared with that of another run, so that a resumed run
    notices other data.
    """
    match value:
        case None | bool() | int() | float() | str() | bytes() | date():
            return value
        case Image.Image():
            return _image(value, where)
        case PurePath():
            return str(value)
        case list() | tuple() if depth < MAX_DEPTH:
            return [_plain(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
        case Mapping() if depth < MAX_DEPTH:
            _check_keys(value, where)
            return {key: _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        case list() | tuple() | Mapping():
            raise DataError(f"{where[:200]} has more than {MAX_DEPTH} levels")
        case _ if hasattr(value, "tolist"):  # arrays and scalars of numpy and torch
            if getattr(value, "ndim", 0) > _MAX_ARRAY_DIMENSIONS:
                raise DataError(
                    f"{where} is an array of shape {tuple(value.shape)}; give an image as PIL.Image.fromarray(array)"
                )
            return _plain(value.tolist(), where, depth + 1)
        case _:
            raise DataError(
                f"{where} is a {type(value).__module__}.{type(value).__name__}; values are text, numbers, True, "
                "False, None, dates, bytes, PIL images, and lists and dicts of these"
            )


def _check_keys(row: Mapping[Any, Any], where: str) -> None:
    """Raise DataError unless all keys are text."""
    for key in row:
        if not isinstance(key, str):
            raise DataError(f"{where} has the key {key!r}, a {type(key).__name__}; keys are text")


def _image(image: Image.Image, where: str) -> Any:
    """Return an image as its file if it was opened and not yet decoded, otherwise unchanged.

    A dataset of opened files would be decoded in its first scan, and stay in memory.
    Raises: DataError if it cannot be read, as after its file was closed.
    """
    try:
        encoded = undecoded_file(image)
        if encoded is None:
            image.load()  # not thread-safe; prompts are built by several threads
            return image
    except (OSError, ValueError, AssertionError, AttributeError, SyntaxError) as error:  # by Pillow
        raise DataError(
            f"{where}: the image cannot be read ({type(error).__name__}: {error}); open it again, or call "
            "image.load() before its file is closed"
        ) from error
    return OpenedFile(bytes=encoded, path=getattr(image, "filename", None) or None)


def _has_image(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_image(item) for item in value)
    return isinstance(value, Image.Image) or (isinstance(value, dict) and isinstance(value.get("bytes"), bytes))
