"""The generated drawings: schema, disjoint files, balanced answers that need the image."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import datasets
import pyarrow.parquet as pq
from PIL import Image

from trigon.tools.quickstart.drawings import BLANK, CELL_PIXELS, CELLS, NUM_ANSWERS, PROBLEM, make_dataset


def rows_of(path: Path) -> list[tuple[Image.Image, str]]:
    """Return the image and the answer of each row."""
    rows = pq.read_table(path).to_pylist()
    assert {row["problem"] for row in rows} == {PROBLEM}
    files = [image["bytes"] for row in rows for image in row["images"]]
    assert len(files) == len(rows)
    assert all(file.startswith(b"\x89PNG\r\n\x1a\n") for file in files)
    return [(Image.open(io.BytesIO(file)), row["answer"]) for file, row in zip(files, rows, strict=True)]


def test_drawings_are_different_and_answers_equally_frequent(tmp_path: Path) -> None:
    files = make_dataset(tmp_path, num_train=240, num_validation=60, seed=0)
    assert PROBLEM.count("<image>") == 1
    assert not any(character.isdigit() for character in PROBLEM)
    train, validation = map(rows_of, files)
    assert len({image.tobytes() for image, _ in train + validation}) == 300
    assert Counter(answer for _, answer in train) == {str(area): 40 for area in range(1, 7)}
    assert Counter(answer for _, answer in validation) == {str(area): 10 for area in range(1, 7)}
    for path, num_rows in zip(files, (240, 60), strict=True):
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
        assert rows.features["images"] == datasets.List(datasets.Image())
        assert rows.features["answer"] == datasets.Value("string")
        assert (rows.column_names, len(rows)) == (["images", "problem", "answer"], num_rows)
        assert (rows[0]["images"][0].mode, rows[0]["images"][0].size) == ("RGB", (84, 84))
    for image, answer in validation:
        places = [cell * CELL_PIXELS + CELL_PIXELS // 2 for cell in range(CELLS)]
        centres = [image.getpixel((x, y)) for x in places for y in places]
        # The paper is lighter than every shade, and at most NUM_ANSWERS of 9 cells are shaded.
        paper = max(centres, key=sum)
        assert str(sum(centre != paper for centre in centres)) == answer
    assert NUM_ANSWERS < CELLS**2
    blank = rows_of(tmp_path / BLANK)
    assert [answer for _, answer in blank] == [answer for _, answer in validation]
    assert len({image.tobytes() for image, _ in blank}) == len(blank[0][0].getcolors()) == 1


def test_the_same_seed_gives_the_same_bytes_and_another_seed_different_drawings(tmp_path: Path) -> None:
    first, again, other = (
        make_dataset(tmp_path / name, num_train=12, num_validation=6, seed=seed)
        for name, seed in (("first", 5), ("again", 5), ("other", 6))
    )
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    drawings, others = ({image.tobytes() for image, _ in rows_of(each[0])} for each in (first, other))
    assert not drawings & others
