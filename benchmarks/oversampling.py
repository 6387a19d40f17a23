"""Steps a second with and without oversampling, where lengths have a long tail.

    python benchmarks/oversampling.py [--steps 30] [--repeats 2] [--response 384]

The tiny model after a minimal warm start, which seldom knows where to end: lengths are roughly
geometric, and the longest completion of a step is several times the median. Both sides train in
processes of their own, alternating, on one thread. The first steps of a run are left out, since
nothing is carried into them. The tokens that each side learns from are in the table, since shorter
completions alone would be faster, too.

On a CPU a forward pass takes about as long as it has sequences, so that little is gained there; on
a GPU it takes about as long for one sequence as for many.
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

from shared import table

ROOT = Path(__file__).parents[1]
SIDES = {
    "without": (),
    "0.25": ("worker.rollout.oversampling=0.25",),
    "0.5": ("worker.rollout.oversampling=0.5",),
}
WARM_UP = 5
REWARD = """
REWARD_TYPE = "sequential"

def score(reward_input):
    return {"overall": sum(map(ord, reward_input["response"])) % 7 / 7}
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the steps of a run after the first ones. Lengths in tokens."""

    step_seconds: float
    sampling_seconds: float
    mean_length: float
    longest: float
    age: float


def measure(made: Path, folder: Path, overrides: Sequence[str], *, steps: int, response: int) -> Measured:
    """Train in a process of its own, and return what a step took."""
    command = [
        *(sys.executable, "-m", "trigon.trainer.main", f"config={ROOT / 'trigon' / 'tiny' / 'quickstart.yaml'}"),
        f"data.train_files={made / 'data' / 'train.parquet'}",
        "data.val_files=",
        f"worker.actor.model.model_path={made / 'model'}",
        f"worker.reward.reward_function={made / 'reward.py'}:score",
        f"trainer.save_checkpoint_path={folder}",
        f"trainer.max_steps={steps}",
        *("trainer.val_before_train=false", "trainer.val_freq=-1", "trainer.save_freq=-1"),
        *("data.rollout_batch_size=16", "worker.actor.global_batch_size=16", "worker.rollout.n=2"),
        f"data.max_response_length={response}",
        "worker.actor.optim.lr=1e-6",  # so that lengths stay as they are
        *overrides,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()][WARM_UP:]

    def mean(key: str) -> float:
        return statistics.fmean(line.get(key, 0.0) for line in lines)

    return Measured(
        mean("timing_s/step"),
        mean("timing_s/gen"),
        mean("response_length/mean"),
        mean("response_length/max"),
        mean("staleness/mean"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--response", type=int, default=384, help="most tokens of a completion")
    arguments = parser.parse_args()
    assert arguments.steps > WARM_UP
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        tiny = [sys.executable, "-m", "trigon", "tiny", str(made), "--max-updates", "6"]
        subprocess.run(tiny, check=True, capture_output=True)
        (made / "reward.py").write_text(REWARD)
        found: dict[str, list[Measured]] = {name: [] for name in SIDES}
        for repeat in range(arguments.repeats):
            for number, (name, overrides) in enumerate(SIDES.items()):
                run = Path(folder) / f"run{repeat}.{number}"
                found[name].append(measure(made, run, overrides, steps=arguments.steps, response=arguments.response))
    rows = []
    base = statistics.median(each.step_seconds for each in found["without"])
    for name, runs in found.items():
        step = statistics.median(each.step_seconds for each in runs)
        gen = statistics.median(each.sampling_seconds for each in runs)
        one = runs[0]
        rows.append(
            (
                name,
                f"{1 / step:.2f}",
                f"{base / step:.2f}",
                f"{gen:.2f}",
                f"{one.mean_length:.0f}",
                f"{one.longest:.0f}",
                f"{one.age:.2f}",
            )
        )
    head = ("oversampling", "steps/s", "times", "gen s", "mean length", "longest", "mean age")
    print(table(rows, head))


if __name__ == "__main__":
    main()
