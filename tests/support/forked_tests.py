"""Runs tests in processes forked from one that has imported the libraries, but not the package.

Started by test_mutations.py, which edits the package between two runs. Importing takes longer than
most of the tests. Reads requests from standard input, a JSON list a line: the arguments of pytest,
the file for its output, and the seconds after which it is killed. Writes each exit status as a
line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest
import torch  # noqa: F401
import transformers.models.auto.modeling_auto
import transformers.processing_utils  # noqa: F401


def run(arguments: list[str], output: str, seconds: float) -> int:
    """Run pytest in a forked process, and return its exit status, or minus the signal's number."""
    process = os.fork()
    if process == 0:
        for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT)):
            os.dup2(os.open(path, flags, 0o600), descriptor)
        os.dup2(1, 2)
        os._exit(pytest.main(arguments))
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def main() -> None:
    """Serve requests until standard input ends."""
    assert "trigon" not in sys.modules
    for line in sys.stdin:
        print(run(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
