"""Refuses Parquet files of some KB whose values would fill the memory, before they are decoded.

Values that are equal take no room in a Parquet file: a few hundred bytes may hold a text of a
megabyte ten thousand times, or a list of a billion nulls.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from pathlib import Path

from trigon.errors import DataError

MAX_EXPANSION = 100
"""Times the size of a file, the bytes that its values may take."""

MIN_ALLOWED_BYTES = 2**29
"""What the values of any file may take."""

MIN_ALLOWED_ROWS = 1_000_000
"""The rows that any file may have; one with more has at least a byte for each."""

_BYTES_PER_VALUE = 8  # at least, of a value in a Python list
_BATCH_BYTES = 2**26
_MAX_COUNTED_BYTES = 2**26
"""Larger files are not decoded to count what their values take."""


def check_parquet_size(path: Path) -> None:
    """Raise DataError if the values of a Parquet file take far more memory than the file.

    A damaged file is left to its reader. Decodes columns whose values are repeated, in small
    batches. A file is read once, until it changes.
    """
    status = path.stat()
    _check(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1000)
def _check(path: Path, num_bytes: int, changed: int) -> None:
    import pyarrow
    from pyarrow import parquet

    allowed = max(MIN_ALLOWED_BYTES, MAX_EXPANSION * num_bytes)
    least = 0
    most: dict[str, int] = defaultdict(int)
    largest = 1
    try:
        file = parquet.ParquetFile(path)
        metadata = file.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for chunk in (group.column(column) for column in range(group.num_columns)):
                least += max(chunk.num_values * _BYTES_PER_VALUE, chunk.total_uncompressed_size)
                most[chunk.path_in_schema] += chunk.num_values * chunk.total_uncompressed_size
                largest = max(largest, chunk.total_uncompressed_size)
    except (OSError, pyarrow.ArrowException):
        return
    with file:
        if metadata.num_rows > max(MIN_ALLOWED_ROWS, num_bytes):
            raise DataError(
                f"{path} has {metadata.num_rows:,} rows in {num_bytes:,} bytes, so that most of them are the same; "
                "keep one of each"
            )
        if least > allowed:
            raise _too_large(path, num_bytes, allowed)
        repeated = [column for column, size in most.items() if size > allowed]
        if not repeated or num_bytes > _MAX_COUNTED_BYTES:
            return
        counted = 0
        try:
            for batch in file.iter_batches(max(1, min(10_000, _BATCH_BYTES // largest)), columns=repeated):
                counted += batch.nbytes
                if counted > allowed:
                    raise _too_large(path, num_bytes, allowed)
        except (OSError, pyarrow.ArrowException):
            return


def _too_large(path: Path, num_bytes: int, allowed: int) -> DataError:
    return DataError(
        f"{path} has {num_bytes:,} bytes, and its values take more than {allowed:,} once they are read; they are the "
        "same many times: keep one of each, or use another file"
    )
