"""Seconds until a run continues whose only sampler was killed while it sampled.

    python benchmarks/replacement.py [--repeats 3] [key=value ...]

The tiny model, one learner, one sampler, k = 1. Measured from SIGKILL until another worker samples,
and the seconds of the longest step from then on, beside the median of all steps. Nearly all of it
is the start of a Ray worker and of vLLM.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from cluster_runs import LAYOUTS, command_options, equal, make_files, steps_of
from shared import machine, table

from trigon.system.processes import descendants

STEPS, KILLED_AFTER = 7, 3
SAMPLES = b"ray::Worker.generate"


class Measured(NamedTuple):
    """Seconds."""

    until_sampling: float
    longest_step: float
    median_step: float


def measure(overrides: list[str]) -> Measured:
    """Kill the sampler of a run while it samples, and return how long the run waits.

    Raises: RuntimeError if the run does not make all its steps.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, setting = Path(name), equal(2, 96)
        make_files(folder, setting, steps=STEPS, tiny=True)
        command = [sys.executable, "-m", "trigon", "train"]
        command += [*command_options(LAYOUTS["separate, k = 1"], setting, folder, STEPS), *overrides]
        with (folder / "log").open("w") as log:
            run = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
            while _steps_made(folder) < KILLED_AFTER and run.poll() is None:
                time.sleep(0.01)
            killed = _wait_for_sampler(run)
            os.kill(killed, signal.SIGKILL)
            start = time.monotonic()
            _wait_for_sampler(run, other_than=killed)
            until_sampling = time.monotonic() - start
            status = run.wait()
        seconds = [step.total for step in steps_of(folder / "trigon")]
        if status or len(seconds) <= STEPS:
            raise RuntimeError((folder / "log").read_text()[-3000:])
        return Measured(until_sampling, max(seconds[KILLED_AFTER:]), statistics.median(seconds))


def _steps_made(folder: Path) -> int:
    file = folder / "trigon" / "metrics.jsonl"
    return file.read_text().count('"timing_s/step"') if file.exists() else 0


def _wait_for_sampler(run: subprocess.Popen[bytes], *, other_than: int | None = None) -> int:
    """Return the process that samples at this moment, as Ray names it."""
    while run.poll() is None:
        for pid in descendants(run.pid):
            try:
                samples = SAMPLES in Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if samples and pid != other_than:
                return pid
        time.sleep(0.01)
    raise RuntimeError(f"the run ended with status {run.returncode} before it sampled")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the runs")
    chosen = parser.parse_intermixed_args()
    rows = [[f"{value:.1f}" for value in measure(chosen.overrides)] for _ in range(chosen.repeats)]
    print(table(rows, ("kill to sampling, s", "longest step, s", "median step, s")))
    print(machine())


if __name__ == "__main__":
    main()
