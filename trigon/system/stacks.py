"""Stacks of all threads of the processes of a run, from outside of them.

Each process registers a signal, at which faulthandler writes its stacks into a file in memory. That
needs neither the interpreter lock nor a thread that runs Python code, so it works for hangs in C
code. Only on Linux; elsewhere a process is listed without its stacks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

SIGNAL = getattr(signal, "SIGRTMIN", 34) + 9
"""The signal at which a process writes its stacks. Sent only where there is a handler for it."""

_NAME = "trigon-stacks"  # of the file in memory, by which it is found from outside
_WAIT_SECONDS = 5.0
_MAX_BYTES = 1 << 20  # of one process

_file: int | None = None


def register_stacks() -> None:
    """Let dump_stacks read the stacks of this process. May be called in any thread, and twice."""
    global _file
    if _file is None and hasattr(os, "memfd_create"):
        _file = os.memfd_create(_NAME)
        faulthandler.register(SIGNAL, file=_file, all_threads=True)


def dump_stacks(pids: Sequence[int]) -> str:
    """Return the stacks of all threads of processes on this machine, a paragraph for each process.

    A process that is stopped, or is not Python, has its state and no stacks. Takes a few seconds.
    """
    files = {pid: file for pid in pids if _can_dump(pid) and (file := _file_of(pid)) is not None}
    before = {pid: _size(file) for pid, file in files.items()}
    for pid in files:
        try:
            os.kill(pid, SIGNAL)
        except ProcessLookupError:
            continue
    _wait_until_written(files, before)
    return "\n".join(_describe(pid, files.get(pid), before.get(pid, 0)) for pid in pids)


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped, by SIGSTOP, Ctrl-Z or a debugger."""
    return _status(pid).get("State", "")[:1] in ("T", "t")


def name_of(pid: int) -> str:
    """Return the start of the command line of a process, or its name."""
    command = " ".join(_read(f"/proc/{pid}/cmdline").replace("\0", " ").split())
    return command[:100] or _status(pid).get("Name", "unknown")


def _describe(pid: int, file: str | None, start: int) -> str:
    text = ""
    if file is not None:
        try:
            with open(file, "rb") as stream:
                stream.seek(start)
                text = stream.read(_MAX_BYTES).decode(errors="replace").strip()
        except OSError:
            text = ""
    if not text:
        state = _status(pid).get("State")
        if state is None:
            text = "it has ended"
        elif is_stopped(pid):
            text = "it is STOPPED (by SIGSTOP, Ctrl-Z or a debugger), and cannot write its stacks; SIGCONT continues it"
        else:
            waits = _read(f"/proc/{pid}/wchan").strip("0\n")
            text = f"no Python stacks; state {state}" + (f", waits in the kernel's {waits}" if waits else "")
    return f"== process {pid}: {name_of(pid)}\n{text}\n"


def _can_dump(pid: int) -> bool:
    """Return whether a process runs and handles SIGNAL, of which the default action ends it."""
    caught = _status(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1) and not is_stopped(pid)


def _file_of(pid: int) -> str | None:
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            if f"memfd:{_NAME}" in os.readlink(path):
                return path
    except OSError:  # it has ended, or belongs to another user
        return None
    return None


def _wait_until_written(files: dict[int, str], before: dict[int, int]) -> None:
    """Wait until all files have grown and grow no more, for at most _WAIT_SECONDS."""
    deadline = time.monotonic() + _WAIT_SECONDS
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(0.2)
        last, sizes = sizes, {pid: _size(file) for pid, file in files.items()}
        if sizes == last and all(sizes[pid] > before[pid] or not os.path.exists(files[pid]) for pid in files):
            return


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return 0


def _status(pid: int) -> dict[str, str]:
    lines = (line.partition(":") for line in _read(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # the process has ended, or there is no /proc
        return ""
