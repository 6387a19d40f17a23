"""Trains variants of the quickstart with several seeds, to compare what they learn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

LAST_STEPS = 20
Metrics = dict[str, float]


def train_variants(
    folder: Path, seeds: Sequence[int], variants: Iterable[str], options: Callable[[str, int, Path], Sequence[str]]
) -> dict[str, list[Path]]:
    """Train variants with all seeds, and return their run folders. Finished runs are kept.

    options: gives those of a run, for its variant, its seed, and the folder in which the model and
        the data of this seed are made, the same for all variants.
    """
    runs: dict[str, list[Path]] = {name: [] for name in variants}
    for seed in seeds:
        made = folder / "made" / f"seed{seed}"
        made.mkdir(parents=True, exist_ok=True)
        for name, found in runs.items():
            place = folder / f"{name.replace(' = ', '').replace(', ', '_').replace(' ', '_')}_seed{seed}"
            place.mkdir(parents=True, exist_ok=True)
            if not (place / "made").exists():
                (place / "made").symlink_to(made.absolute())
            command = [sys.executable, "-m", "trigon", "quickstart", "--folder", str(place), "--seed", str(seed)]
            start = time.monotonic()
            with (place / "log").open("a", encoding="utf-8") as log:
                subprocess.run(
                    [*command, *options(name, seed, made / f"qwen2_5_vl_seed{seed}")],
                    check=True,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            print(f"{name}, seed {seed}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            found.append(place / "run")
    return runs


def values_of(run: Path, key: str) -> list[float]:
    """Return a metric of all steps of a run that have it."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [metrics[key] for metrics in (json.loads(line)["metrics"] for line in lines) if key in metrics]


def mean_and_spread(values: Sequence[float]) -> tuple[str, str]:
    """Return the mean over seeds and the standard deviation; this is empty for one seed."""
    return f"{statistics.fmean(values):.3f}", f"{statistics.stdev(values):.3f}" if len(values) > 1 else ""


def plot(runs: dict[str, list[Path]], output: Path, *keys: str) -> None:
    """Draw metrics; runs that differ in their seeds are one line."""
    folders = [str(folder) for each in runs.values() for folder in each]
    command = [sys.executable, "-m", "trigon", "plot", *folders, "-o", str(output), "--smooth", "5"]
    subprocess.run([*command, "--metric", *keys], check=True)
