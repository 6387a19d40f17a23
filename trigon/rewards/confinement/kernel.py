"""Calls of the Linux kernel that Python 3.11 has no function for, by ctypes."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import sys

IS_LINUX = sys.platform == "linux"

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
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
    """Let the kernel kill this process when its parent, of this id, ends. Raises: OSError."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the kernel was told
