"""The fork server of an environment pool: loads the code once, and forks a process per episode.

A fork has what the server has imported without importing it again, shares its memory until it
writes to it, and can hang, crash or be killed without costing any other episode. The server has
been started and confined by trigon.rewards.confinement.supervisor, and its forks with it. Messages
are lines of JSON; a descriptor of the episode's connection comes with each "fork":

    <- {"used": ["landlock", ...], "obstacle": ""}  how it is confined, before user code is loaded
    -> {"environment": {...} or null, "kwargs": {...}, "tools": [...], "describe": false, ...}
    <- {"loaded": true, "tools": [schemas]}         or {"load_error": "..."}; then it exits
    -> {"fork": 7}                                  the number of a new episode
    -> {"stop": 7, "seconds": 2.0}                  kill it, unless it ends by itself in this time
    <- {"forked": 7}
    <- {"ended": 7, "status": 0, "reason": ""}      as of os.waitpid; reason: why it was killed here

Threads that the user's file starts when it is imported are not in the forks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from PIL import Image

from trigon.environments import python_tool
from trigon.environments.conversion import to_png
from trigon.environments.episode import EpisodeLimits, run_episode
from trigon.environments.source import CodeSource, check_environment, load_code
from trigon.environments.tools import ToolEnvironment, describe_tools, load_tools
from trigon.errors import EpisodeError
from trigon.rewards.confinement import kernel, tree
from trigon.rewards.confinement.supervisor import Confined
from trigon.rewards.limits import limit_resources
from trigon.system.json_files import parse_json
from trigon.system.signals import outlive_stop_signals

MAX_OPEN_FILES = 4096
"""Maximum number of files and sockets that an episode may have open."""

MAX_FILE_BYTES = 1 << 30
"""Maximum size of a file that an environment may write."""

WATCH_SECONDS = 0.25
"""How often the memory of the episodes is compared with the limit."""

_MEMORY_FRACTION = 0.75  # of the limit of all together, at which the largest episode is killed


def main(channel_fd: int, confined: Confined) -> None:
    """Serve until the channel closes."""
    outlive_stop_signals()  # the driver, which saves first, ends this process
    limit_resources(max_file_bytes=MAX_FILE_BYTES, max_open_files=MAX_OPEN_FILES)
    python_tool.connect(confined.code_server)
    if kernel.IS_LINUX:  # become the parent of processes that an episode leaves
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(channel_fd, False)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable(file=2)
    with socket.socket(fileno=channel_fd) as channel:
        server = ForkServer(channel)
        server.send({"used": list(confined.used), "obstacle": confined.obstacle})
        server.serve()
    os._exit(0)  # not sys.exit, which would wait for threads that the user's code has started


@dataclass(slots=True)
class _Child:
    """A running episode. deadline: when it is killed; None: not yet. reason: why it was."""

    number: int
    deadline: float | None = None
    reason: str = ""


class ForkServer:
    """Forks episodes, and ends them with all that they have started."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: dict[int, _Child] = {}  # by process id
        self._descriptors: deque[int] = deque()
        self._received = b""
        self._left_alone: set[int] = set()
        self._max_memory_bytes = 0
        self._next_check = 0.0
        self._make: Callable[[], Any] = _nothing
        self._limits = EpisodeLimits(0.0, "user", 0)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the driver."""
        self._channel.sendall(json.dumps(message).encode() + b"\n")

    def serve(self) -> None:
        """Load the code, and do what the driver asks for until it closes the channel."""
        wakeup = _watch_children()
        while True:
            wait = WATCH_SECONDS if self._children else None
            readable, _, _ = select.select([self._channel.fileno(), wakeup], [], [], wait)
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)
            if self._channel.fileno() in readable:
                lines = self._receive()
                if lines is None:
                    return
                for line in lines:
                    if not self._carry_out(parse_json(line)):
                        return
            self._reap()
            self._kill_due()
            self._check_memory()

    def _receive(self) -> list[bytes] | None:
        """Return the lines that have arrived; None if the driver has closed the channel."""
        data, descriptors, flags, _ = socket.recv_fds(self._channel, 1 << 16, 64)
        if flags & socket.MSG_CTRUNC:  # its pool starts another one, with limits of its own
            raise OSError("the fork server has too many open files to take the connection of one more episode")
        self._descriptors.extend(descriptors)
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return lines

    def _carry_out(self, message: dict[str, Any]) -> bool:
        """Carry out a message. Returns: False if the code cannot be loaded."""
        if "fork" in message:
            self._fork(message["fork"], self._descriptors.popleft())
        elif "stop" in message:
            for child in self._children.values():
                if child.number == message["stop"]:
                    child.deadline = time.monotonic() + message["seconds"]
        else:
            try:
                tools = self._load(message)
            except EpisodeError as error:
                self.send({"load_error": str(error)})
                return False
            self.send({"loaded": True, "tools": tools})
        return True

    def _load(self, setup: dict[str, Any]) -> list[dict[str, Any]]:
        """Load the user's code. Returns: the schemas of its tools. Raises: EpisodeError."""
        self._limits = EpisodeLimits(setup["timeout_seconds"], setup["observation_role"], setup["max_image_pixels"])
        self._max_memory_bytes = setup["max_memory_bytes"]
        make_environment: Callable[[], Any] | None = None
        if setup["environment"] is not None:
            source = CodeSource(**setup["environment"])
            made, kwargs = load_code(source), setup["kwargs"]
            check_environment(made, kwargs, where=source.where)
            make_environment = partial(made, **kwargs)
        tools = load_tools([CodeSource(**each) for each in setup["tools"]])
        if tools.get("python") is python_tool.python and (obstacle := python_tool.find_obstacle()):
            raise EpisodeError(
                f"the tool python cannot be confined on this system: {obstacle}; see docs/agents.md, or leave it "
                "out of worker.rollout.tools"
            )
        schemas = _in_a_fork(describe_tools, tools) if setup["describe"] else []

        def make() -> Any:
            environment = None if make_environment is None else make_environment()
            if not tools:
                return environment
            return ToolEnvironment(
                tools,
                environment,
                tool_format=setup["tool_format"],
                role=setup["tool_role"],
                timeout_seconds=self._limits.timeout_seconds,
                max_image_pixels=self._limits.max_image_pixels,
            )

        self._make = make
        Image.open(io.BytesIO(to_png(Image.new("RGB", (1, 1))))).load()  # or each fork imports Pillow's plugins
        self._left_alone = set(tree.children(os.getpid()))  # what the file started when it was imported
        gc.collect()
        gc.freeze()  # collections would otherwise write to the objects that all forks share
        return schemas

    def _fork(self, number: int, connection_fd: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or too little memory, which may pass
            os.close(connection_fd)
            self.send({"ended": number, "status": 0, "reason": f"could not be started: {error.strerror}"})
            return
        if pid == 0:
            self._become_episode(connection_fd)
        os.close(connection_fd)
        self._children[pid] = _Child(number)
        self.send({"forked": number})

    def _become_episode(self, connection_fd: int) -> NoReturn:
        """Run one episode in this process, and end it. Never returns to the server's code."""
        code = 1
        try:
            server = os.getppid()
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            if kernel.IS_LINUX:
                kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # what it starts stays below it
                kernel.end_with(server)
            with socket.socket(fileno=connection_fd) as connection:
                connection.setblocking(True)
                run_episode(connection, self._make, self._limits)
            code = 0
        except BaseException:  # noqa: BLE001 - an episode never goes on as a second server
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # the user's code has closed it
                    stream.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Report the episodes that have ended, and kill what they have left."""
        ended = tree.reap()
        found = [(self._children.pop(pid), status) for pid, status in ended.items() if pid in self._children]
        if not ended:
            return
        for pid in tree.children(os.getpid()):  # those that have lost their parent are children now
            if pid not in self._children and pid not in self._left_alone:
                _kill(pid)
        for child, status in found:
            self.send({"ended": child.number, "status": status, "reason": child.reason})

    def _kill_due(self) -> None:
        now = time.monotonic()
        for pid, child in self._children.items():
            if child.deadline is not None and child.deadline <= now:
                _kill(pid)

    def _check_memory(self) -> None:
        """Kill the largest episode before all of them together exceed the limit of the supervisor.

        Of each process, only what it has beyond the server is counted: forks share the rest.
        """
        now = time.monotonic()
        if not self._children or now < self._next_check or not tree.can_be_listed():
            return
        self._next_check = now + WATCH_SECONDS
        shared = tree.resident_bytes([os.getpid()], limit=sys.maxsize)
        used: dict[int, int] = {}
        for pid in self._children:
            sizes = [tree.resident_bytes([each], limit=sys.maxsize) for each in (pid, *tree.descendants(pid))]
            used[pid] = sum(max(0, size - shared) for size in sizes)
        if shared + sum(used.values()) <= _MEMORY_FRACTION * self._max_memory_bytes:
            return
        largest = max(used, key=used.__getitem__)
        self._children[largest].reason = (
            f"used {used[largest] / 2**30:.1f} GiB of memory, the most of all running episodes, which together may use "
            f"{_MEMORY_FRACTION:.0%} of the {self._max_memory_bytes / 2**30:g} GiB that worker.reward.max_memory_gb "
            "leaves them; it was killed"
        )
        _kill(largest)


def _kill(pid: int) -> None:
    """Kill a process and all that is below it. What it starts meanwhile is killed by _reap."""
    for each in (pid, *tree.descendants(pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; it is another user's
            os.kill(each, signal.SIGKILL)


def _in_a_fork(function: Callable[[Any], list[dict[str, Any]]], argument: Any) -> list[dict[str, Any]]:
    """Return what a function returns, without what it imports. Raises: EpisodeError."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer: dict[str, Any]
            try:
                answer = {"result": function(argument)}
            except EpisodeError as error:
                answer = {"error": str(error)}
            with open(writer, "w") as stream:
                json.dump(answer, stream)
        except BaseException:  # noqa: BLE001 - a fork never goes on as a second server
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    if not text:
        raise EpisodeError("the tools cannot be described to the model: the process that tried it failed (see above)")
    answer = json.loads(text)
    if "error" in answer:
        raise EpisodeError(answer["error"])
    result: list[dict[str, Any]] = answer["result"]
    return result


def _watch_children() -> int:
    """Let SIGCHLD make a descriptor readable, and return it."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _do_nothing)
    return reader


def _do_nothing(number: int, frame: object) -> None:
    pass


def _nothing() -> Any:
    raise AssertionError("an episode is forked after the code was loaded")
