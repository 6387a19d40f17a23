"""Private temporary folders, and the removal of those whose process was killed.

A folder belongs to its process as long as that holds a lock on a file in it, which the system
releases however the process ends. Shared memory segments whose names begin with the folder's name
belong to it as well. Does not depend on what is in them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

_LOCK = "lock"
_REMOVED = ".removed"
"""Suffix of a folder that is being removed: its processes, if some still run, no longer find it."""

_UNLOCKED_SECONDS = 3600
"""Age from which an empty folder without a lock is dead. A process locks its folder at once."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def private_folder(base: Path | None = None) -> Iterator[Path]:
    """Make a folder that only this user can enter, and remove it and its segments on exit.

    First removes the folders and segments of processes that were killed.
    base: the folder to make it in; None: the system's temporary folder (TMPDIR, or /tmp).
    """
    base = Path(tempfile.gettempdir()) if base is None else base
    remove_dead_folders(base)
    folder, lock = _make_locked_folder(base)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def remove_dead_folders(*bases: Path) -> None:
    """Remove this user's private folders whose process has ended, with their segments.

    They are looked for in the temporary folder, in /tmp and in these folders. A folder of another
    machine, on a disk that several share, is left to that machine. A folder of the user's own, such
    as trigon-0-experiments, is none of them: name, mode and content are compared.
    """
    own_name = re.compile(rf"{_prefix()}[a-z0-9_]{{8}}(?:{re.escape(_REMOVED)})?")  # as mkdtemp makes them
    for base in {Path(tempfile.gettempdir()), Path("/tmp"), *bases}:
        for folder in base.glob(f"{_prefix()}*"):
            if own_name.fullmatch(folder.name) is None:
                continue
            lock = _lock_dead_folder(folder)
            if lock is not None:
                _remove(folder)
                os.close(lock)


def _prefix() -> str:
    return f"trigon-{os.geteuid()}-"


def _make_locked_folder(base: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor of its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(lock, _describe_machine().encode())
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks, where no process can tell that this one has ended
            return folder, lock
        # Another process that looks for dead folders may have locked and removed this one before.
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)


def _lock_dead_folder(folder: Path) -> int | None:
    """Lock a folder whose process has ended, and return the descriptor; None if it may live."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return None
        # A process that was killed before it held its lock has left nothing else in its folder.
        is_old = folder.name.endswith(_REMOVED) or (
            time.time() - status.st_mtime > _UNLOCKED_SECONDS and {path.name for path in folder.iterdir()} <= {_LOCK}
        )
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return os.open(folder, os.O_RDONLY) if is_old else None
    except OSError:  # removed meanwhile
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        host, _, boot = os.read(lock, 1024).decode(errors="replace").partition("\n")
        own_host, _, own_boot = _describe_machine().partition("\n")
        # A container has a host name of its own; a machine that was restarted another boot id.
        if host == own_host or boot == own_boot or (not host and is_old):
            return lock
    except OSError:  # its process lives, or the file system has no locks
        pass
    os.close(lock)
    return None


def _describe_machine() -> str:
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else "unknown"
    return f"{socket.gethostname()}\n{boot}"


def _remove(folder: Path) -> None:
    """Remove a folder and the shared memory segments that are named after it."""
    name = folder.name.removesuffix(_REMOVED)
    renamed = folder.with_name(f"{name}{_REMOVED}")
    try:
        folder.rename(renamed)
    except OSError:  # removed by someone else
        renamed = folder
    for _ in range(10):
        shutil.rmtree(renamed, ignore_errors=True)
        if not renamed.exists():
            break
        time.sleep(0.1)  # a process that is being killed has written into it meanwhile
    for segment in SHARED_MEMORY.glob(f"{name}-*"):
        try:
            if segment.lstat().st_uid == os.geteuid():
                segment.unlink()
        except FileNotFoundError:
            continue
