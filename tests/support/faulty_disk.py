"""A disk that fails, and processes that are killed between two calls to it.

A library is compiled with the system's C compiler and preloaded into a process; see faulty_disk.c.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

CREATE, WRITE, SYNC, RENAME, MKDIR, REMOVE, TRUNCATE, CHMOD, OPEN = (1 << bit for bit in range(9))
CHANGES = CREATE | WRITE | SYNC | RENAME | MKDIR | REMOVE | TRUNCATE | CHMOD
"""Kinds of calls after which something on the disk may differ. OPEN: to read, or to append."""

Call = tuple[str, Path, Path]
"""The name of a call, its path, and the target of a rename."""

_SOURCE = Path(__file__).with_suffix(".c")


class _Control(ctypes.Structure):
    """The same fields as in faulty_disk.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("armed", "kill_at", "torn", "counted", "counts", "error", "fails")),
        *((name, ctypes.c_int64) for name in ("logs", "process", "alone")),
        ("folder", ctypes.c_char * 4096),
    ]


class FaultyDisk:
    """Controls the library, in this process and in those that have it.

    folder: only calls on paths below it are counted, and fail. work: of its own files.
    """

    def __init__(self, folder: Path, work: Path) -> None:
        self.work = work
        self.log_path = work / "calls.log"
        path = work / "control"
        if not path.exists():
            path.write_bytes(bytes(ctypes.sizeof(_Control)))
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), ctypes.sizeof(_Control))
        self._control = _Control.from_buffer(self._mapped)
        self._control.folder = os.fsencode(folder.resolve())

    def environment(self) -> Mapping[str, str]:
        """Return the variables with which a process has the library. Skips without a compiler."""
        return {
            "LD_PRELOAD": str(_library(self.work)),
            "FAULTY_DISK_CONTROL": str(self.work / "control"),
            "FAULTY_DISK_LOG": str(self.log_path),
        }

    def kill_at(self, number: int, *, torn: bool = False, alone: bool = False, process: int = 0) -> None:
        """Kill the process group before its call of this number, from 1; 0: only count them.

        torn: if it is a write, make half of it first. alone: kill one process, not its group.
        process: of which the calls are counted; 0: of all; -1: of the one that calls count_this.
        """
        self._start(kill_at=number, torn=torn, alone=alone, process=process)

    def count_this(self) -> None:
        """Count the calls of this process, and of no other."""
        self._control.process = os.getpid()

    def fail(self, error: int, kinds: int, *, process: int = 0) -> None:
        """Let calls of these kinds fail with an errno, until stop(). process: 0: in all."""
        self._start(error=error, fails=kinds, process=process)

    def stop(self) -> int:
        """Let all calls succeed. Returns: how many there were."""
        self._control.armed = 0
        return int(self._control.counted)

    def calls(self) -> list[Call]:
        """Return the calls of all processes since kill_at."""
        return [call for _, call in self._logged()]

    def calls_counted(self) -> list[Call]:
        """Return those of the process whose calls are counted."""
        return [call for process, call in self._logged() if process == self._control.process]

    def calls_made(self) -> list[Call]:
        """Return those of all processes but the one before which a process was killed."""
        logged = self._logged()
        [last] = [number for number, (process, _) in enumerate(logged) if process == self._control.process][-1:]
        return [call for _, call in (*logged[:last], *logged[last + 1 :])]

    def _logged(self) -> list[tuple[int, Call]]:
        """Return the process and the call of each line of the log."""
        lines = self.log_path.read_bytes().decode().splitlines() if self.log_path.exists() else []
        split = (line.split("\t") for line in lines)
        return [(int(process), (name, Path(path), Path(target))) for process, name, path, target in split]

    def _start(
        self,
        *,
        kill_at: int = 0,
        torn: bool = False,
        alone: bool = False,
        error: int = 0,
        fails: int = 0,
        process: int = 0,
    ) -> None:
        control = self._control
        control.armed = 0
        if self.log_path.exists():
            os.truncate(self.log_path, 0)
        control.kill_at, control.torn, control.error, control.fails = kill_at, int(torn), error, fails
        control.process, control.alone = process, int(alone)
        control.counted, control.counts, control.logs = 0, CHANGES, 1
        control.armed = 1


def run_with(disk: FaultyDisk, module: str, *arguments: str, seconds: float = 300, prefix: Sequence[str] = ()) -> str:
    """Run a module of tests/ in a process that has the library, and return what it prints.

    prefix: a command that is given the command, such as strace.
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*prefix, sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}", **disk.environment()},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def lose_unsynced(calls: list[Call]) -> None:
    """Empty the files that were written and not flushed since, as a machine that loses power may.

    Their names stay: renames and removals are taken to be on the disk in order.
    """
    written: set[Path] = set()
    for name, path, target in calls:
        if name in ("open", "write", "truncate"):
            written.add(path)
        elif name == "fsync" or name == "remove":
            written.discard(path)
        elif name == "rename":
            moved = {each for each in written if each == path or path in each.parents}
            written = {each for each in written - moved if each != target}
            written |= {target / each.relative_to(path) for each in moved}
    for path in written:
        if path.is_file():
            os.truncate(path, 0)


def check_order(calls: list[Call]) -> int:
    """Assert that what is published or removed cannot be torn apart by a loss of power.

    What a rename publishes (not within a temporary folder, whose name begins with a dot) was
    flushed before: files, and folders whose entries changed. A folder is only emptied when its new
    name is on the disk. Returns: the number of renames that publish.
    """
    unflushed: set[Path] = set()
    flushed: set[Path] = set()
    published = 0
    for name, path, target in calls:
        if name == "fsync":
            unflushed.discard(path)
            flushed.add(path)
        elif name in ("write", "truncate"):
            unflushed.add(path)
        elif name in ("open", "mkdir"):
            unflushed |= {path, path.parent}
        elif name == "remove":
            removed = next((each for each in (path, *path.parents) if each.name.startswith(".removing_")), None)
            assert removed is None or removed.parent not in unflushed, f"{path} is removed before its rename is flushed"
            unflushed = {each for each in unflushed if each != path and path not in each.parents} | {path.parent}
            unflushed -= {removed.parent} if removed is not None else set()
        elif name == "rename":
            # safetensors renames its temporary file by a system call of its own, without the C
            # library: such files are found below, by their later names.
            moved = {each for each in unflushed if each == path or path in each.parents}
            moved = {each for each in moved if not each.name.startswith(".tmp")}
            in_temporary = any(each.name.startswith((".saving_", ".exporting_")) for each in target.parents)
            if not in_temporary and not target.name.startswith(".removing_"):
                assert not moved, f"{path} is renamed to {target} before {sorted(moved)} are flushed"
                names = [each.relative_to(target) for each in target.rglob("*")] if target.is_dir() else [Path()]
                missing = [each for each in names if path / each not in flushed]
                assert not missing, f"{path} is renamed to {target}, and {missing} in it were never flushed"
                published += 1
            flushed |= {target / each.relative_to(path) for each in flushed if each == path or path in each.parents}
            unflushed = (unflushed - moved) | {target / each.relative_to(path) for each in moved}
            unflushed |= {path.parent, target.parent}
    return published


def _library(folder: Path) -> Path:
    """Return the compiled library."""
    library = folder / "faulty_disk.so"
    if library.exists():
        return library
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler (cc), to make a library that injects faults")
    # Without _FORTIFY_SOURCE and with 64-bit offsets apart, so that both names can be defined.
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-U_FORTIFY_SOURCE", "-o", str(library), str(_SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return library
