"""Reads JSON, JSON-lines and CSV files as rows, with every value as the file has it.

JSON values keep their types and values of CSV are texts; no type is inferred, so rows of one
dataset may have different shapes. A row is parsed when it is used. Until then its text is in a
temporary file, so that it takes no memory, and later changes of the files have no effect.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from trigon.data.rows import column_names
from trigon.errors import DataError

MAX_ROW_CHARACTERS = 2**26
"""The characters of a row in its file. Longer ones are refused before they are parsed."""

MAX_DEPTH = 32
"""The levels of lists and objects in a row."""

_CHUNK = 2**20
_SPACE = re.compile(r"[ \t\r\n]*")
_SHAPE = "a file has one JSON object a line, or one array of objects"
_BYTE_ORDER_MARKS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


class TextRows:
    """The rows of text files: a sequence of dicts, all with the same columns. Thread-safe.

    A column that a row lacks is None there. names: the names of all columns and of the fields of
    objects in any row, fields with dots (rows.py).
    """

    def __init__(self, text: _RowTexts, columns: Sequence[str], names: Sequence[str], indices: Sequence[int]) -> None:
        self._text = text
        self._columns = tuple(columns)
        self.names = tuple(names)
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = json.loads(self._text[self._indices[index]])
        return {column: row.get(column) for column in self._columns}

    def select(self, indices: Iterable[int]) -> TextRows:
        """Return the rows of these indices."""
        return TextRows(self._text, self._columns, self.names, [self._indices[index] for index in indices])


def read_text_rows(files: Sequence[Path], *, cache_dir: Path) -> TextRows:
    """Read all rows of files that end in .json, .jsonl or .csv.

    cache_dir: gets a temporary file of about the size of all files, which has no name and is gone
    when the rows are.
    Raises: DataError with the file and line of what is no row, or not UTF-8.
    """
    columns: dict[str, None] = {}
    names: dict[str, None] = {}
    texts = _RowTexts(cache_dir)
    for path in files:
        read = _csv_rows if path.suffix == ".csv" else _json_rows
        try:
            for where, row, text in read(path):
                columns |= dict.fromkeys(row)
                names |= dict.fromkeys(column_names(row))
                texts.append(_utf8(text, where))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
    texts.flush()
    return TextRows(texts, tuple(columns), tuple(names), range(len(texts)))


class _RowTexts:
    """The encoded texts of rows in a temporary file, written once, then read by any thread."""

    def __init__(self, folder: Path) -> None:
        self._ends = array("q", [0])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise DataError(f"{folder} cannot be written: {error}; set HF_DATASETS_CACHE to another folder") from error
        self._folder = folder
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> bytes:
        start, end = self._ends[index], self._ends[index + 1]
        return os.pread(self._file.fileno(), end - start, start)

    def append(self, text: bytes) -> None:
        self._write(self._file.write, text)
        self._ends.append(self._ends[-1] + len(text))

    def flush(self) -> None:
        self._write(self._file.flush)

    def _write(self, write: Callable[..., Any], *arguments: bytes) -> None:
        try:
            write(*arguments)
        except OSError as error:
            raise DataError(
                f"the rows cannot be written to {self._folder}: {error.strerror}; it needs room for a copy of the "
                "dataset's files: set HF_DATASETS_CACHE to another folder"
            ) from error


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name, the value and the text of each row."""
    with _open_text(path, newline="\n") as file:
        read = _array_elements if _first_character(file) == "[" else _lines
        for where, text in read(file, path):
            if text.isspace():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                _utf8(text, where)
                raise DataError(f"{where} is not JSON: {_reason(error)}; {_SHAPE}") from error
            except (ValueError, RecursionError) as error:  # a number of too many digits; too many levels
                raise DataError(f"{where} cannot be read: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{where} is {_kind(row)}, not an object of columns; {_SHAPE}")
            if text.count("[") + text.count("{") > MAX_DEPTH and _depth(row) > MAX_DEPTH:
                raise DataError(f"{where} has more than {MAX_DEPTH} levels of lists and objects")
            yield where, row, text


def _lines(file: TextIO, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each line."""
    number = 0
    while line := file.readline(MAX_ROW_CHARACTERS + 1):
        number += 1
        where = f"{path}, line {number}"
        _check_length(len(line), where)
        yield where, line


def _array_elements(file: TextIO, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each element of an array, of which a part is in memory."""
    decoder = json.JSONDecoder()
    text, number = "", 0
    position = 0

    def fill() -> bool:
        """Read on, at least as much as there is; return whether there was any more."""
        nonlocal text, position
        more = file.read(max(_CHUNK, len(text) - position))
        text, position = text[position:] + more, 0
        return bool(more)

    def next_character() -> str:
        """Return the next character that is not space, "" at the end of the file."""
        nonlocal position
        while True:
            match = _SPACE.match(text, position)
            assert match is not None
            position = match.end()
            if position < len(text) or not fill():
                return text[position : position + 1]

    assert next_character() == "["
    position += 1
    closing = next_character()
    while closing != "]":
        where = f"{path}, row {number}"
        while True:
            try:
                _, end = decoder.raw_decode(text, position)
                break
            except json.JSONDecodeError as error:
                # An element that goes beyond what was read fails at its end, or in its last string.
                may_continue = error.pos > len(text) - 16 or error.msg.startswith("Unterminated")
                _check_length(len(text) - position, where)
                if not (may_continue and fill()):
                    _utf8(text[position : error.pos + 1], where)
                    raise DataError(f"{where} is not JSON: {error.msg}; {_SHAPE}") from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} cannot be read: {error}") from error
        _check_length(end - position, where)
        yield where, text[position:end]
        position, number = end, number + 1
        closing = next_character()
        if closing == ",":
            position += 1
            next_character()
        elif closing != "]":
            found = f"{closing!r} follows it" if closing else "the file ends after it"
            raise DataError(f"{where}: {found}, where a comma or the end of the array should be; {_SHAPE}")
    position += 1
    if rest := next_character():
        raise DataError(f"{path}: {rest!r} follows the array of its {number} rows; {_SHAPE}")


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name, the value and the text, as JSON, of each row. Empty fields are None."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_CHARACTERS))
    with _open_text(path, newline="") as file:
        reader = csv.reader((line for _, line in _lines(file, path)), strict=True)
        columns: list[str] = []
        try:
            for fields in reader:
                where = f"{path}, line {reader.line_num}"
                if not columns:
                    columns = fields
                    _check_header(columns, where)
                    continue
                if not fields:
                    continue  # an empty line
                if len(fields) > len(columns):
                    raise DataError(
                        f"{where} has {len(fields)} fields, more than the {len(columns)} columns of the first line; "
                        "put fields with commas into double quotes"
                    )
                row = dict.fromkeys(columns) | {
                    column: field or None for column, field in zip(columns, fields, strict=False)
                }
                text = json.dumps(row, ensure_ascii=False)
                _check_length(len(text), where)
                yield where, row, text
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num} is not CSV: {error}") from error


def _check_header(columns: Sequence[str], where: str) -> None:
    _utf8("".join(columns), where)
    if repeated := sorted({column for column in columns if columns.count(column) > 1}):
        raise DataError(f"{where} names the column {repeated[0]!r} twice; give each column a name of its own")


def _open_text(path: Path, *, newline: str) -> TextIO:
    """Open a file as text, in which bytes that are not UTF-8 are lone surrogates (see _utf8)."""
    with path.open("rb") as file:
        encoding = _BYTE_ORDER_MARKS.get(file.read(2))
    if encoding is not None:
        raise DataError(f"{path} is {encoding} text; write it again as UTF-8 (`iconv -f {encoding} -t UTF-8`)")
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _first_character(file: TextIO) -> str:
    """Return the first character that is not space; the file is at its beginning again."""
    while chunk := file.read(_CHUNK):
        if stripped := chunk.lstrip():
            file.seek(0)
            return stripped[0]
    return ""


def _utf8(text: str, where: str) -> bytes:
    """Return a text of a file as UTF-8. Raises: DataError if that is not its encoding."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        before = text[max(0, error.start - 20) : error.start]
        raise DataError(
            f"{where} is not UTF-8: byte 0x{byte:02x} after {before!r}; write the file again as UTF-8 (from Latin-1: "
            "`iconv -f LATIN1 -t UTF-8`)"
        ) from error


def _check_length(num_characters: int, where: str) -> None:
    if num_characters > MAX_ROW_CHARACTERS:
        raise DataError(
            f"{where} is longer than {MAX_ROW_CHARACTERS:,} characters, which no row may have; shorten or remove it, "
            "and keep images in files of their own"
        )


def _reason(error: json.JSONDecodeError) -> str:
    found = error.doc[error.pos : error.pos + 20].strip()
    return f"{error.msg} at character {error.pos + 1}" + (f", {found!r}" if found else ", its end")


def _kind(value: object) -> str:
    return {list: "an array", str: "a text", type(None): "null", bool: "true or false"}.get(type(value), "a number")


def _depth(value: object) -> int:
    """Return the levels of lists and objects in a value."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, list | dict)]:
        depth += 1
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return depth
