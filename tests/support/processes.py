"""Helpers for tests that start processes."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on a file, by fcntl.flock, or has inherited one.

    Shows whether processes live whose ids are unknown, such as those in another namespace.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until condition is true, for at most a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
