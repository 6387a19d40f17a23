"""Reads and writes files: JSON, digests, flushes to a disk, and in words what is wrong with one.

A file is replaced atomically: after a crash, it has its old or its new content. What is read may be
damaged or hostile: whatever is wrong with JSON is a ValueError. Imports only the standard library.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.pool import ThreadPool

FULL_BYTES = 16 * 2**20
"""Files up to this size are read entirely."""

_NUM_BLOCKS = 256
"""Blocks that are read of a larger file, the first and the last one among them."""

_BLOCK_BYTES = 4096


def text_digest(text: str) -> str:
    """Return a digest of a text: 32 hexadecimal digits, as of every function here."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]


def file_digest(path: Path) -> str:
    """Return a digest of a file, at a cost that hardly grows with its size. Raises: OSError.

    The size and evenly spaced blocks of a file of more than FULL_BYTES are read: this detects
    another file or other weights, and may miss a few changed bytes.
    """
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes <= FULL_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
        digest = hashlib.sha256(b"%d bytes" % num_bytes)
        for number in range(_NUM_BLOCKS):
            offset = (num_bytes - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1)
            digest.update(os.pread(file.fileno(), _BLOCK_BYTES, offset))
        return digest.hexdigest()[:32]


MAX_JSON_BYTES = 64 * 2**20
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

    receiver: what receives the rows, in the warning. expected: columns that are left out without a
    warning.
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


def read_json_object(path: Path, *, max_bytes: int | None = MAX_JSON_BYTES) -> dict[str, Any]:
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
    path: Path, content: Mapping[str, Any], *, indent: int = 2, allow_nan: bool = True, sync: bool = False
) -> None:
    """Write content to path as JSON in UTF-8 that ends with a newline, as replace_file does.

    Args:
        indent: spaces per level.
        allow_nan: write NaN and infinity as the literals `NaN` and `Infinity`, which are not JSON.
    Raises: ValueError for NaN or infinity with allow_nan=False; OSError.
    """
    text = json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=allow_nan)
    replace_file(path, encode_json(f"{text}\n"), sync=sync)


def encode_json(text: str) -> bytes:
    """Return a JSON text in UTF-8. An unpaired surrogate, which a model can emit, is escaped."""
    return text.encode("utf-8", errors="backslashreplace")


def replace_file(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file by a temporary one and a rename. One thread at a time may write a path.

    sync: flush the content to the disk before the rename; without, the file may be empty after a
    crash of the machine. The caller flushes the folder.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # it may hold the last bytes of a full disk
        raise


GROWTH_SECONDS = 1.0
"""How often reporting_growth reads the sizes of files."""

DAMAGED_FILE_SYSTEM = (errno.EUCLEAN,) if hasattr(errno, "EUCLEAN") else ()
"""The errno by which Linux reports a damaged file system; empty on systems without it."""

_FAULTS = {
    errno.EDQUOT: ("the quota of this user is used up", "Make room, or ask for more"),
    errno.EFBIG: ("a file would be larger than allowed", "Raise the limit: see `ulimit -f`"),
    errno.EROFS: (
        "the file system is read-only",
        "Make it writable: Linux makes it read-only after an error of the disk, which `dmesg` shows",
    ),
    errno.EACCES: ("it is not permitted", "Change the permissions"),
    errno.EPERM: ("it is not permitted", "Change the permissions"),
    errno.ENOENT: ("it does not exist", "A folder was moved or deleted: put it back"),
    errno.ENOTDIR: ("it is not in a folder", "A folder was replaced by a file: put it back"),
    errno.EIO: ("the disk reports an error", "Look at `dmesg`: it may be failing"),
    **dict.fromkeys(DAMAGED_FILE_SYSTEM, ("the file system is damaged", "Have it repaired")),
    errno.ESTALE: ("the file server no longer knows the file", "Mount the file system again"),
    errno.ETIMEDOUT: ("the file server does not answer", "Look at the server and the network"),
    errno.EHOSTDOWN: ("the file server does not answer", "Look at the server and the network"),
    errno.ENOTCONN: ("the file system is not connected", "Mount it again"),
    errno.ENODEV: ("the disk is gone", "Connect it, and mount it again"),
    errno.ENXIO: ("the disk is gone", "Connect it, and mount it again"),
    errno.EMFILE: ("this process has too many open files", "Raise the limit: see `ulimit -n`"),
    errno.ENFILE: ("this machine has too many open files", "Stop other processes, or raise fs.file-max"),
}

_IN_TEXT = r"(?:os error |\[Errno )(\d+)"


def fault_number(error: BaseException) -> int | None:
    """Return the errno of an error if it is the fault of a disk or a file system, or None.

    safetensors, and errors passed on from other ranks, have the number only in their text.
    """
    numbers = [error.errno] if isinstance(error, OSError) else map(int, re.findall(_IN_TEXT, str(error)))
    return next((number for number in numbers if number == errno.ENOSPC or number in _FAULTS), None)


def describe_fault(error: BaseException, path: Path) -> str:
    """Return what is wrong and what to do, as "the disk is full (...). Make room".

    error: an error for which fault_number returns a number. path: what was written or read; an
    error of another process that names it is described in its own words.
    """
    number = fault_number(error)
    assert number is not None, error
    if number == errno.ENOSPC:
        what, advice = _describe_full(path), "Make room"
    else:
        what, advice = _FAULTS[number]
    if not isinstance(error, OSError) and str(path) in str(error):
        return f"{what} ({error}). {advice}"  # it also says which file, and in which process
    named = error.filename if isinstance(error, OSError) and error.filename is not None else path
    return f"{what} ({os.strerror(number)}: {named}). {advice}"


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk of a path, which need not exist."""
    return shutil.disk_usage(_existing(path)).free


def sync_to_disk(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reporting_growth(folder: Path, threads: ThreadPool, on_progress: Callable[[], object]) -> Iterator[None]:
    """Call on_progress in the context, as long as the files below a folder change in size.

    The files may be written by libraries, or by other processes.
    threads: one of them reads the sizes every GROWTH_SECONDS.
    """
    ended = threading.Event()

    def ask() -> None:
        before = 0
        while not ended.wait(GROWTH_SECONDS):
            now = _bytes_below(folder)
            if now != before:
                before = now
                on_progress()

    asking = threads.apply_async(ask)
    try:
        yield
    finally:
        ended.set()
        asking.wait()


def _bytes_below(folder: Path) -> int:
    """Return the size of all files below a folder that can be asked for."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # renamed meanwhile; a fault of the disk is raised to the one who writes
                continue
    return total


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))


def _describe_full(path: Path) -> str:
    try:
        status = os.statvfs(_existing(path))
    except OSError:
        return "the disk is full"
    if status.f_files > 0 and status.f_favail == 0:
        return f"the file system has no inode left for another file (it has {status.f_files:,})"
    return f"the disk is full, with {status.f_bavail * status.f_frsize:,} bytes free"
