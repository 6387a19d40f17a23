"""Data that passes through the driver of a run with several workers, and the driver's memory.

    python benchmarks/moves.py

Trains the embedded tiny model on two CPU workers, with increasing numbers of prompts per step, and
then with increasing numbers of steps. Takes minutes on two cores. Bytes are exact and reproducible;
memory is the peak of the driver process alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPLETIONS = 4
PROMPTS = (8, 16, 32, 64)
STEPS = 24


def main() -> None:
    """Measure and print."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        run(["tiny", str(made), "--max-updates", "6"])
        print(f"two CPU workers, {COMPLETIONS} completions of at most 24 tokens per prompt, one small drawing each\n")
        print("prompts / step | sent, bytes | received, bytes | bytes / prompt | driver memory, MiB")
        for prompts in PROMPTS:
            *_, line = train(made, Path(folder) / f"prompts{prompts}", prompts=prompts, steps=3)
            print(row(prompts, line, prompts))
        print("\nstep | sent, bytes | received, bytes | bytes / prompt | driver memory, MiB")
        lines = train(made, Path(folder) / "steps", prompts=8, steps=STEPS)
        for step in (2, 4, 8, 16, STEPS):
            print(row(step, lines[step - 1], 8))


def train(made: Path, folder: Path, *, prompts: int, steps: int) -> list[dict[str, float]]:
    """Return the metrics of each step of a run."""
    run(
        [
            "train",
            str(ROOT / "trigon" / "tools" / "quickstart" / "quickstart.yaml"),
            f"data.train_files={made / 'data' / 'train.parquet'}",
            f"worker.actor.model.model_path={made / 'model'}",
            f"trainer.save_checkpoint_path={folder}",
            f"trainer.max_steps={steps}",
            "trainer.n_gpus_per_node=2",
            "trainer.val_before_train=false",
            "trainer.val_freq=-1",
            "trainer.save_freq=-1",
            f"data.rollout_batch_size={prompts}",
            f"worker.actor.global_batch_size={prompts}",
            f"worker.rollout.n={COMPLETIONS}",
        ]
    )
    return [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def row(first: int, metrics: dict[str, float], prompts: int) -> str:
    """Return one row of a table."""
    sent, received = metrics["moved/sent_bytes"], metrics["moved/received_bytes"]
    each, memory = (sent + received) / prompts, metrics["perf/cpu_memory_used_gb"] * 1024
    return f"{first:14} | {sent:11,.0f} | {received:15,.0f} | {each:14,.0f} | {memory:8,.0f}"


def run(arguments: list[str]) -> None:
    """Run a command of Trigon; show its output if it fails."""
    done = subprocess.run([sys.executable, "-m", "trigon", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])


if __name__ == "__main__":
    main()
