"""Runs Python code that a model wrote, each time in a new process in a sandbox of its own.

    supervisor
      |- code server     started before the supervisor gives up anything
      |    `- keeper     of one call: sends the code to its sandbox, and its output back
      |         `- ...   see sandbox.py
      `- worker ...      has the other end of the server's socket

A caller sends one byte with the descriptor of a connection. What follows on that, as frames:

    -> {"code": ..., "seconds": 10.0, "names": ["image_0.png"]}, with the files of these names
    <- {"ending": "exited", "status": 0, "reason": ""}, with the output as a file

The server knows neither episodes nor rows, and starts a new Python process for each call, in which
neither the server's memory nor that of another call can be found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from trigon.system import processes
from trigon.system.confinement import kernel, sandbox
from trigon.system.confinement.sandbox import MAX_FILE_BYTES, MAX_MEMORY_BYTES, CannotConfineError
from trigon.system.frames import encode_frame, read_frames

WATCH_SECONDS = 0.05
"""Interval at which the memory of the calls is compared with the limits."""

REPLY_SECONDS = 30.0
"""How long a reply may take beyond the time limit of the code."""

Ending = Literal["exited", "late", "output", "impossible"]


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What became of a call.

    ending: "exited", with the status of os.waitpid; "late": killed at its time limit; "output":
    killed, since it wrote too much; "impossible": this system does not allow it, with the reason.
    """

    ending: Ending
    status: int = 0
    output: bytes = b""
    reason: str = ""


def run_code(server: int, code: str, files: Mapping[str, bytes], *, seconds: float) -> CodeResult:
    """Let a code server run code. May be called by any process that has inherited the descriptor.

    server: the descriptor of the socket to it. files: the files of the code's working folder.
    Raises: OSError, also when there is no reply in time.
    """
    connection, server_end = socket.socketpair()
    with connection, server_end:
        connection.settimeout(seconds + REPLY_SECONDS)
        with socket.socket(fileno=os.dup(server)) as server_socket:
            socket.send_fds(server_socket, [b"!"], [server_end.fileno()])
        server_end.close()
        request = {"code": code, "seconds": seconds, "names": list(files)}
        with contextlib.suppress(BrokenPipeError):  # it has replied without reading that
            connection.sendall(encode_frame(request, list(files.values())))
        for reply in read_frames(connection):
            return CodeResult(output=reply.files[0], **reply.content)
    return CodeResult("impossible", reason="its keeper ended")


def serve(server: socket.socket, *, max_memory_bytes: int, obstacle: str) -> NoReturn:
    """Serve in this process, a child of the supervisor, until all other ends of the socket close.

    max_memory_bytes: most memory of all calls together. obstacle: why no code can be run; "": it is
    tried.
    """
    keepers: set[int] = set()  # their process ids
    kernel.adopt_orphans()
    obstacle = obstacle or sandbox.find_obstacle()
    while True:
        readable, _, _ = select.select([server], [], [], WATCH_SECONDS if keepers else None)
        if readable:
            data, descriptors, _, _ = socket.recv_fds(server, 1, 1)
            if not data:
                os._exit(0)
            for descriptor in descriptors:
                with socket.socket(fileno=descriptor) as connection:
                    _start_keeper(connection, server, keepers, obstacle)
        keepers -= processes.reap().keys()
        _check_memory(keepers, max_memory_bytes)


def _start_keeper(connection: socket.socket, server: socket.socket, keepers: set[int], obstacle: str) -> None:
    if obstacle:
        _reply(connection, CodeResult("impossible", reason=obstacle))
        return

    def keep() -> None:
        server.close()
        _keep(connection)

    try:
        keepers.add(kernel.fork(keep))
    except OSError as error:  # too many processes, or too little memory, which may pass
        _reply(connection, CodeResult("impossible", reason=f"a process cannot be started ({error.strerror})"))


def _check_memory(keepers: Collection[int], max_memory_bytes: int) -> None:
    """Kill calls with more memory than one may have, and the largest while all have too much."""
    below = {keeper: processes.descendants(keeper) for keeper in keepers}
    used = {keeper: processes.count_resident_bytes(pids) for keeper, pids in below.items()}
    if max(used.values(), default=0) <= MAX_MEMORY_BYTES and sum(used.values()) <= max_memory_bytes:
        return
    # Pages that several processes share, such as those of libraries, now count once.
    used = {keeper: processes.count_proportional_bytes(pids) for keeper, pids in below.items()}
    total = sum(used.values())
    for keeper in sorted(used, key=used.__getitem__, reverse=True):
        if used[keeper] > MAX_MEMORY_BYTES or total > max_memory_bytes:
            total -= used[keeper]
            for init in processes.children(keeper):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(init, signal.SIGKILL)


def _keep(connection: socket.socket) -> None:
    """Carry out a call in this process."""
    server = os.getppid()
    for request in read_frames(connection):
        content = request.content
        files = dict(zip(content["names"], request.files, strict=True))
        try:
            result = _run(connection, content["code"], files, seconds=content["seconds"], server=server)
        except CannotConfineError as error:
            result = CodeResult("impossible", reason=str(error))
        with contextlib.suppress(OSError):  # the caller has ended
            _reply(connection, result)
        return


def _reply(connection: socket.socket, result: CodeResult) -> None:
    content = {"ending": result.ending, "status": result.status, "reason": result.reason}
    connection.sendall(encode_frame(content, [result.output]))


def _run(
    connection: socket.socket, code: str, files: Mapping[str, bytes], *, seconds: float, server: int
) -> CodeResult:
    """Run code in a sandbox. Raises: CannotConfineError."""
    output, output_writer = os.pipe()
    status, status_writer = os.pipe()
    sandbox.enter_namespaces()
    kernel.end_with(server)

    def become_init() -> None:
        connection.close()
        _be_init(code, files, output_writer, status_writer)

    init = kernel.fork(become_init)
    os.close(output_writer)
    os.close(status_writer)
    written = bytearray()
    ending = _watch(connection, output, status, written, deadline=time.monotonic() + seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(init, signal.SIGKILL)  # with it, the kernel kills all processes of its namespace
    os.waitpid(init, 0)
    for data in _read_rest(output):  # what was written before the end
        written += data
    report = b"".join(_read_rest(status))
    if report[:1] == b"!":
        raise CannotConfineError(report[1:].decode(errors="replace"))
    status_code = struct.unpack("=i", report[:4])[0] if len(report) == 4 else signal.SIGKILL.value
    return CodeResult(ending, status_code, bytes(written[:MAX_FILE_BYTES]))


def _watch(connection: socket.socket, output: int, status: int, written: bytearray, *, deadline: float) -> Ending:
    """Collect output until the program ends, or has to be ended."""
    waited = [output, status, connection.fileno()]
    while (left := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select(waited, [], [], left)
        if output in readable:
            if data := os.read(output, 1 << 16):
                written += data
            else:
                waited.remove(output)  # all of its processes have closed it
            if len(written) > MAX_FILE_BYTES:
                return "output"
        if status in readable or connection.fileno() in readable:
            return "exited"  # or its caller has
    return "late"


def _read_rest(descriptor: int) -> Iterator[bytes]:
    """Yield what is left in a pipe whose writers have all ended."""
    while data := os.read(descriptor, 1 << 16):
        yield data


def _be_init(code: str, files: Mapping[str, bytes], output: int, status: int) -> NoReturn:
    """Be process 1 of the sandbox: start Python with the code, and write how it ended."""
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        command = sandbox.make_command()
        sandbox.prepare(files)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of the user has reset it
        main = kernel.fork(lambda: sandbox.execute(command, code, output))
        os.close(output)
        while True:
            pid, main_status = os.wait()
            if pid == main:
                os.write(status, struct.pack("=i", main_status))
                os._exit(0)
    except CannotConfineError as error:
        os.write(status, f"!{error}".encode())
    except Exception as error:  # noqa: BLE001 - the keeper reports it
        os.write(status, f"!{type(error).__name__}: {error}".encode())
    os._exit(1)
