"""How much faster a whole training step is than TRL's: sample, score, learn, hand over, on the same work.

    python benchmarks/whole_step.py [--swift]

Both sides train the same 40 M-parameter Qwen2.5-VL in float32 on one CPU thread, on the same drawings and questions,
with the same group size, completions of exactly the same length, the same reward, and one AdamW update a step. Each is
a process of its own; they take turns, step by step, and whichever is not asked waits. The first step of each is not
counted. Vocabularies of 1,024 and of 32,000: off a GPU, TRL computes logits of prompt tokens too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers import python_of
from shared import GEOMETRY, LONG, SHORT, Figure, Shape, figures_table, make_data, make_folder, table

HERE = Path(__file__).parent
BARS = {SHORT.name: 3.5, LONG.name: 2.3, GEOMETRY.name: 2.0}
VOCABULARIES = (1024, 32_000)


class Side:
    """A trainer in a process of its own, that makes a step when it is asked to."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._log = log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=environment
        )

    def step(self) -> float:
        """Let it make one step, and return the seconds that it took. Raises: RuntimeError if it ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print("go", file=self._process.stdin, flush=True)
            for line in self._process.stdout:
                if line.startswith("@step "):
                    return float(json.loads(line.removeprefix("@step "))["seconds"])
        except BrokenPipeError:
            pass
        raise RuntimeError(f"{self._process.args[1]} ended early:\n{self._log.read_text()[-3000:]}")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of the steps of both sides, in the order in which they were made."""

    shape: Shape
    vocabulary: int
    ours: list[float]
    theirs: list[float]
    phases: dict[str, float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.theirs) / statistics.median(self.ours)


def compare(shape: Shape, vocabulary: int, folder: Path, *, steps: int) -> Comparison:
    """Let both sides take turns."""
    make_folder(folder / "model", vocabulary=vocabulary, shape=shape)
    make_data(folder / "data.parquet", model=folder / "model", shape=shape, rows=shape.prompts * (steps + 2))
    counts = [str(shape.prompts), str(shape.n), str(shape.response), str(steps + 1)]
    ours = Side([sys.executable, str(HERE / "side_trigon.py"), str(folder), shape.name, str(steps + 1)], folder / "a")
    theirs = Side([str(python_of("trl")), str(HERE / "side_trl.py"), str(folder), *counts], folder / "b")
    try:
        pairs = [(ours.step(), theirs.step()) for _ in range(steps + 1)][1:]
    finally:
        ours.close()
        theirs.close()
    return Comparison(
        shape, vocabulary, [pair[0] for pair in pairs], [pair[1] for pair in pairs], phases_of(folder / "trigon")
    )


def phases_of(run: Path) -> dict[str, float]:
    """Return the mean seconds of each phase of the steps that a run has reported, the first left out."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line["metrics"] for line in lines if line["step"] > 1]
    names = {key.removeprefix("timing_s/") for step in steps for key in step if key.startswith("timing_s/")}
    return {name: statistics.fmean(step.get(f"timing_s/{name}", 0.0) for step in steps) for name in names}


def profile_of(found: Comparison) -> dict[str, float]:
    """Return the seconds of each phase of our step, and of what is in none; that we waited for our turn is in none."""
    phases = {name: seconds for name, seconds in found.phases.items() if name not in ("step", "other")}
    return phases | {"other": statistics.fmean(found.ours) - sum(phases.values())}


def host_share(profile: dict[str, float]) -> float:
    """Return the share of a step that was spent neither in the engine nor in the trainer."""
    devices = ("gen", "weights", "update_actor", "old", "ref", "parity")
    return 1.0 - sum(profile.get(name, 0.0) for name in devices) / sum(profile.values())


def measure(*, steps: int) -> tuple[list[Figure], str]:
    """Return the figures of bars 2 and 4, and the tables behind them."""
    figures, rows, profile = [], [], {}
    for vocabulary in VOCABULARIES:
        for shape in (SHORT, LONG, GEOMETRY):
            with tempfile.TemporaryDirectory() as folder:
                found = compare(shape, vocabulary, Path(folder), steps=steps)
            ours, theirs = statistics.median(found.ours), statistics.median(found.theirs)
            rows.append((shape.name, f"{vocabulary:,}", f"{theirs:.2f}", f"{ours:.2f}", f"{found.ratio:.2f}"))
            what = f"whole step against TRL, {shape.name}, vocabulary {vocabulary:,}"
            figures.append(Figure(2, what, found.ratio, "x", at_least=BARS[shape.name]))
            if shape is GEOMETRY and vocabulary == max(VOCABULARIES):
                profile = profile_of(found)
                share = 100 * host_share(profile)
                figures.append(Figure(4, "share of a step outside engine and trainer", share, " %", at_most=5.0))
    step = sum(profile.values())
    parts = sorted(profile.items(), key=lambda part: -part[1])
    return figures, "\n\n".join(
        (
            table(rows, ("a step of 16 or 10 answers", "vocabulary", "TRL, s", "Trigon, s", "ratio")),
            f"A step of the {GEOMETRY.name} shape, vocabulary {max(VOCABULARIES):,}:",
            table(
                [(name, f"{seconds:.3f}", f"{100 * seconds / step:.1f} %") for name, seconds in parts]
                + [("all", f"{step:.3f}", "100 %")],
                ("phase", "seconds", "share"),
            ),
        )
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps of each side that count (%(default)s)")
    figures, tables = measure(steps=parser.parse_args().steps)
    print(f"{tables}\n\n{figures_table(figures)}")


if __name__ == "__main__":
    main()
