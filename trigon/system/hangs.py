"""A deadline for everything that a run waits for, wherever it hangs.

The driver reports its phases and its progress to a process of its own, since C code that holds the
interpreter lock stops all threads of the driver. When a phase makes no progress, that process
writes the stacks of all processes of the run into a file, and a WorkerError is raised in the
driver's main thread. If the driver does not end by that, since it is blocked in C code, all
processes are killed.

    driver                                       watching process (main)
    stdin   [phase, limit, status], or an  -->   counts the seconds without a line; ends at the end
            empty line for progress              of the file: the driver has ended
    stdout  lines of JSON                  <--   {"hang": ...}, then {"exit": ...}

Each process of a run registers a signal, at which faulthandler writes its stacks into a file in
memory. That needs neither the interpreter lock nor a thread that runs Python code, so it works for
hangs in C code. Only on Linux; elsewhere a process is listed without its stacks.

Imports the standard library and small modules only, so that the process starts fast.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from trigon.errors import WorkerError
from trigon.system.processes import Started, descendants, python_command, start_of
from trigon.system.stopping import SameCommand, outlive_stop_signals, termination_blocked

FILE = "hang_stacks.txt"
"""The file of the run folder with the stacks of all processes of a run that hung."""

START, FOLLOWS = "the start", "what follows "
"""The name of what a run does before its first phase, and before the name of one: after it."""

_BEAT_SECONDS = 0.2  # interval at which progress is reported
_POLL_SECONDS = 0.5
_CLOSE_SECONDS = 10.0  # more than dump_stacks takes
_EXIT_SECONDS = 3.0
_ERROR_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 10  # raises the error in the main thread
_MAIN = "import json; from trigon.system.hangs import main; main(*json.loads(sys.argv[1]))"


class HangWatch:
    """What the parts of a run report to a watchdog. This one watches nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch the context under this name, and afterwards what follows it."""
        yield

    def beat(self) -> None:
        """Report progress. From any thread."""

    def end_within(self, seconds: float, *, status: int) -> None:
        """Kill all processes of the run, this one too, unless it ends within n seconds."""

    def close(self) -> None:
        """End the watching."""


class Watchdog(HangWatch):
    """Watches the thread that makes it. To be used as a context.

    folder: run folder. limit_of: for the name of a phase, the seconds without progress after which
    the run hangs; None: no limit. option: name of the limit's option, for the error.
    unwind_seconds: how long the run may take to end after the error. same_command: resumes the run.
    others: processes below this one that are not the run's: neither they nor those below them are
    killed.
    """

    def __init__(
        self,
        folder: Path,
        limit_of: Callable[[str], float | None],
        *,
        option: str,
        unwind_seconds: float,
        same_command: SameCommand,
        others: Sequence[Started] = (),
    ) -> None:
        """Start the watching process."""
        self._limit_of = limit_of
        self._option = option
        self._same_command = same_command
        self._thread_id = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._names: list[str] = []
        self._is_ending = self._is_closed = False
        self._last_beat = 0.0
        self._error: WorkerError | None = None
        register_stacks()
        arguments = json.dumps([os.getpid(), str(folder.absolute() / FILE), unwind_seconds, others])
        with termination_blocked():
            self._process = subprocess.Popen(
                python_command(_MAIN, arguments, has_site=False),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._handler_before = signal.signal(_ERROR_SIGNAL, self._raise) if self._is_main else None
        self._listener = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._listener.start()
        self._enter(START)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See HangWatch."""
        self._names.append(name)
        self._enter(name)
        try:
            yield
        finally:
            self._names.pop()
            self._enter(self._names[-1] if self._names else f"{FOLLOWS}{name}")

    def beat(self) -> None:
        """See HangWatch."""
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_SECONDS and not self._is_ending:
            self._last_beat = now
            self._send(b"\n")

    def end_within(self, seconds: float, *, status: int) -> None:
        """See HangWatch. Later phases do not change it."""
        self._is_ending = True
        self._send(_line(["the end of the run", seconds, status]))

    def close(self) -> None:
        """See HangWatch. Ends the watching process."""
        self._is_closed = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # it was stopped
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._process.stdout.close()
        if self._handler_before is not None:
            signal.signal(_ERROR_SIGNAL, self._handler_before)

    def _enter(self, name: str) -> None:
        if not self._is_ending:
            self._send(_line([name, self._limit_of(name) or 0.0, 0]))

    def _send(self, line: bytes) -> None:
        """Write a line, which a pipe takes at once. May run in a handler of signals."""
        # A full pipe: the process was stopped. A broken one, or none: it has ended (see _listen).
        with suppress(OSError):
            if not self._is_closed:
                os.write(self._pipe, line)

    def _listen(self) -> None:
        """Receive what the watching process finds."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "exit" in message:
                os._exit(message["exit"])
            self._interrupt(message)
        if not self._is_closed:
            os.write(2, b"warning: the process of the watchdog has ended: a hang is not noticed\n")

    def _interrupt(self, message: dict[str, str]) -> None:
        frame = sys._current_frames().get(self._thread_id)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self._error = WorkerError(
            f"{message['hang']} ({self._option}): the run hangs; {message['where']}. The main thread is in\n{stack}"
            f"To continue: {self._same_command.from_last('continues from the last checkpoint')}"
        )
        if self._is_main:
            signal.pthread_kill(self._thread_id, _ERROR_SIGNAL)  # ends a wait of the system, too
        else:
            error = ctypes.py_object(_Hang)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), error)

    def _raise(self, number: int, frame: object) -> None:
        assert self._error is not None
        raise self._error


class _Hang(WorkerError):
    """Raised in a thread that is not the main one, without a message of its own."""

    def __init__(self) -> None:
        super().__init__(f"the run made no progress; the stacks of its processes are in {FILE} in its folder")


def main(driver: int, file: str, unwind_seconds: float, others: Sequence[Started]) -> None:
    """Watch until the driver ends, or hangs. The arguments are as for Watchdog."""
    outlive_stop_signals()
    pipe = _Pipe()
    name, limit, status = START, 0.0, 0
    waited, before = 0.0, time.monotonic()
    while (lines := pipe.read(_POLL_SECONDS)) is not None:
        now = time.monotonic()
        # Time in which this process or the driver was stopped, as by Ctrl-Z, does not count.
        passed, before = min(now - before, 4 * _POLL_SECONDS), now
        for line in filter(None, lines):
            name, limit, status = json.loads(line)
        waited = 0.0 if lines else waited + (0.0 if is_stopped(driver) else passed)
        if limit and waited > limit:
            _end(pipe, f"{name} made no progress for {limit:g} s", status, driver, Path(file), unwind_seconds, others)
            return


class _Pipe:
    """The lines that the driver writes to the standard input of this process."""

    def __init__(self) -> None:
        self._incomplete = b""

    def read(self, seconds: float) -> list[bytes] | None:
        """Wait n seconds for lines; None: the driver has closed its end."""
        if not select.select([0], [], [], seconds)[0]:
            return []
        content = os.read(0, 1 << 16)
        *lines, self._incomplete = (self._incomplete + content).split(b"\n")
        return lines if content else None

    def closes_within(self, seconds: float) -> bool:
        """Wait until the driver has closed its end; return whether it has."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.read(left) is None:
                return True
        return False


def _end(
    pipe: _Pipe, what: str, status: int, driver: int, file: Path, unwind_seconds: float, others: Sequence[Started]
) -> None:
    """Write the stacks, and let the driver end; kill all processes of the run if it does not.

    status: 0: the run hangs; otherwise the exit status of a run that had this time to end.
    """
    if status == 0:
        processes = [driver, *_processes_of_run(driver, others)]
        stopped = [f"process {pid} ({name_of(pid)}) is STOPPED" for pid in processes if is_stopped(pid)]
        stacks = dump_stacks(processes)
        where = f"the stacks of all threads of its {len(processes)} processes are in {file}"
        try:
            file.write_text(f"{what}\n\n{stacks}", encoding="utf-8")
        except OSError as error:
            where = f"the stacks cannot be written to {file} ({error}):\n{stacks}"
        what = "; ".join([what, *stopped])
        _tell({"hang": what, "where": where})
        if pipe.closes_within(unwind_seconds):
            return
        what = f"{what}; {where}. It did not end within {unwind_seconds:g} s more"
    os.write(2, f"WorkerError: {what}: killing the run\n".encode())
    for pid in _processes_of_run(driver, others):
        _kill(pid)
    _tell({"exit": status or 1})
    if not pipe.closes_within(_EXIT_SECONDS):
        _kill(driver)


def _processes_of_run(driver: int, others: Sequence[Started]) -> list[int]:
    """Return the processes below the driver, without this one and the others."""
    running = [pid for pid, started in others if start_of(pid) == started]  # an id may be used again
    return descendants(driver, without=(os.getpid(), *running))


def _line(content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _tell(message: dict[str, object]) -> None:
    with suppress(OSError):  # the driver has ended
        os.write(1, _line(message))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


_STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 9
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
        faulthandler.register(_STACKS_SIGNAL, file=_file, all_threads=True)


def dump_stacks(pids: Sequence[int]) -> str:
    """Return the stacks of all threads of processes on this machine, a paragraph for each process.

    A process that is stopped, or is not Python, has its state and no stacks. Takes a few seconds.
    """
    files = {pid: file for pid in pids if _can_dump(pid) and (file := _file_of(pid)) is not None}
    before = {pid: _size(file) for pid, file in files.items()}
    for pid in files:
        try:
            os.kill(pid, _STACKS_SIGNAL)
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
    """Return whether a process runs and handles the signal, whose default action ends it."""
    caught = _status(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (_STACKS_SIGNAL - 1) & 1) and not is_stopped(pid)


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
