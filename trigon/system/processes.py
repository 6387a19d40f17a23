"""The processes below one, with their memory, open files and threads, read from /proc.

Reads a few hundred bytes per process of the machine, about 16 microseconds each.
Where there is no /proc, there are no processes below any.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

PROC = Path("/proc")

Started: TypeAlias = tuple[int, int]
"""A process, unlike all others on this machine: its id, and when it was started (start_of)."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses at one moment.

    resident_bytes: pages in memory, those shared with other processes included. private_bytes:
    those of them that no file backs and that are not in shared memory, which is what a leak in the
    process grows.
    """

    pid: int
    resident_bytes: int
    private_bytes: int
    num_files: int
    num_threads: int


class ProcessTree:
    """The parents and children among all processes of this machine, at one moment.

    A process whose parent has ended belongs to whoever adopted it.
    """

    def __init__(self, *, proc: Path = PROC) -> None:
        self._children: dict[int, list[int]] = {}
        for pid in _numbers(proc):
            parent = _parent(f"{proc}/{pid}/stat")
            if parent is not None:
                self._children.setdefault(parent, []).append(pid)

    def below(self, *tops: int, without: Collection[int] = ()) -> list[int]:
        """Return the ids of all processes below these, parents before their children.

        without: processes that are left out, with all below them.
        """
        found: list[int] = []
        above: Sequence[int] = tops
        while above:
            above = [child for pid in above for child in sorted(self._children.get(pid, ())) if child not in without]
            found += above
        return found


def start_of(pid: int, *, proc: Path = PROC) -> int | None:
    """Return when a process was started, in clock ticks since the machine was; None if it ended."""
    fields = _read(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def running_below() -> list[Started]:
    """Return the processes below this one."""
    found = ((pid, start_of(pid)) for pid in ProcessTree().below(os.getpid()))
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


def measure_process(pid: int, *, proc: Path = PROC) -> ProcessUse | None:
    """Return what a process uses; None if it has ended, or its files belong to another user."""
    fields = dict(line.split(":", 1) for line in _read(proc / str(pid) / "status").splitlines() if ":" in line)
    try:
        num_files = len(os.listdir(proc / str(pid) / "fd"))
    except OSError:
        return None
    if "VmRSS" not in fields:  # it has ended, and its parent has not waited for it
        return None

    def kilobytes(name: str) -> int:
        return int(fields.get(name, "0 kB").split()[0]) * 1024

    return ProcessUse(pid, kilobytes("VmRSS"), kilobytes("RssAnon"), num_files, int(fields["Threads"]))


def read_command(pid: int, *, proc: Path = PROC) -> str:
    """Return the command line of a process, with spaces; "" if it has ended."""
    return _read(proc / str(pid) / "cmdline").replace("\0", " ").strip()


def _numbers(proc: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(proc) if name.isdigit()]
    except OSError:  # not Linux
        return []


def _parent(stat: str) -> int | None:
    """Return the parent in a file `stat`: the second field after the name in brackets."""
    # The name may hold brackets and spaces, so the last bracket counts.
    after = _read(stat).rpartition(")")[2].split()
    return int(after[1]) if len(after) > 1 else None


def _read(file: Path | str) -> str:
    try:
        with open(file, "rb", buffering=0) as opened:  # half the time of Path.read_text
            return opened.read().decode(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""
