"""Makes what the example needs: a tiny model that can write actions, and the rows of its data.

    python3 examples/gridworld/make.py runs/gridworld

writes model/, train.jsonl and validation.jsonl. A row has a problem and a seed, which decides where
the player stands and looks; the picture comes from the environment. The model is random, and then
shown episodes: half of their actions are random, and the others, which it learns, are good ones. It
stops as soon as it begins to read the pictures, so it still plays badly.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from environment import ACTIONS, Corridor

from trigon.tools.quickstart.model import make_tiny
from trigon.tools.quickstart.warm_start import Demonstration, learn_demonstrations

PROBLEM = "Walk to the green square: left, right or forward?"
NUM_TRAIN, NUM_VALIDATION = 1024, 96
RANDOM_ACTIONS = 0.5
ACCURACY = 0.45  # mean probability of a good action at which the model has begun to read the pictures
MAX_UPDATES, BATCH, RATE = 200, 12, 1.2e-3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a tiny model, and the rows of the gridworld.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/gridworld"), help="output (%(default)s)")
    parser.add_argument("--accuracy", type=float, default=ACCURACY, help="at which it stops learning (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and what it is shown (%(default)s)")
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, first, number in (("train", 0, NUM_TRAIN), ("validation", NUM_TRAIN, NUM_VALIDATION)):
        rows = [row_of(seed) for seed in range(first, first + number)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{folder / name}.jsonl: {number} rows")
    make_tiny(folder / "model", seed=chosen.seed)
    seen: list[float] = []
    accuracy = learn_demonstrations(
        folder / "model",
        lambda index: demonstrate(index, random.Random(f"{chosen.seed} {index}")),
        num_updates=MAX_UPDATES,
        target_accuracy=chosen.accuracy,
        batch_size=BATCH,
        learning_rate=RATE,
        seed=chosen.seed,
        on_progress=seen.append,
    )
    print(f"{folder / 'model'}: a good action has a probability of {accuracy:.2f} after {len(seen)} supervised updates")
    return 0


def row_of(seed: int) -> dict[str, object]:
    return {"problem": PROBLEM, "answer": "", "seed": seed}


def demonstrate(index: int, rng: random.Random) -> Demonstration:
    corridor = Corridor()

    def script(turn: int) -> tuple[str, bool]:
        is_random = rng.random() < RANDOM_ACTIONS
        action = rng.choice(ACTIONS) if is_random else best_action(corridor)
        return f" {action}", not is_random  # with the space it is one token

    return Demonstration(row_of(1_000_000 + index), corridor, script)


def best_action(corridor: Corridor) -> str:
    """Return an action of a shortest way to the goal, which is at the right end."""
    return ("forward", "left", "left", "right")[corridor.env.unwrapped.agent_dir]  # looks right, down, left, up


if __name__ == "__main__":
    sys.exit(main())
