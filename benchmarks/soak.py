"""Runs a tiny model for many steps and prints whether anything grows: memory, open files, threads.

    nice -n 5 python benchmarks/soak.py [--steps 2000] [--engine vllm] [--output soak.json]

A real run of `trigon train` with vLLM, reward workers, validations and checkpoints, measured from
outside: /proc of the driver and of every process below it, once for each finished step. The slopes
are those after the warm-up, by Theil and Sen, with their interval of 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from shared import machine, table

from trigon.report.memory_growth import fit_slope
from trigon.system.processes import PROC, descendants

CONFIG = Path(__file__).parents[1] / "trigon" / "tools" / "quickstart" / "quickstart.yaml"
WARM_UP = 0.2
"""Share of the steps that the slopes leave out."""
MAX_POINTS = 400
"""Points of a slope: all pairs of them are compared."""
PARTS = ("driver", "reward workers", "other processes", "all")


def main() -> None:
    """Run, print the table, and exit with 1 if the run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--folder", type=Path, help="of the run; kept. Default: a temporary one, removed afterwards")
    parser.add_argument("--output", type=Path, help="write all measurements to this file, as JSON")
    parser.add_argument("overrides", nargs="*", help="options of the run: key=value")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="soak_"))
    try:
        points, status = soak(folder, arguments.steps, arguments.engine, arguments.overrides)
        metrics = read_metrics(folder / "run")
        if arguments.output is not None:
            arguments.output.write_text(json.dumps({"points": points, "metrics": metrics}), encoding="utf-8")
        print(report(points, metrics, engine=arguments.engine), flush=True)
        if status != 0:
            tail = (folder / "run.log").read_text(encoding="utf-8")[-3000:]
            raise SystemExit(f"the run ended with status {status} before step {arguments.steps}:\n{tail}")
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def soak(folder: Path, steps: int, engine: str, overrides: Sequence[str]) -> tuple[list[dict[str, float]], int]:
    """Train for this number of steps.

    Returns: what was measured after each step seen, and the exit status of the run.
    """
    if not (folder / "model").is_dir():
        subprocess.run([sys.executable, "-m", "trigon", "tiny", str(folder), "--max-updates", "60"], check=True)
    run = folder / "run"
    command = [
        *(sys.executable, "-m", "trigon", "train", str(CONFIG)),
        f"data.train_files={folder / 'data' / 'train.parquet'}",
        f"data.val_files={folder / 'data' / 'validation.parquet'}",
        f"worker.actor.model.model_path={folder / 'model'}",
        f"worker.rollout.name={engine}",
        f"trainer.save_checkpoint_path={run}",
        f"trainer.max_steps={steps}",
        f"trainer.total_epochs={steps}",
        *("trainer.val_freq=250", "trainer.save_freq=50", "trainer.val_before_train=false"),
        *("data.rollout_batch_size=4", "worker.actor.global_batch_size=4", "worker.rollout.n=4"),
        *("worker.reward.num_cpus=2", "worker.actor.optim.lr=1e-5", "worker.actor.optim.lr_scheduler_type=constant"),
        *overrides,
    ]
    with (folder / "run.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            points = watch(process, run)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return points, process.returncode


def watch(process: subprocess.Popen[bytes], run: Path) -> list[dict[str, float]]:
    """Measure the run's processes after each step that is seen, until the run ends."""
    points: list[dict[str, float]] = []
    seen = 0
    while process.poll() is None:
        step = num_lines(run / "metrics.jsonl")
        if step > seen:
            seen = step
            points.append({"step": float(step), **measure(process.pid)})
        time.sleep(0.2)
    return points


def measure(driver: int) -> dict[str, float]:
    """Return MiB of each part, and open files, threads and processes of all together."""
    pids = descendants(driver)
    rewards = [pid for pid in pids if "trigon.rewards.worker" in read_command(pid)]
    rewards += descendants(*rewards)
    groups = {
        "driver": [driver],
        "reward workers": sorted(set(rewards)),
        "other processes": [pid for pid in pids if pid not in rewards],
    }
    measured = {
        name: [use for pid in group if (use := measure_process(pid)) is not None] for name, group in groups.items()
    }
    everything = [use for group in measured.values() for use in group]
    parts = {**measured, "all": everything}
    shared = os.statvfs("/dev/shm")
    return {
        **{f"{name}, resident MiB": sum(use.resident_bytes for use in parts[name]) / 2**20 for name in PARTS},
        **{f"{name}, private MiB": sum(use.private_bytes for use in parts[name]) / 2**20 for name in PARTS},
        **{f"{name}, open files": float(sum(use.num_files for use in parts[name])) for name in ("driver", "all")},
        **{f"{name}, threads": float(sum(use.num_threads for use in parts[name])) for name in ("driver", "all")},
        "processes": float(len(everything)),
        "shared memory (/dev/shm), MiB": (shared.f_blocks - shared.f_bfree) * shared.f_frsize / 2**20,
    }


def num_lines(path: Path) -> int:
    """Return the number of complete lines of a file; 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def report(points: Sequence[Mapping[str, float]], metrics: Sequence[Mapping[str, Any]], *, engine: str) -> str:
    """Return the conditions and the table."""
    steps = int(points[-1]["step"])
    warm_up = int(WARM_UP * steps)
    rows = [line_of(name, [point["step"] for point in points], [point[name] for point in points], warm_up)
            for name in points[0] if name != "step"]  # fmt: skip
    timed = [line for line in metrics if line["step"] > 0]
    xs = [float(line["step"]) for line in timed]
    ys = [line["metrics"]["perf/time_per_step"] for line in timed]
    rows.append(line_of("seconds per step, without validations and checkpoints", xs, ys, warm_up))
    hours = sum(line["metrics"]["timing_s/step"] for line in timed) / 3600
    header = ("", f"median, steps {warm_up + 1} to {warm_up + steps // 10}", f"median, last {steps // 10} steps",
              "slope per 1,000 steps", "95 % interval")  # fmt: skip
    text = f"{steps:,} steps, {engine}, {hours:.2f} h, {len(points):,} measurements; {machine()}"
    return f"{text}\n\n{table(rows, header)}"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses at one moment.

    resident_bytes: pages in memory, those shared with other processes included. private_bytes:
    those of them that no file backs and that are not in shared memory, which is what a leak in the
    process grows.
    """

    pid: int
    resident_bytes: int
    private_bytes: int
    num_files: int
    num_threads: int


def measure_process(pid: int) -> ProcessUse | None:
    """Return what a process uses; None if it has ended, or its files belong to another user."""
    fields = dict(line.split(":", 1) for line in _read(PROC / str(pid) / "status").splitlines() if ":" in line)
    try:
        num_files = len(os.listdir(PROC / str(pid) / "fd"))
    except OSError:
        return None
    if "VmRSS" not in fields:  # it has ended, and its parent has not waited for it
        return None

    def kilobytes(name: str) -> int:
        return int(fields.get(name, "0 kB").split()[0]) * 1024

    return ProcessUse(pid, kilobytes("VmRSS"), kilobytes("RssAnon"), num_files, int(fields["Threads"]))


def read_command(pid: int) -> str:
    """Return the command line of a process, with spaces; "" if it has ended."""
    return _read(PROC / str(pid) / "cmdline").replace("\0", " ").strip()


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # the process has ended
        return ""


def line_of(name: str, xs: Sequence[float], ys: Sequence[float], warm_up: int) -> tuple[str, ...]:
    """Return a line of the table: the level early and late, and the slope after the warm-up."""
    kept = [(x, y) for x, y in zip(xs, ys, strict=True) if x > warm_up]
    tenth = max(1, len(xs) // 10)
    every = -(-len(kept) // MAX_POINTS)
    # Medians of consecutive points: single steps are noisy, and neighbours are not independent.
    means = [kept[start : start + every] for start in range(0, len(kept), every)]
    xs, ys = ([median(point[axis] for point in part) for part in means] for axis in (0, 1))
    slope, low, high = fit_slope(xs, ys, confidence=0.95)
    return (
        name,
        f"{median(y for _, y in kept[:tenth]):,.4g}",
        f"{median(y for _, y in kept[-tenth:]):,.4g}",
        f"{1000 * slope:+.3g}",
        f"{1000 * low:+.3g} to {1000 * high:+.3g}",
    )


if __name__ == "__main__":
    main()
