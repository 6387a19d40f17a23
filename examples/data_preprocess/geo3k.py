"""Downloads Geometry3K and writes it as two Parquet files, for training without a network.

    python3 examples/data_preprocess/geo3k.py --local_dir ~/data/geo3k

writes train.parquet and test.parquet, with columns `problem`, `answer` and `images`; the files
contain the images. `--source DIR_OR_ID` reads a local folder, or another dataset of the hub, with
these columns and splits instead. Every image is decoded once; rows that training could not use are
printed and skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trigon.data.images import encoded_image, open_image
from trigon.data.media_files import MediaSource
from trigon.data.rows import UnusableRow
from trigon.data.sources import Source, open_source
from trigon.errors import DataError, TrigonError

SPLITS = ("train", "test")
COLUMNS = ("problem", "answer", "images")
ROWS_AT_A_TIME = 256
MAX_IMAGE_PIXELS = 64_000_000
MAX_BAD_FRACTION = 0.01

SCHEMA = pa.schema(
    {
        "problem": pa.string(),
        "answer": pa.string(),
        "images": pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    },
    # The metadata that `datasets` writes, so that it reads the column back as images.
    metadata={
        "huggingface": json.dumps(
            {
                "info": {
                    "features": {
                        "problem": {"dtype": "string", "_type": "Value"},
                        "answer": {"dtype": "string", "_type": "Value"},
                        "images": {"feature": {"_type": "Image"}, "_type": "List"},
                    }
                }
            }
        )
    },
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write Geometry3K as train.parquet and test.parquet.")
    parser.add_argument("--local_dir", type=Path, default=Path("~/data/geo3k"), help="output folder (%(default)s)")
    parser.add_argument("--source", default="hiyouga/geometry3k", help="folder or hub id to read (%(default)s)")
    chosen = parser.parse_args(arguments)
    folder = chosen.local_dir.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            path = folder / f"{split}.parquet"
            print(f"{path}: {write(open_source(f'{chosen.source}@{split}'), path)} rows")
    except (TrigonError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def write(source: Source, path: Path) -> int:
    """Write the usable rows of a split and return their number; the file is complete or absent."""
    missing = [column for column in COLUMNS if column not in source.columns]
    if missing:
        raise DataError(f"{source.name} has no column {missing[0]!r}, only {', '.join(source.columns)}")
    partial = path.with_name(f".{path.name}.part")
    num_written, batch = 0, []
    with pq.ParquetWriter(partial, SCHEMA) as writer:
        for row in usable_rows(source):
            batch.append(row)
            num_written += 1
            if len(batch) == ROWS_AT_A_TIME:
                writer.write_table(pa.Table.from_pylist(batch, SCHEMA))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, SCHEMA))
    num_bad = len(source.rows) - num_written
    if num_bad > MAX_BAD_FRACTION * len(source.rows):
        partial.unlink()
        raise DataError(f"{source.name}: {num_bad} of {len(source.rows)} rows cannot be used; see above")
    partial.replace(path)
    return num_written


def usable_rows(source: Source) -> Iterator[dict[str, Any]]:
    """Yield the rows that can be used, and print the reason for each of the others."""
    for index, row in enumerate(source.rows):
        try:
            yield converted(row, f"{source.name}:{index}", source.folder)
        except UnusableRow as problem:
            print(f"skipped: {problem}", file=sys.stderr)


def converted(row: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """Return a row with its images as encoded bytes. Raises: UnusableRow."""
    problem, answer, images = (row[column] for column in COLUMNS)
    if not isinstance(problem, str) or answer is None:
        raise UnusableRow("prompt", f"{name}: the problem is not a text, or the answer is missing")
    images = images or []
    if problem.count("<image>") != len(images):
        raise UnusableRow("markers", f"{name}: {problem.count('<image>')} <image> markers, {len(images)} images")
    files = []
    for number, image in enumerate(images):
        where = f"{name}/images/{number}"
        encoded = encoded_image(MediaSource(image, where, MAX_IMAGE_PIXELS, image_dir=folder))
        open_image(MediaSource(encoded, where, MAX_IMAGE_PIXELS))
        files.append({"bytes": encoded, "path": None})
    return {"problem": problem, "answer": str(answer), "images": files}


if __name__ == "__main__":
    sys.exit(main())
