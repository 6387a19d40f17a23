"""Helpers for tests that start processes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
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


def signal_all(pid: int, number: signal.Signals) -> dict[int, str]:
    """Send a signal to a process and to all that it has started, as systemd does; return them."""
    found = descendants(pid)
    for each in (*found, pid):
        try:
            os.kill(each, number)
        except ProcessLookupError:
            found.pop(each, None)
    return found


_PR_SET_CHILD_SUBREAPER = 36  # Linux, sys/prctl.h


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt the processes whose parents end, so that descendants() finds them."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def reap_adopted(*own: int) -> None:
    """Take the exit statuses of adopted processes that have ended, as the init process does.

    Ray's processes take a parent for alive that has ended, until its status is taken.
    own: processes that the caller has started, whose statuses it takes itself.
    """
    for child in descendants(os.getpid(), with_zombies=True):
        if child not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def descendants(pid: int, *, with_zombies: bool = False) -> dict[int, str]:
    """Return the command lines of the running processes below a process, by their ids.

    with_zombies: also of those that have ended, and whose status was not taken.
    """
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
    found: dict[int, str] = {}
    below = {pid}
    while below:
        below = {child for child, parent in parents.items() if parent in below and child not in found}
        for child in below:
            found[child] = _command_line(child)
    return {child: command for child, command in found.items() if with_zombies or is_running(child)}


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
