"""Runs checks one after the other, each in a process of its own with a time limit.

A crash, a hang or a CUDA error in one check does not end the others.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trigon.system.child_python import python_command
from trigon.tools.doctor.child import CODE, read_result, write_task
from trigon.tools.doctor.result import Findings, Result, Setting

LAST_LINES = 40
"""Lines of a failed check's output that the report shows."""
CPU_FACTOR = 4
"""Factor of the time limits on a CPU."""
_END_SECONDS = 10
_LONGEST_LINE = 400


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    name: as in --only. title: one line that says what it shows.
    run: a function of a module, or a partial of one, as it is called in another process.
    seconds: its time limit on a GPU.
    """

    name: str
    title: str
    run: Callable[[Setting], Findings] | partial[Findings]
    seconds: float


@dataclass(frozen=True, slots=True)
class Limits:
    """How long checks may take.

    check_seconds: of each check; None: its own. total_seconds: of all; checks that would start
    later, or that it ends before their own time, are skipped. None: no limit.
    """

    check_seconds: float | None = None
    total_seconds: float | None = None


def run_checks(
    checks: Sequence[Check], setting: Setting, limits: Limits, *, environment: Mapping[str, str]
) -> Iterator[Result]:
    """Run the checks in their order, and yield each result as soon as it is there.

    environment: the environment variables of their processes.
    """
    start = time.monotonic()
    for check in checks:
        own_seconds = check.seconds * (CPU_FACTOR if setting.device == "cpu" else 1)
        seconds = own_seconds if limits.check_seconds is None else limits.check_seconds
        left = math.inf if limits.total_seconds is None else limits.total_seconds - (time.monotonic() - start)
        skipped = f"the time of all checks is over; run it alone with --only {check.name}, or raise --minutes"
        if left <= 0:
            yield Result(check.name, "skipped", 0.0, Findings(), skipped)
            continue
        result = run_check(check, setting, min(seconds, left), environment=environment)
        if left < seconds and result.seconds >= left:  # it had less than its own time
            result = Result(check.name, "skipped", result.seconds, result.findings, skipped)
        yield result


def run_check(check: Check, setting: Setting, seconds: float, *, environment: Mapping[str, str]) -> Result:
    """Run one check in a process of its own, and end it after so many seconds."""
    folder = setting.folder / "checks" / check.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    write_task(folder, check.run, setting)
    log = folder / "output.log"
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            python_command(CODE, str(folder)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # so that the processes that it starts can be ended with it
        )
        try:
            status: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    took = time.monotonic() - start
    found = read_result(folder)
    if status == 0 and isinstance(found, str):
        return Result(check.name, "skipped", took, Findings(), found)
    if status == 0 and isinstance(found, Findings) and not found.problems:
        return Result(check.name, "pass", took, found)
    findings = found if isinstance(found, Findings) else Findings()
    lines = _last_lines(log)
    if status is None:
        reason = f"it did not end within {seconds:.0f} s"
    elif status < 0:
        reason = f"its process was ended by {signal.Signals(-status).name}"
    elif findings.problems:
        reason = "; ".join(findings.problems)
    else:
        reason = lines[-1] if lines else f"its process ended with status {status} and no output"
    return Result(check.name, "fail", took, findings, reason, "\n".join(lines))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a check's process and those that it has started. They may clean up first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)  # the group outlives its first process
        except ProcessLookupError:
            return
        if process.poll() is not None:
            continue
        try:
            process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _last_lines(log: Path) -> list[str]:
    """Return the last lines of a file: no empty ones, and only the last state of progress bars."""
    lines = [
        line.rpartition("\r")[2].strip("\r\n").rstrip()[:_LONGEST_LINE]
        for line in log.read_text(encoding="utf-8", errors="replace").split("\n")
    ]
    return [line for line in lines if line][-LAST_LINES:]
