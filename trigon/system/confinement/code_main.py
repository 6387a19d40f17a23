"""The program of a sandbox: runs the code of its standard input, and shows its last value.

Python gets the text of this file as a command, since the package is not in the sandbox. The
argument has the folders of packages, a line for each.
"""

from __future__ import annotations

import ast
import gc
import os
import sys
import traceback

_FILE = "code"


def main() -> None:
    """Run the code, print what it raises, and end this process."""
    packages = sys.argv[1].split("\n")
    code = sys.stdin.buffer.read().decode("utf-8")
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for the rest of this process's life
    sys.argv = [_FILE]
    sys.path[:] = [os.getcwd(), *packages]
    os._exit(run(code))


def run(code: str) -> int:
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


if __name__ == "__main__":
    main()
