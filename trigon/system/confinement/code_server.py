"""Runs Python code that a model wrote, each time in a new process in a sandbox of its own.

    supervisor
      |- code server     started before the supervisor gives up anything
      |    `- keeper     of one call: sends the code to its sandbox, and its output back
      |         `- ...   see sandbox.py
      `- worker ...      has the other end of the server's socket

A caller sends one byte with the descriptor of a connection. What follows on that connection:

    -> {"code": ..., "seconds": 10.0, "files": {"image_0.png": 1234}}, a line, then the files
    <- {"ending": "exited", "status": 0, "bytes": 3}, a line, then the output
       {"ending": "impossible", "reason": "..."}

The server knows neither episodes nor rows, and executes Python anew for each call, so that neither
its own memory nor that of another call can be found there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from trigon.system import processes
from trigon.system.confinement import kernel, sandbox
from trigon.system.confinement.sandbox import CannotConfineError, Program

MAX_MEMORY_BYTES = 4 << 30
"""Memory of all processes of a call together, and address space of each."""

MAX_FILE_BYTES = 16 << 20
"""Maximum size of a file that the code may write, and of its output."""

MAX_FOLDER_BYTES = 64 << 20
"""Maximum size of all files that the code may write, which are in memory."""

MAX_TASKS = 64
"""Processes and threads of a call."""

WATCH_SECONDS = 0.05
"""How often the memory of the calls is compared with the limits."""

REPLY_SECONDS = 30.0
"""How long a reply may take beyond the time limit of the code."""

Ending = Literal["exited", "late", "output", "impossible"]

_MAX_CPU_SECONDS = 60  # the time limit of a call is less
_PATH = "/usr/local/bin:/usr/bin:/bin"
_MAIN = Path(__file__).with_name("code_main.py")


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

    server: the descriptor of the socket to it. files: of the code's working folder.
    Raises: OSError, also when there is no reply in time.
    """
    connection, server_end = socket.socketpair()
    with connection, server_end:
        connection.settimeout(seconds + REPLY_SECONDS)
        with socket.socket(fileno=os.dup(server)) as server_socket:
            socket.send_fds(server_socket, [b"!"], [server_end.fileno()])
        server_end.close()
        sizes = {name: len(content) for name, content in files.items()}
        header = json.dumps({"code": code, "seconds": seconds, "files": sizes}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has replied without reading that
            connection.sendall(header + b"".join(files.values()))
        with connection.makefile("rb") as stream:
            reply = json.loads(stream.readline() or b'{"ending": "impossible", "reason": "its keeper ended"}')
            output = stream.read(reply.get("bytes", 0))
    return CodeResult(reply["ending"], reply.get("status", 0), output, reply.get("reason", ""))


def serve(server: socket.socket, *, max_memory_bytes: int, obstacle: str) -> NoReturn:
    """Serve in this process, a child of the supervisor, until all other ends of the socket close.

    max_memory_bytes: of all calls together. obstacle: why no code can be run; "": it is tried.
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
    with connection.makefile("rb") as stream:
        line = stream.readline()
        if not line:
            return  # the caller has ended
        request = json.loads(line)
        files = {name: stream.read(size) for name, size in request["files"].items()}
    try:
        result = _run(connection, _program(request["code"], files), seconds=request["seconds"], server=server)
    except CannotConfineError as error:
        result = CodeResult("impossible", reason=str(error))
    with contextlib.suppress(OSError):  # the caller has ended
        _reply(connection, result)


def _reply(connection: socket.socket, result: CodeResult) -> None:
    header = {
        "ending": result.ending,
        "status": result.status,
        "reason": result.reason,
        "bytes": len(result.output),
    }
    connection.sendall(json.dumps(header).encode() + b"\n" + result.output)


def _program(code: str, files: Mapping[str, bytes]) -> Program:
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(sys.executable)}
    of_python = sorted({*prefixes, *map(os.path.realpath, prefixes)} - {"/"})
    packages = [path for path in sys.path if _has_packages(path, of_python)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    variables = {
        "PATH": _PATH,
        "HOME": sandbox.FOLDER,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": sandbox.FOLDER,
    }
    return Program(
        command=(sys.executable, "-P", "-c", _MAIN.read_text(encoding="utf-8"), "\n".join(packages)),
        variables=threads | variables,
        standard_input=code.encode("utf-8", errors="replace"),
        files=files,
        readable=(*of_python, *packages),
        max_memory_bytes=MAX_MEMORY_BYTES,
        max_file_bytes=MAX_FILE_BYTES,
        max_folder_bytes=MAX_FOLDER_BYTES + sum(map(len, files.values())),
        max_cpu_seconds=_MAX_CPU_SECONDS,
        max_tasks=MAX_TASKS,
    )


def _has_packages(path: str, of_python: list[str]) -> bool:
    """Return whether a folder of sys.path has installed packages or the standard library.

    Others are those of the user's project, which may have the dataset with its ground truths.
    """
    is_below = any(path == prefix or path.startswith(f"{prefix}{os.sep}") for prefix in of_python)
    return is_below or os.path.basename(path) in ("site-packages", "dist-packages")


def _run(connection: socket.socket, program: Program, *, seconds: float, server: int) -> CodeResult:
    """Run a program in a sandbox. Raises: CannotConfineError."""
    output, output_writer = os.pipe()
    status, status_writer = os.pipe()
    sandbox.enter_namespaces()
    kernel.end_with(server)

    def become_init() -> None:
        connection.close()
        _be_init(program, output_writer, status_writer)

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
    told = b"".join(_read_rest(status))
    if told[:1] == b"!":
        raise CannotConfineError(told[1:].decode(errors="replace"))
    code = struct.unpack("=i", told[:4])[0] if len(told) == 4 else signal.SIGKILL.value
    return CodeResult(ending, code, bytes(written[:MAX_FILE_BYTES]))


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


def _be_init(program: Program, output: int, status: int) -> NoReturn:
    """Be process 1 of the sandbox: start the program, and tell how it ended."""
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        sandbox.prepare(program)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of the user has reset it
        main = kernel.fork(lambda: sandbox.execute(program, output))
        os.close(output)
        while True:
            pid, code = os.wait()
            if pid == main:
                os.write(status, struct.pack("=i", code))
                os._exit(0)
    except CannotConfineError as error:
        os.write(status, f"!{error}".encode())
    except Exception as error:  # noqa: BLE001 - the keeper reports it
        os.write(status, f"!{type(error).__name__}: {error}".encode())
    os._exit(1)
