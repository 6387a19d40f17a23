"""Writes sums of two numbers from 1 to 9 as JSON lines: 61 to train on, 20 others to validate.

    python3 examples/data_preprocess/arithmetic.py --local_dir runs/arithmetic

writes train.jsonl and validation.jsonl, with columns `problem` ("7 + 5 = ?") and `answer` ("12").
The 81 pairs of the digits 1 to 9 are divided at random; a validation sum may be in the training
data with its digits exchanged.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

NUM_TRAIN = 61


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write sums as train.jsonl and validation.jsonl.")
    parser.add_argument("--local_dir", type=Path, default=Path("runs/arithmetic"), help="output folder (%(default)s)")
    folder = parser.parse_args(arguments).local_dir
    pairs = [(first, second) for first in range(1, 10) for second in range(1, 10)]
    random.Random(0).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", pairs[:NUM_TRAIN]), ("validation", pairs[NUM_TRAIN:])):
        rows = [{"problem": f"{first} + {second} = ?", "answer": str(first + second)} for first, second in part]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
