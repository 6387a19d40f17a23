"""Generates a dataset in Geometry3K's schema whose problems cannot be solved without the image.

A drawing is a square of unit cells, some of them shaded; the problem is to find the shaded area.
The text is the same for every row, the areas are equally frequent, and positions and colours are
random, so that without the image the accuracy is 1 / NUM_ANSWERS.
"""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

CELLS = 3
"""Cells along each side."""
CELL_PIXELS = 28
"""Pixels along each side of a cell. 28 x 28 pixels are one image token of Qwen2.5-VL."""
NUM_ANSWERS = 6
"""The areas are 1 to 6, equally frequent."""
PROBLEM = "<image>Find the area of the shaded part."
TRAIN = "train.parquet"
"""The training rows."""

VALIDATION = "validation.parquet"
"""The validation rows."""

BLANK = "validation_blank.parquet"
"""The validation rows with blank images."""

_SHADES = ((200, 30, 30), (30, 60, 200), (20, 130, 40), (160, 30, 160))


def make_dataset(folder: Path, *, num_train: int, num_validation: int, seed: int) -> tuple[Path, Path]:
    """Write train.parquet, validation.parquet and BLANK, and return the paths of the first two.

    Columns: images (a list of one PNG), problem (with `<image>`), answer (text). All drawings of
    both files are different. The same arguments give the same pixels. BLANK has the rows of
    validation.parquet with images of one colour.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(itertools.islice(_distinct_rows(random.Random(seed)), num_train + num_validation))
    train, validation = folder / TRAIN, folder / VALIDATION
    _write(train, rows[:num_train])
    _write(validation, rows[num_train:])
    blank = _png(_blank())
    _write(folder / BLANK, [(blank, area) for _, area in rows[num_train:]])
    return train, validation


def _distinct_rows(rng: random.Random) -> Iterator[tuple[bytes, int]]:
    """Yield (PNG, area) with different drawings and equally frequent areas."""
    seen: set[bytes] = set()
    while True:
        areas = list(range(1, NUM_ANSWERS + 1))
        rng.shuffle(areas)
        for area in areas:
            png = _png(draw(rng, area))
            while png in seen:
                png = _png(draw(rng, area))
            seen.add(png)
            yield png, area


def draw(rng: random.Random, area: int) -> Image.Image:
    """Draw a square of cells, `area` of them shaded, with random positions and colours."""
    paper = tuple(rng.randint(215, 255) for _ in range(3))
    ink = tuple(rng.randint(0, 110) for _ in range(3))
    shade = tuple(channel + rng.randint(-20, 20) for channel in rng.choice(_SHADES))
    side = CELLS * CELL_PIXELS
    image = Image.new("RGB", (side, side), paper)
    pen = ImageDraw.Draw(image)
    for cell in rng.sample(range(CELLS**2), area):
        left, top = cell % CELLS * CELL_PIXELS, cell // CELLS * CELL_PIXELS
        pen.rectangle((left, top, left + CELL_PIXELS - 1, top + CELL_PIXELS - 1), fill=shade)
    for line in range(CELLS + 1):
        offset = min(line * CELL_PIXELS, side - 1)
        pen.line((offset, 0, offset, side), fill=ink)
        pen.line((0, offset, side, offset), fill=ink)
    return image


def _blank() -> Image.Image:
    return Image.new("RGB", (CELLS * CELL_PIXELS,) * 2, (235, 235, 235))


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _write(path: Path, rows: Sequence[tuple[bytes, int]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "images": pa.array(
            [[{"bytes": png, "path": None}] for png, _ in rows],
            pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ),
        "problem": pa.array([PROBLEM] * len(rows)),
        "answer": pa.array([str(area) for _, area in rows]),
    }
    # The metadata that `datasets` writes with a table, so that it reads the column as images.
    features: dict[str, Any] = {
        "images": {"feature": {"_type": "Image"}, "_type": "List"},
        "problem": {"dtype": "string", "_type": "Value"},
        "answer": {"dtype": "string", "_type": "Value"},
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
