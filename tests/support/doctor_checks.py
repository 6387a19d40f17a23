"""Checks that end in every way in which a check can end, for the tests of trigon/doctor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from trigon.tools.doctor.result import CheckSkipped, Findings, Setting, Tolerances


def passes(setting: Setting) -> Findings:
    return Findings({"speed": "3 m/s"}, notes=("a note",), text="a | table")


def has_problems(setting: Setting) -> Findings:
    print("it printed this")
    return Findings({"speed": "1 m/s"}, problems=("too slow", "too old"))


def raises(setting: Setting) -> Findings:
    raise ValueError("a tensor is on another device")


def skips(setting: Setting) -> Findings:
    raise CheckSkipped("needs a GPU")


def is_killed(setting: Setting) -> Findings:
    print("before the crash", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return Findings()


def exits(setting: Setting) -> Findings:
    os._exit(3)


def compares(setting: Setting, *, difference: float) -> Findings:
    compared = Tolerances(setting)
    compared.at_most("difference", difference, 0.1)
    return compared.findings()


def hangs(setting: Setting) -> Findings:
    """Start a process of its own that hangs as well, and write its process id."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (setting.folder / "pid").write_text(str(process.pid))
    print("waiting", flush=True)
    time.sleep(600)
    return Findings()
