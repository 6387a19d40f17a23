"""The rows of a dataset: their columns, their limits, and why one of them cannot be used.

Columns are found by name, and a dotted name reaches into structs:

    {"reward_model": {"style": "rule", "ground_truth": "48"}}    reward_model.ground_truth -> "48"

A name that a mapping has as it is, dots included, is preferred to a nested one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trigon.errors import BadRow, DataError
from trigon.system.terminal import nearest

if TYPE_CHECKING:
    from trigon.config.schema import DataConfig

Reason = Literal[
    "encoding",
    "prompt",
    "answer",
    "markers",
    "media_tokens",
    "image_missing",
    "image_outside",
    "image_unreadable",
    "image_pixels",
    "image_shape",
    "image_count",
    "video_missing",
    "video_outside",
    "video_unreadable",
    "video_pixels",
    "video_shape",
    "mixed_media",
    "row_size",
    "vocabulary",
    "overlong",
]
"""Why a row is skipped.

encoding: a text is not UTF-8, or has half of a surrogate pair.
prompt: the text is missing, empty, or neither a text nor chat messages.
answer: the ground truth is missing.
markers: the numbers of markers and of images (or videos) differ.
media_tokens: the text contains a special token that stands for an image or a video.
image_missing: no such file. image_outside: a URL, or a path outside the image folder.
image_unreadable: not an image, truncated, or with an undefined colour range.
image_pixels: above max_image_pixels. image_shape: the aspect ratio is too large.
image_count: above limit_images.
video_*: the same for a video and its frames.
mixed_media: images and videos in one row.
row_size: more text in all columns than a reward function gets.
vocabulary: it has a token for which the model has no embedding.
overlong: above max_prompt_length, in tokens, or in characters by far.
"""

MAX_ROW_CHARACTERS = 2**24
"""The characters of a row's ground truth and other columns, which reward functions get."""

_MAX_MESSAGE = 1000
"""Characters of a message, which may quote the row; a longer one loses its middle."""


class UnusableRow(BadRow):
    """One row cannot be used, for the given reason.

    The message begins with the row or image it is about.

    folder: the folder that data.image_dir has to be for a file that is outside of it; None for
    other reasons, and where no folder would help. num_tokens, media_tokens: number of tokens of an
    overlong prompt, and of its images or videos alone; 0 for other reasons.
    """

    def __init__(
        self, reason: Reason, message: str, *, folder: Path | None = None, num_tokens: int = 0, media_tokens: int = 0
    ) -> None:
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE - 200]} ... {message[-200:]}"
        super().__init__(message)
        self.reason: Reason = reason
        self.folder = folder
        self.num_tokens = num_tokens
        self.media_tokens = media_tokens


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
    """Return the names of all columns, each followed by the names of its fields, which have dots.

    columns: a row, or the types of a table's columns, in which a struct is a mapping too.
    """
    return tuple(_names(columns))


def require_columns(columns: Collection[str], where: str, data: DataConfig) -> None:
    """Raise DataError, with the existing columns, if the question or the ground truth is missing.

    columns: the names of all columns and structs' fields (column_names). where: the name of the
    dataset or of the row, for the error.
    """
    for option, key in (("prompt_key", data.prompt_key), ("answer_key", data.answer_key)):
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


def check_row_size(row: Mapping[str, Any], name: str) -> None:
    """Raise UnusableRow if a row, without its media, is larger than a reward function gets."""
    num_characters = _num_characters(row)
    if num_characters > MAX_ROW_CHARACTERS:
        raise UnusableRow(
            "row_size",
            f"{name}: its columns have {num_characters:,} characters without images and videos, more than the "
            f"{MAX_ROW_CHARACTERS:,} that are passed to a reward function; drop columns that it does not need",
        )


def _num_characters(value: Any) -> int:
    """Return the characters of all texts in a value, and 8 for each number."""
    match value:
        case str():
            return len(value)
        case bytes():
            return 0  # which are not passed on
        case Mapping():
            return sum(len(str(key)) + _num_characters(item) for key, item in value.items())
        case list() | tuple():
            return sum(map(_num_characters, value))
        case _:
            return 8
