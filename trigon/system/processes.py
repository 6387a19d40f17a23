"""The processes below one, with their memory, read from /proc; the command of a Python process.

Where the kernel lists no children, a file of every process of the machine is read, in about 16
microseconds each. Where there is no /proc, there are no processes below any. Imports only the
standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

PROC = Path("/proc")

Started: TypeAlias = tuple[int, int]
"""A process, unlike all others on this machine: its id, and when it was started (start_of)."""


def can_be_listed() -> bool:
    """Return whether there is a /proc, by which the processes below one are found."""
    return (PROC / "self/stat").exists()


def children(pid: int) -> list[int]:
    """Return the processes that a process has started or adopted, zombies included."""
    return _find_children(PROC)(pid)


def descendants(*tops: int, without: Collection[int] = (), proc: Path = PROC) -> list[int]:
    """Return all processes below these, zombies included, parents before their children.

    A process whose parent has ended is below the one that adopted it. without: processes that are
    left out, with all below them.
    """
    children_of = _find_children(proc)
    found: list[int] = []
    above: Sequence[int] = tops
    while above:
        above = [child for pid in above for child in children_of(pid) if child not in without]
        found += above
    return found


def _find_children(proc: Path) -> Callable[[int], list[int]]:
    """Return a function that returns the children of a process."""
    if (proc / "thread-self/children").exists():  # a kernel with CONFIG_PROC_CHILDREN
        return lambda pid: _read_children(f"{proc}/{pid}/task")
    found: dict[int, list[int]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        # The second field after the name in brackets, which may hold brackets and spaces.
        fields = _read(stat).rpartition(")")[2].split()
        if len(fields) > 1:
            found.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return lambda pid: sorted(found.get(pid, ()))


def _read_children(threads: str) -> list[int]:
    try:
        return [int(pid) for thread in os.listdir(threads) for pid in _read(f"{threads}/{thread}/children").split()]
    except OSError:  # it has ended
        return []


def kill_tree(pid: int) -> None:
    """Kill a process and all that is below it, but not what these start meanwhile."""
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; it is another user's
            os.kill(each, signal.SIGKILL)


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


def start_of(pid: int, *, proc: Path = PROC) -> int | None:
    """Return when a process was started, in clock ticks since the machine was; None if it ended."""
    fields = _read(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def running_below() -> list[Started]:
    """Return the processes below this one."""
    found = ((pid, start_of(pid)) for pid in descendants(os.getpid()))
    return [(pid, started) for pid, started in found if started is not None]


def count_resident_bytes(pids: Iterable[int], *, proc: Path = PROC) -> int:
    """Return the resident memory of these processes; one that has ended has none.

    A page that several of them share counts once for each.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    pages = 0
    for pid in pids:
        statm = _read(proc / str(pid) / "statm").split()
        pages += int(statm[1]) if statm else 0
    return pages * page


def count_proportional_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of these processes, where n that share a page have 1/n of it each.

    For a process that hides this, which each may do for itself, all of its resident memory counts.
    """
    return sum(_proportional_bytes(pid) for pid in pids)


def _proportional_bytes(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return count_resident_bytes([pid])


def _read(file: Path | str) -> str:
    try:
        with open(file, "rb", buffering=0) as opened:  # half the time of Path.read_text
            return opened.read().decode(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def python_command(code: str, *arguments: str, has_site: bool = True) -> list[str]:
    """Return the command of a new Python process that runs code, with sys.argv[1:] = arguments.

    has_site: import `site`, which takes time, and by which some editable installations are found.

    The process imports from the places that this one imports from. Without `-P` the working folder
    would come first, and a folder named trigon or a file named types.py in it would be imported
    instead of the package and the standard library's.
    """
    boot = r"import sys; sys.path[:] = sys.argv.pop(1).split('\n'); "
    options, path = ([], sys.path) if has_site else (["-S"], [*sys.path, str(Path(__file__).parents[2])])
    return [sys.executable, *options, "-P", "-c", boot + code, "\n".join(path), *arguments]
