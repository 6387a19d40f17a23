"""A child that loads user code once, and forks a process for each piece of work.

A fork has what the server has imported without importing it again, shares its memory until it
writes to it, and can hang, crash or be killed without costing any other fork. The supervisor has
confined the server, and its forks with it. Messages after the ones in child.py; a connection to the
fork comes with each "fork":

    -> {"fork": 7}                                  the number of a new fork
    -> {"stop": 7, "seconds": 2.0}                  kill it, unless it ends by itself in this time
    <- {"forked": 7}
    <- {"ended": 7, "status": 0, "reason": ""}      as of os.waitpid; reason: why it was killed here

Threads that the user's code starts when it is loaded are not in the forks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from trigon.errors import TrigonError
from trigon.system import processes
from trigon.system.confinement import kernel
from trigon.system.frames import MAX_FRAME_BYTES, FrameReader, encode_frame
from trigon.system.stopping import watch_signals
from trigon.system.terminal import format_bytes

WATCH_SECONDS = 0.25
"""Interval at which the memory of the forks is compared with the limit."""

_MEMORY_FRACTION = 0.75  # of the limit of all together, at which the largest fork is killed

Work = Callable[[socket.socket], None]
"""What a fork does with its connection."""

Load = Callable[[dict[str, Any]], tuple[Mapping[str, Any], Work]]
"""Loads user code by a setup. Returns: what the driver receives of it, and what forks do."""

T = TypeVar("T")


@dataclass(slots=True)
class _Fork:
    """A running fork. deadline: when it is killed; None: not yet. reason: why it was."""

    number: int
    deadline: float | None = None
    reason: str = ""


class ForkServer:
    """Forks processes, and ends them with all that they have started."""

    def __init__(self, channel: socket.socket) -> None:
        """Use a channel to the driver. "max_memory_bytes" of the setup is what all may use."""
        kernel.adopt_orphans()
        self._channel = channel
        self._max_memory_bytes = 0
        self._forks: dict[int, _Fork] = {}  # by process id
        self._given: deque[int] = deque()  # descriptors of connections
        self._reader = FrameReader(max_bytes=MAX_FRAME_BYTES)
        self._left_alone: set[int] = set()
        self._next_check = 0.0
        self._work: Work | None = None

    def serve(self, load: Load) -> None:
        """Load user code, and do what the driver asks for until it closes the channel."""
        wakeup = watch_signals(signal.SIGCHLD)
        while True:
            wait = WATCH_SECONDS if self._forks else None
            readable, _, _ = select.select([self._channel.fileno(), wakeup], [], [], wait)
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)
            if self._channel.fileno() in readable:
                data, given, flags, _ = socket.recv_fds(self._channel, 1 << 16, 64)
                if flags & socket.MSG_CTRUNC:  # its pool starts another one, with limits of its own
                    raise OSError("the fork server has too many open files to take one more connection")
                self._given.extend(given)
                if not data:
                    return
                for frame in self._reader.feed(data):
                    if self._work is not None:
                        self._carry_out(frame.content, self._work)
                    elif not self._load(load, frame.content):
                        return
            self._reap()
            self._kill_due()
            self._check_memory()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._channel.sendall(encode_frame(message))

    def _load(self, load: Load, setup: dict[str, Any]) -> bool:
        try:
            loaded, self._work = load(setup)
        except TrigonError as error:
            self._send({"load_error": str(error)})
            return False
        self._max_memory_bytes = setup["max_memory_bytes"]
        self._left_alone = set(processes.children(os.getpid()))  # what the code started when it was loaded
        gc.collect()
        gc.freeze()  # collections would otherwise write to the objects that all forks share
        self._send({"loaded": loaded})
        return True

    def _carry_out(self, message: dict[str, Any], work: Work) -> None:
        if "stop" in message:
            for fork in self._forks.values():
                if fork.number == message["stop"]:
                    fork.deadline = time.monotonic() + message["seconds"]
            return
        number, connection = message["fork"], socket.socket(fileno=self._given.popleft())
        with connection:
            try:
                pid = kernel.fork(partial(self._become_fork, connection, work, os.getpid()))
            except OSError as error:  # too many processes, or too little memory, which may pass
                self._send({"ended": number, "status": 0, "reason": f"could not be started: {error.strerror}"})
                return
        self._forks[pid] = _Fork(number)
        self._send({"forked": number})

    def _become_fork(self, connection: socket.socket, work: Work, server: int) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._channel.close()
        kernel.adopt_orphans()  # what it starts stays below it
        if kernel.IS_LINUX:
            kernel.end_with(server)
        connection.setblocking(True)
        work(connection)

    def _reap(self) -> None:
        """Report the forks that have ended, and kill what they have left."""
        ended = processes.reap()
        if not ended:
            return
        found = [(self._forks.pop(pid), status) for pid, status in ended.items() if pid in self._forks]
        for pid in processes.children(os.getpid()):  # those that have lost their parent are children now
            if pid not in self._forks and pid not in self._left_alone:
                processes.kill_tree(pid)
        for fork, status in found:
            self._send({"ended": fork.number, "status": status, "reason": fork.reason})

    def _kill_due(self) -> None:
        now = time.monotonic()
        for pid, fork in self._forks.items():
            if fork.deadline is not None and fork.deadline <= now:
                processes.kill_tree(pid)

    def _check_memory(self) -> None:
        """Kill the largest fork before all of them together exceed the limit of the supervisor.

        Only what a process has beyond the server is counted: forks share the rest.
        """
        now = time.monotonic()
        if not self._forks or now < self._next_check or not processes.can_be_listed():
            return
        self._next_check = now + WATCH_SECONDS
        shared = processes.count_resident_bytes([os.getpid()])
        used: dict[int, int] = {}
        for pid in self._forks:
            sizes = [processes.count_resident_bytes([each]) for each in (pid, *processes.descendants(pid))]
            used[pid] = sum(max(0, size - shared) for size in sizes)
        if shared + sum(used.values()) <= _MEMORY_FRACTION * self._max_memory_bytes:
            return
        largest = max(used, key=used.__getitem__)
        self._forks[largest].reason = (
            f"used {format_bytes(used[largest])} of memory, the most of all running forks, which together may use "
            f"{_MEMORY_FRACTION:.0%} of the {format_bytes(self._max_memory_bytes)} of "
            "worker.reward.max_memory_gb; it was killed"
        )
        processes.kill_tree(largest)


def call_in_a_fork(function: Callable[[], T], *, wanted: str, error: type[TrigonError]) -> T:
    """Return what a function returns, which JSON can represent, without what it imports.

    wanted: what was tried, in the error if the fork dies. error: what the function may raise, and
    the type of errors here.
    """

    def work() -> bytes:
        answer: dict[str, object]
        try:
            answer = {"result": function()}
        except error as failure:
            answer = {"error": str(failure)}
        return json.dumps(answer).encode()

    answer = json.loads(kernel.result_of_fork(work) or "{}")
    if "result" not in answer:
        raise error(answer.get("error", f"{wanted}: the process that tried it failed (see above)"))
    result: T = answer["result"]
    return result
