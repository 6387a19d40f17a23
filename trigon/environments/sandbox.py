"""The process of the tool `python`: gives up rights, then runs the code of a model.

It cannot open sockets, trace other processes, write outside of its folder, or read anything but
that, Python with its packages, and the system's libraries. Mechanisms that a system lacks make
the tool unavailable (find_obstacle).
"""

from __future__ import annotations

import ast
import gc
import os
import resource
import sys
import traceback

from trigon.rewards.confinement import landlock, seccomp
from trigon.rewards.confinement.supervisor import STRICT_READABLE

MAX_MEMORY_BYTES = 4 << 30
"""Address space of the code's process."""

MAX_FILE_BYTES = 16 << 20
"""Maximum size of a file that the code may write, and of its output."""

MAX_CPU_SECONDS = 60
"""CPU time of the code's process; the time limit of a call is less."""

_DEVICES = ("/dev/null", "/dev/zero")
_FILE = "code"


def find_obstacle() -> str:
    """Return what this system lacks for the tool `python`; "" if nothing."""
    if not seccomp.is_available():
        return "seccomp (Linux on x86-64 or ARM64)"
    if landlock.find_version() < landlock.REFER_VERSION:
        return "Landlock (Linux 5.19 or later, with landlock in its list of security modules, lsm=)"
    return ""


def main(folder: str) -> None:
    """Run the code of the standard input in this process, and print its last expression's value."""
    code = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    limits = {
        resource.RLIMIT_AS: MAX_MEMORY_BYTES,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_CPU: MAX_CPU_SECONDS,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    of_python = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(sys.executable)]
    packages = [path for path in sys.path if _has_packages(path, of_python)]
    readable = [*(path for path in STRICT_READABLE if path != "/proc"), *of_python, *packages]
    landlock.enter_domain_of_files(landlock.find_version(), readable=readable, writable=[folder, *_DEVICES])
    seccomp.forbid([*seccomp.FORBIDDEN, "socket"], namespaces=True)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for the rest of this process's life
    sys.argv = [_FILE]
    sys.path[:] = [folder, *packages]
    os._exit(_run(code))


def _has_packages(path: str, of_python: list[str]) -> bool:
    """Return whether a folder of sys.path has installed packages or the standard library.

    Others are those of the user's project, which may have the dataset with its ground truths.
    """
    is_below = any(path == prefix or path.startswith(f"{prefix}{os.sep}") for prefix in of_python)
    return is_below or os.path.basename(path) in ("site-packages", "dist-packages")


def _run(code: str) -> int:
    """Run code, with the traceback of what it raises as output. Returns: the exit code."""
    names = {"__name__": "__main__"}
    status = 0
    try:
        module = ast.parse(code, _FILE)
        last = module.body.pop() if module.body and isinstance(module.body[-1], ast.Expr) else None
        exec(compile(module, _FILE, "exec"), names)
        if isinstance(last, ast.Expr):
            exec(compile(ast.Interactive([last]), _FILE, "single"), names)  # shows its value, unless that is None
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001 - the code may raise anything
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename != _FILE:
            frame = frame.tb_next
        names.clear()
        gc.collect()  # after a MemoryError, there may be no memory for its traceback
        traceback.print_exception(type(error), error, frame)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status
