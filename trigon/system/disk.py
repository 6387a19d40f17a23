"""Flushes to a disk, and says in words what is wrong with one and what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.pool import ThreadPool

GROWTH_SECONDS = 1.0
"""How often told_while_growing asks for the sizes of files."""

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

    error: of which fault_number returns a number. path: what was written or read; an error of
    another process that names it is described in its own words.
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
def told_while_growing(folder: Path, threads: ThreadPool, on_progress: Callable[[], object]) -> Iterator[None]:
    """Call on_progress in the context, as long as the files below a folder change in size.

    Of those who write there nothing is known: they may be libraries, or other processes.
    threads: one of them asks for the sizes every GROWTH_SECONDS.
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
