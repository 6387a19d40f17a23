"""Commands of child processes that run Python. Imports only the standard library."""

from __future__ import annotations

import sys


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command of a new Python process that runs code, with sys.argv[1:] = arguments.

    The process imports from the places that this one imports from. Without `-P` the working folder
    would come first, and a folder named trigon or a file named types.py in it would be imported
    instead of the package and the standard library's.
    """
    boot = r"import sys; sys.path[:] = sys.argv.pop(1).split('\n'); "
    return [sys.executable, "-P", "-c", boot + code, "\n".join(sys.path), *arguments]
