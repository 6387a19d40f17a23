"""Calls of the Linux kernel that Python 3.11 has no function for; forks; limits of a process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping

IS_LINUX = sys.platform == "linux"

PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """Return the name of the processor's architecture: "x86_64", "aarch64"."""
    return platform.machine()


def release() -> tuple[int, int]:
    """Return the first two numbers of the kernel's version: (6, 8)."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def call(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Call a function of the C library, and return its result.

    Raises: OSError if it fails, or if the C library does not have it.
    """
    try:
        function = getattr(_libc, name)
    except AttributeError:
        raise OSError(38, f"the C library has no function {name}") from None  # ENOSYS
    # Without the conversion, ctypes passes only the lower 32 bits of integers.
    result: int = function(*(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call by its number. Raises: OSError."""
    return call("syscall", number, *arguments)


def prctl(option: int, *arguments: int) -> None:
    """Set a property of this process. Raises: OSError."""
    call("prctl", option, *arguments, *[0] * (4 - len(arguments)))


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent, with this id, ends. Raises: OSError."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the kernel was asked to do so


def adopt_orphans() -> None:
    """Make this process the parent of processes below it whose own parent ends."""
    if IS_LINUX:
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def fork(work: Callable[[], object]) -> int:
    """Fork this process, call work in the fork, and return the process id of the fork.

    The fork ends when work has returned, with exit code 0, or 1 after an error, which it prints. It
    never returns to the code of the caller. Raises: OSError if there can be no further process.
    """
    _flush()  # or each fork would print what is buffered
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the fork must not continue as a second parent
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        os._exit(code)


def result_of_fork(work: Callable[[], bytes]) -> bytes:
    """Return what work returns in a fork of this process; nothing if it fails there.

    Raises: OSError as fork.
    """
    reader, writer = os.pipe()

    def send() -> None:
        result = work()
        with open(writer, "wb") as stream:
            stream.write(result)

    with open(reader, "rb") as stream:
        try:
            pid = fork(send)
        finally:
            os.close(writer)
        result = stream.read()
    os.waitpid(pid, 0)
    return result


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # user code has closed it
            stream.flush()


def set_limits(limits: Mapping[int, int]) -> None:
    """Set limits (resource.RLIMIT_*) of this process, or its hard limits where these are lower."""
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = at_most(hard, limit)
        resource.setrlimit(kind, (limit, limit))


def at_most(hard_limit: int, limit: int) -> int:
    """Return a limit, or the hard limit if that is lower."""
    return limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)


def end_first_without_memory() -> None:
    """If memory runs out, let the kernel kill this process before others. Raises: OSError."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
