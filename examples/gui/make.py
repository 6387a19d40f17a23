"""Writes the rows of the simulated settings: train.parquet and test.parquet.

python3 examples/gui/make.py --folder datasets/gui
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from settings import GROUPS, HEIGHT, WIDTH

PROBLEM = (
    "You see the screen of a phone, {width} x {height} pixels. Turn {state} {switch}. Think briefly, then write one "
    "action: <action>tap(x, y)</action>, in pixels from the top left corner. You will see what it changes."
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write tasks in the settings of a phone.")
    parser.add_argument("--folder", type=Path, default=Path("datasets/gui"), help="output (%(default)s)")
    parser.add_argument("--num-train", type=int, default=4096, help="(%(default)s)")
    parser.add_argument("--num-test", type=int, default=256, help="(%(default)s)")
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, first, number in (("train", 0, chosen.num_train), ("test", chosen.num_train, chosen.num_test)):
        rows = [row_of(seed) for seed in range(first, first + number)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        print(f"{folder / name}.parquet: {number} rows")
    return 0


def row_of(seed: int) -> dict[str, object]:
    rng = random.Random(f"task {seed}")
    switch = rng.choice([switch for switches in GROUPS.values() for switch in switches])
    state = rng.choice(("on", "off"))
    problem = PROBLEM.format(width=WIDTH, height=HEIGHT, state=state, switch=switch)
    return {"problem": problem, "answer": "", "seed": seed, "switch": switch, "state": state}


if __name__ == "__main__":
    sys.exit(main())
