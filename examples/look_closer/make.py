"""Makes what the example needs: a tiny model that can call the tool `crop`, and drawings.

    python3 examples/look_closer/make.py runs/look_closer

writes model/, train.parquet and validation.parquet. The model is random, and then shown episodes:
where it has the tool, a call for one of the four regions and what is there, both often wrong, and
without the tool a word at random. So it can write both, and asks and reads badly.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from drawings import EXTENT, MAX_PIXELS, PATTERNS, REGIONS, draw
from trigon.environments.tools import ToolEnvironment, crop, describe_tools
from trigon.tools.quickstart.model import make_tiny
from trigon.tools.quickstart.warm_start import Demonstration, learn_demonstrations

NUM_TRAIN, NUM_VALIDATION = 1024, 192
WITHOUT_TOOL = 0.25
"""Fraction of the episodes that are shown without the tool."""
GUESSED_REGIONS, GUESSED_PATTERNS = 0.5, 0.3
"""Fractions of the calls and the words that are random: a quarter of these is right by chance."""
UPDATES, BATCH, RATE = 240, 12, 1.2e-3
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a tiny model, and drawings whose detail is lost.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/look_closer"), help="output (%(default)s)")
    parser.add_argument("--updates", type=int, default=UPDATES, help="supervised updates (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the data (%(default)s)")
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(chosen.seed)
    for name, number in (("train", NUM_TRAIN), ("validation", NUM_VALIDATION)):
        write(folder / f"{name}.parquet", [draw(rng, index).row for index in range(number)])
        print(f"{folder / name}.parquet: {number} rows")
    # Of this family 64 x 64 pixels are four image tokens.
    make_tiny(folder / "model", model_type="qwen3_vl", seed=chosen.seed)
    shutil.copyfile(CHAT_TEMPLATE, folder / "model" / CHAT_TEMPLATE.name)
    seen = 0

    def show(accuracy: float) -> None:
        nonlocal seen
        seen += 1
        if seen % 20 == 0:
            print(f"supervised update {seen}: {accuracy:.0%} of turns as shown", flush=True)

    learn_demonstrations(
        folder / "model",
        lambda index: demonstrate(random.Random(f"{chosen.seed} {index}"), index),
        num_updates=chosen.updates,
        target_accuracy=1.0,
        batch_size=BATCH,
        learning_rate=RATE,
        scheduler="cosine",
        seed=chosen.seed,
        opens=False,
        tools=describe_tools({"crop": crop}),
        min_pixels=MAX_PIXELS,
        max_pixels=MAX_PIXELS,
        on_progress=show,
    )
    print(f"{folder / 'model'}: after {chosen.updates} supervised updates")
    return 0


def demonstrate(rng: random.Random, index: int) -> Demonstration:
    drawing = draw(rng, index)
    has_tool = rng.random() >= WITHOUT_TOOL
    tools = ToolEnvironment(
        {"crop": crop} if has_tool else {},
        tool_format="hermes",
        role="tool",
        timeout_seconds=10.0,
        max_image_pixels=1 << 24,
    )
    asked = rng.randrange(len(REGIONS)) if rng.random() < GUESSED_REGIONS else drawing.red

    def script(turn: int) -> tuple[str, bool]:
        if has_tool and turn == 0:
            return call_of(asked), True
        is_guess = not has_tool or rng.random() < GUESSED_PATTERNS
        return (rng.choice(PATTERNS) if is_guess else drawing.patterns[asked]), True

    return Demonstration(drawing.row, tools, script, images=[drawing.image], shows_tools=has_tool)


def call_of(region: int) -> str:
    left, top = REGIONS[region]
    call = {"name": "crop", "arguments": {"bbox_2d": [left, top, left + EXTENT, top + EXTENT]}}
    return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
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
