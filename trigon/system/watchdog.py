"""A deadline for everything that a run waits for, wherever it hangs.

The driver says what it does, and when it gets further; a process of its own watches
(watchdog_process.py). When a phase gets no further, that process writes the stacks of all processes
of the run into a file, and a WorkerError is raised in the driver's main thread. If the driver does
not end by that, since it is blocked in C code, all processes are killed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from trigon.errors import WorkerError
from trigon.system.processes import Started
from trigon.system.resuming import SameCommand
from trigon.system.signals import termination_blocked
from trigon.system.stacks import register_stacks
from trigon.system.watchdog_process import RECORD_BYTES, Record, write_record

FILE = "hang_stacks.txt"
"""The file of the run folder with the stacks of all processes of a run that hung."""

START, FOLLOWS = "the start", "what follows "
"""The name of what a run does before its first phase, and before the name of one: after it."""

_CLOSE_SECONDS = 10.0  # more than dump_stacks takes
_STDERR = 2  # file descriptor
_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 10  # raises the error in the main thread
_MAIN = (
    "import json, sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from trigon.system.watchdog_process import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), json.loads(sys.argv[5]))"
)


class HangWatch:
    """What the parts of a run tell a watchdog. This one watches nothing, for runs without one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """HangWatch the context under this name, and afterwards what follows it."""
        yield

    def beat(self) -> None:
        """Say that the run gets further. From any thread."""

    def end_within(self, seconds: float, *, status: int) -> None:
        """Kill all processes of the run, this one too, unless it ends within so many seconds."""

    def close(self) -> None:
        """End the watching."""


class Watchdog(HangWatch):
    """Watches the thread that makes it. To be used as a context.

    folder: of the run. limit_of: for the name of a phase, the seconds without progress after which
    the run hangs; None: no limit. unwind_seconds: how long the run may take to end after the error.
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
        """Start the watching process.

        option: the name of the limit's option, for the error. same_command: goes on with the run.
        """
        self._limit_of = limit_of
        self._option = option
        self._same_command = same_command
        self._thread_id = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._names: list[str] = []
        self._sequence = self._beats = 0
        self._status = 0
        self._name = START
        self._limit = limit_of(START) or 0.0
        self._is_closed = False
        self._lock = threading.Lock()
        self._error: WorkerError | None = None
        register_stacks()
        memory = os.memfd_create("trigon-watchdog")
        os.ftruncate(memory, RECORD_BYTES)
        self._memory = mmap.mmap(memory, RECORD_BYTES)
        arguments = [str(memory), str(os.getpid()), str(folder.absolute() / FILE), str(unwind_seconds)]
        arguments.append(json.dumps(others))
        with termination_blocked():
            # Without `site` it starts faster; an editable installation is then found by its folder.
            paths = "\n".join([*sys.path, str(Path(__file__).parents[2])])
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", "-c", _MAIN, paths, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(memory,),
            )
        os.close(memory)
        self._handler_before = signal.signal(_SIGNAL, self._raise) if self._is_main else None
        self._listener = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._listener.start()
        self.beat()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See HangWatch."""
        self._names.append(name)
        self._write(name)
        try:
            yield
        finally:
            self._names.pop()
            self._write(self._names[-1] if self._names else f"{FOLLOWS}{name}")

    def beat(self) -> None:
        """See HangWatch."""
        self._write(None)

    def end_within(self, seconds: float, *, status: int) -> None:
        """See HangWatch. Later phases do not change it."""
        # Called by a handler of signals, perhaps while this thread has the lock.
        threading.Thread(target=self._end_within, args=(seconds, status), daemon=True).start()

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
            signal.signal(_SIGNAL, self._handler_before)

    def _end_within(self, seconds: float, status: int) -> None:
        with self._lock:
            self._status = status
        self._limit = seconds
        self._write("the end of the run")

    def _write(self, name: str | None) -> None:
        """Tell the watching process what the run does. name: None: the same as before."""
        with self._lock:
            # Another thread may say so: it must not bring back a phase that has just ended.
            name = self._name if name is None else name
            if self._name != name and not self._status:
                self._limit = self._limit_of(name) or 0.0
            self._name = name if not self._status else "the end of the run"
            self._sequence += 2
            self._beats += 1 if not self._status else 0
            write_record(self._memory, self._sequence, Record(self._name, self._beats, self._limit, self._status))

    def _listen(self) -> None:
        """Receive what the watching process finds."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "exit" in message:
                os._exit(message["exit"])
            self._interrupt(message)
        if not self._is_closed:
            os.write(_STDERR, b"warning: the process of the watchdog has ended: a hang is not noticed\n")

    def _interrupt(self, message: dict[str, str]) -> None:
        frame = sys._current_frames().get(self._thread_id)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self._error = WorkerError(
            f"{message['hang']} ({self._option}): the run hangs; {message['where']}. The main thread is in\n{stack}"
            f"To go on: {self._same_command.from_last('goes on from the last checkpoint')}"
        )
        if self._is_main:
            signal.pthread_kill(self._thread_id, _SIGNAL)  # ends a wait of the system, too
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
