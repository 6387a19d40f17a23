"""Process trees: a process, and all that it and its children have started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def can_be_listed() -> bool:
    """Return whether descendants() can be used."""
    return Path("/proc/self/stat").exists()


def descendants(pid: int) -> list[int]:
    """Return the processes that a process and its children have started, zombies included.

    Processes whose parents have ended are included if this process adopts them.
    """
    if Path(f"/proc/{pid}/task/{pid}/children").exists():
        return list(_walk(pid))
    return list(_of_all_processes(pid))


def children(pid: int) -> list[int]:
    """Return the processes that a process has started or adopted, zombies included."""
    if Path(f"/proc/{pid}/task/{pid}/children").exists():
        return _children(pid)
    return _parents().get(pid, []) if can_be_listed() else []


def _walk(pid: int) -> Iterator[int]:
    waiting = [pid]
    while waiting:
        found = _children(waiting.pop())
        yield from found
        waiting += found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += [int(child) for child in file.read().split()]
    return found


def _of_all_processes(pid: int) -> Iterator[int]:
    """As _walk, for kernels without CONFIG_PROC_CHILDREN."""
    by_parent = _parents()
    waiting = [pid]
    while waiting:
        found = by_parent.get(waiting.pop(), [])
        yield from found
        waiting += found


def _parents() -> dict[int, list[int]]:
    """Return the children of all processes, by their parents."""
    by_parent: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:  # it has ended
                parent = int(file.read().rpartition(b")")[2].split()[1])
                by_parent.setdefault(parent, []).append(int(entry))
    return by_parent


def resident_bytes(pids: Iterable[int], *, limit: int) -> int:
    """Return the memory of processes.

    Pages that several of them share are counted several times, unless the sum is above limit.
    """
    resident = {pid: _resident_bytes(pid) for pid in pids}
    total = sum(resident.values())
    return total if total <= limit else sum(_proportional_bytes(pid, own) for pid, own in resident.items())


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
    return 0  # it has ended


def _proportional_bytes(pid: int, resident: int) -> int:
    """Return the memory of a process, where n processes that share a page have 1/n of it each.

    resident: is returned where that cannot be read, which a process may bring about for itself.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return resident


def kill_descendants() -> None:
    """Kill all processes that this one and its children have started, and wait for their end.

    A process that has been sent SIGKILL cannot start others, so some rounds are enough, even for a
    process that starts others as fast as it can. Processes of other users are left: without
    confinement, sudo may have started some.
    """
    others: set[int] = set()
    while pids := set(descendants(os.getpid())) - others:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                others.add(pid)
        reap()
        time.sleep(0.001)


def reap() -> dict[int, int]:
    """Return the status of each child that has ended, by its process id."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):  # there is none
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended
