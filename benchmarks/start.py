"""Start-up time: `trigon --help`, and the quickstart up to the end of its first training step.

python benchmarks/start.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared import Figure, figures_table

TRIGON = [sys.executable, "-m", "trigon"]


def help_seconds(times: int) -> float:
    """Return the median wall-clock seconds of `trigon --help`."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run([*TRIGON, "--help"], capture_output=True, check=True)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def quickstart_seconds() -> float:
    """Return the seconds from the start of `trigon quickstart` to the end of its first step.

    This includes drawing the data, creating and warming up the model, starting vLLM, and a
    validation.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [*TRIGON, "quickstart", "--folder", folder]
        metrics = Path(folder) / "run" / "metrics.jsonl"
        with (Path(folder) / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as running:
            try:
                while running.poll() is None:
                    time.sleep(0.02)
                    if metrics.exists() and '"step": 1' in metrics.read_text(encoding="utf-8"):
                        return time.perf_counter() - start
            finally:
                running.kill()
        raise RuntimeError((Path(folder) / "log").read_text()[-3000:])


def measure() -> list[Figure]:
    """Return the figures of bar 5."""
    return [
        Figure(5, "trigon --help", help_seconds(5), " s", at_most=0.3),
        Figure(5, "trigon quickstart, to the end of its first step", quickstart_seconds(), " s", at_most=25.0),
    ]


def main() -> None:
    """Measure and print."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(figures_table(measure()))


if __name__ == "__main__":
    main()
