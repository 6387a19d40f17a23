"""The generated drawings: schema, disjoint files, balanced answers that need the image."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from trigon.tools.quickstart.drawings import BLANK, CELL_PIXELS, CELLS, NUM_ANSWERS, PROBLEM, make_dataset


def _rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def _png(row: dict) -> bytes:
    [image] = row["images"]
    return image["bytes"]


def _pixels(row: dict) -> bytes:
    return Image.open(io.BytesIO(_png(row))).tobytes()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_dataset(tmp_path_factory.mktemp("drawings"), num_train=240, num_validation=60, seed=0)


def test_datasets_reads_the_columns_of_geometry3k_with_images(files: tuple[Path, Path], tmp_path: Path) -> None:
    import datasets

    for path, num_rows in zip(files, (240, 60), strict=True):
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path))
        assert rows.column_names == ["images", "problem", "answer"]
        assert rows.features["images"] == datasets.List(datasets.Image())
        assert rows.features["answer"] == datasets.Value("string")
        assert len(rows) == num_rows
        [image] = rows[0]["images"]
        assert (image.mode, image.size) == ("RGB", (84, 84))


def test_images_are_stored_as_png_bytes(files: tuple[Path, Path]) -> None:
    assert all(_png(row).startswith(b"\x89PNG\r\n\x1a\n") for path in files for row in _rows(path))


def test_all_drawings_are_different(files: tuple[Path, Path]) -> None:
    pixels = [_pixels(row) for path in files for row in _rows(path)]
    assert len(set(pixels)) == 300


def test_answers_are_equally_frequent_in_both_files(files: tuple[Path, Path]) -> None:
    train, validation = (Counter(row["answer"] for row in _rows(path)) for path in files)
    assert train == {str(area): 40 for area in range(1, 7)}
    assert validation == {str(area): 10 for area in range(1, 7)}


def test_the_problem_text_is_the_same_for_all_rows_and_has_one_image_marker(files: tuple[Path, Path]) -> None:
    assert {row["problem"] for path in files for row in _rows(path)} == {PROBLEM}
    assert PROBLEM.count("<image>") == 1
    assert not any(character.isdigit() for character in PROBLEM)


def test_the_answer_is_the_number_of_shaded_cells(files: tuple[Path, Path]) -> None:
    for row in _rows(files[1]):
        image = Image.open(io.BytesIO(_png(row)))
        centres = [
            image.getpixel((column * CELL_PIXELS + 14, line * CELL_PIXELS + 14))
            for column in range(CELLS)
            for line in range(CELLS)
        ]
        # The paper is lighter than every shade, and at most NUM_ANSWERS of 9 cells are shaded.
        paper = max(centres, key=sum)
        assert str(sum(centre != paper for centre in centres)) == row["answer"]
    assert NUM_ANSWERS < CELLS**2


def test_the_same_seed_gives_the_same_bytes_and_another_seed_different_drawings(tmp_path: Path) -> None:
    first, again, other = (
        make_dataset(tmp_path / name, num_train=12, num_validation=6, seed=seed)
        for name, seed in (("first", 5), ("again", 5), ("other", 6))
    )
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert not {_pixels(row) for row in _rows(first[0])} & {_pixels(row) for row in _rows(other[0])}


def test_blank_images_have_one_colour_and_the_other_columns_are_unchanged(files: tuple[Path, Path]) -> None:
    _, validation = files
    rows, blank_rows = _rows(validation), _rows(validation.with_name(BLANK))
    assert [row["answer"] for row in rows] == [row["answer"] for row in blank_rows]
    assert [row["problem"] for row in rows] == [row["problem"] for row in blank_rows]
    assert len({_pixels(row) for row in blank_rows}) == 1
    [(count, _)] = Image.open(io.BytesIO(_png(blank_rows[0]))).getcolors()
    assert count == 84 * 84
