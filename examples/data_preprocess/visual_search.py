"""Writes questions about small details of photographs, whose answers a rule can check.

    hf download ChenShawn/DeepEyes-Datasets-47k data_0.1.2_visual_toolbox_v2.parquet \
        --repo-type dataset --local-dir datasets/deepeyes
    python3 examples/data_preprocess/visual_search.py --local_dir datasets/visual_search

writes train.parquet and test.parquet, with columns `problem`, `answer` and `images`. The source is
DeepEyes' selection (arXiv:2505.14362) of the data of V* (arXiv:2312.14135): its columns `images`
and `extra_info` are read, with the fields `question` and `answer`. Its ground truths are sentences,
"The countertop is tan."; where the question names the choices ("Is the countertop tan or blue?",
yes or no, which side), the choice is the answer, so that no judge is needed. Other rows are counted
and left out. No image is in both files.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SOURCE = Path("datasets/deepeyes/data_0.1.2_visual_toolbox_v2.parquet")
NUM_PARTS = 20
"""One of this many images is for validation."""
ROWS_AT_A_TIME = 64

SIDES = ("left", "right")
_CHOICES = re.compile(r"(\w+),? or (?:to )?(?:the |an? )?(\w+)", re.IGNORECASE)
_YES_OR_NO = re.compile(r"(yes|no)\b", re.IGNORECASE)

SCHEMA = pa.schema(
    {
        "problem": pa.string(),
        "answer": pa.string(),
        "images": pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    }
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write train.parquet and test.parquet of visual search.")
    parser.add_argument("--source", type=Path, default=SOURCE, help="DeepEyes' file (%(default)s)")
    parser.add_argument(
        "--local_dir", type=Path, default=Path("datasets/visual_search"), help="output folder (%(default)s)"
    )
    chosen = parser.parse_args(arguments)
    folder = chosen.local_dir.expanduser()
    if not chosen.source.is_file():
        print(f"there is no file {chosen.source}; download it first: see {__file__}", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    partial = {split: folder / f".{split}.parquet.part" for split in ("train", "test")}
    writers = {split: pq.ParquetWriter(path, SCHEMA) for split, path in partial.items()}
    for split, rows in batches(chosen.source, counts):
        writers[split].write_table(pa.Table.from_pylist(rows, SCHEMA))
    for split, writer in writers.items():
        writer.close()
        partial[split].replace(folder / f"{split}.parquet")
        print(f"{folder / split}.parquet: {counts[split]} rows")
    print(f"left out: {counts['answer']} rows whose answer names no choice, {counts['image']} without one image")
    return 0


def batches(source: Path, counts: Counter[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the rows of each split, some at a time, and count them and those that are left out."""
    for batch in pq.ParquetFile(source).iter_batches(ROWS_AT_A_TIME, columns=["images", "extra_info"]):
        rows: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
        for row in batch.to_pylist():
            question, truth = (str(row["extra_info"][key]).strip() for key in ("question", "answer"))
            answer = short_answer(question, truth)
            files = [image["bytes"] for image in row["images"] or () if image["bytes"]]
            reason = "answer" if answer is None else "image" if len(files) != 1 else ""
            if reason:
                counts[reason] += 1
                continue
            split = "test" if hashlib.sha256(files[0]).digest()[0] % NUM_PARTS == 0 else "train"
            counts[split] += 1
            images = [{"bytes": files[0], "path": None}]
            rows[split].append({"problem": f"<image>{question}", "answer": answer, "images": images})
        yield from rows.items()


def short_answer(question: str, truth: str) -> str | None:
    """Return the choice of the question that the truth names, in lower case; None if not one."""
    if found := _YES_OR_NO.match(truth):
        return found[1].lower()
    choices: tuple[str, ...] = ()
    if found := _CHOICES.search(question):
        choices = found.groups()
    elif re.search(r"\bside\b", question, re.IGNORECASE):
        choices = SIDES
    words = re.findall(r"\w+", truth.lower())
    named = [choice.lower() for choice in choices if choice.lower() in words]
    return named[0] if len(named) == 1 else None


if __name__ == "__main__":
    sys.exit(main())
