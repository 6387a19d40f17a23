"""Makes what the example needs: a tiny model that can call the tool `crop`, and drawings.

    python3 examples/look_closer/make.py runs/look_closer
    python3 examples/look_closer/make.py runs/look_closer_without --without-tool

writes model/, train.parquet and validation.parquet. The model is random, and then shown how to
write: a call for one of four regions, which is mostly the wrong one, and the answer, which is right
only sometimes. With --without-tool it is shown the answers only, half of them right.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from drawings import PATTERNS, box_of, draw
from trigon.environments.crop import crop
from trigon.environments.tools import ToolEnvironment, describe_tools
from trigon.tiny.demonstrations import Demonstration, learn_demonstrations
from trigon.tiny.model import make_tiny

PROBLEM = "<image>What is in the red frame: rows, columns, checks or plain?"
NUM_TRAIN, NUM_VALIDATION = 1024, 192
MAX_PIXELS = 56 * 56
RIGHT_REGION, RIGHT_ANSWER = 0.5, 0.5
ACCURACY = 0.4
UPDATES, BATCH, RATE = 200, 8, 2.5e-3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a tiny model, and drawings whose detail is lost.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/look_closer"), help="output (%(default)s)")
    parser.add_argument("--without-tool", action="store_true", help="a model that answers at once")
    parser.add_argument("--updates", type=int, default=UPDATES, help="supervised updates (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the data (%(default)s)")
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(chosen.seed)
    for name, number in (("train", NUM_TRAIN), ("validation", NUM_VALIDATION)):
        write(folder / f"{name}.parquet", [row_of(rng, index)[0] for index in range(number)])
        print(f"{folder / name}.parquet: {number} rows")
    make_tiny(folder / "model", seed=chosen.seed)
    schemas = [] if chosen.without_tool else describe_tools({"crop": crop})
    learn_demonstrations(
        folder / "model",
        lambda index: demonstrate(random.Random(f"{chosen.seed} {index}"), index, with_tool=not chosen.without_tool),
        num_updates=chosen.updates,
        target_accuracy=ACCURACY,
        batch_size=BATCH,
        learning_rate=RATE,
        seed=chosen.seed,
        opens=False,
        role="tool",
        tools=schemas,
        min_pixels=MAX_PIXELS,
        max_pixels=MAX_PIXELS,
    )
    print(f"{folder / 'model'}: after {chosen.updates} supervised updates")
    return 0


def row_of(rng: random.Random, index: int) -> tuple[dict[str, Any], Image.Image, int]:
    """Return a row, its picture, and the region of the red frame."""
    region, pattern = rng.randrange(4), PATTERNS[index % len(PATTERNS)]
    image = draw(rng, region=region, pattern=pattern)
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"problem": PROBLEM, "answer": pattern, "images": [{"bytes": file.getvalue(), "path": None}]}, image, region


def demonstrate(rng: random.Random, index: int, *, with_tool: bool) -> Demonstration:
    row, image, region = row_of(rng, index)
    tools = ToolEnvironment(
        {"crop": crop} if with_tool else {},
        tool_format="hermes",
        role="tool",
        timeout_seconds=10.0,
        max_image_pixels=1 << 24,
    )
    asked = region if rng.random() < RIGHT_REGION else rng.randrange(4)

    def script(turn: int) -> tuple[str, bool]:
        if with_tool and turn == 0:
            return call_of(asked), True
        is_right = asked == region and rng.random() < RIGHT_ANSWER
        return (row["answer"] if is_right else rng.choice(PATTERNS)), True

    return Demonstration(row, tools, script, images=[image])


def call_of(region: int) -> str:
    call = {"name": "crop", "arguments": {"bbox_2d": box_of(region)}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # The metadata that `datasets` writes with a table, so that it reads the column as images.
    features = {
        "problem": {"dtype": "string", "_type": "Value"},
        "answer": {"dtype": "string", "_type": "Value"},
        "images": {"feature": {"_type": "Image"}, "_type": "List"},
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), path)


if __name__ == "__main__":
    sys.exit(main())
