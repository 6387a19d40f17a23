"""Datasets are opened, or an error lists what exists instead."""

import csv
import io
import json

import datasets
import pytest
from PIL import Image

from trigon.data.sources import open_source
from trigon.errors import DataError

pytestmark = pytest.mark.usefixtures("own_datasets_cache")


def png():
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(stream, "PNG")
    return stream.getvalue()


def write(path, problems, **others):
    """Write rows with these problems in the format that the suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"problem": problem, "answer": "one", **others} for problem in problems]
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".parquet":
            datasets.Dataset.from_list(rows).to_parquet(path)
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
    return path


def problems(source):
    return [source.rows[i]["problem"] for i in range(len(source.rows))]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv"])
def test_every_format_is_read(tmp_path, suffix):
    path = write(tmp_path / f"geometry{suffix}", ["first", "second"], level="hard")
    source = open_source(str(path))
    assert source.name == "geometry"
    assert source.folder == tmp_path
    assert problems(source) == ["first", "second"]
    assert source.rows[1] == {"problem": "second", "answer": "one", "level": "hard"}


def test_names_with_glob_characters_are_taken_literally(tmp_path):
    write(tmp_path / "a[b]" / "c*" / "x[1].jsonl", ["expected"])
    write(tmp_path / "ab" / "cc" / "x1.jsonl", ["other"])
    assert problems(open_source(str(tmp_path / "a[b]" / "c*" / "x[1].jsonl"))) == ["expected"]
    assert problems(open_source(str(tmp_path / "a[b]"))) == ["expected"]


def test_a_path_may_contain_an_at_sign(tmp_path):
    path = write(tmp_path / "me@home" / "x.jsonl", ["expected"])
    assert problems(open_source(str(path))) == ["expected"]
    assert problems(open_source(f"{path}@train")) == ["expected"]


def test_a_split_may_be_sliced(tmp_path):
    path = write(tmp_path / "x.jsonl", ["a", "b", "c"])
    assert problems(open_source(f"{path}@train[:2]")) == ["a", "b"]


def test_a_file_has_one_split(tmp_path):
    path = write(tmp_path / "test.jsonl", ["a"])
    for spec in (f"{path}", f"{path}@train", f"{path}@test"):
        assert problems(open_source(spec)) == ["a"]
    with pytest.raises(DataError, match="one file with one split"):
        open_source(f"{path}@validation")


def test_a_folder_is_searched_and_sorted(tmp_path):
    write(tmp_path / "b.jsonl", ["3"])
    write(tmp_path / "a" / "2.jsonl", ["2"])
    write(tmp_path / "a" / "1.json", ["1"])
    for other in ("README.md", ".git/config.json", ".cache/x.jsonl", "_old.jsonl", "figure.png"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text("not a table")
    source = open_source(str(tmp_path))
    assert problems(source) == ["1", "2", "3"]
    assert source.name == "train"
    assert source.folder == tmp_path


def test_splits_of_a_folder_are_separate(tmp_path):
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ["train 0"])
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ["train 1"])
    write(tmp_path / "data" / "test-00000-of-00001.parquet", ["test"])
    (tmp_path / "dataset_infos.json").write_text("{}")  # a metadata file of hub datasets
    assert problems(open_source(str(tmp_path))) == ["train 0", "train 1"]
    assert problems(open_source(f"{tmp_path}@test")) == ["test"]
    assert open_source(f"{tmp_path}@test").name == "test"
    with pytest.raises(DataError, match="no split 'validation', only test, train"):
        open_source(f"{tmp_path}@validation")


def test_splits_may_be_folders(tmp_path):
    write(tmp_path / "train" / "x.jsonl", ["train"])
    write(tmp_path / "val" / "x.jsonl", ["val"])
    assert problems(open_source(f"{tmp_path}@val")) == ["val"]
    assert problems(open_source(f"{tmp_path}@validation")) == ["val"]


def test_a_folder_without_splits_is_train(tmp_path):
    write(tmp_path / "x.jsonl", ["a"])
    assert problems(open_source(f"{tmp_path}@train")) == ["a"]
    with pytest.raises(DataError, match="no split 'test', only train"):
        open_source(f"{tmp_path}@test")


def test_mixed_formats_are_an_error(tmp_path):
    write(tmp_path / "x.jsonl", ["a"])
    write(tmp_path / "y.csv", ["a"])
    with pytest.raises(DataError, match=r"mixes \.csv, \.jsonl"):
        open_source(str(tmp_path))


def test_images_stay_encoded(tmp_path):
    data = png()
    features = datasets.Features(
        {"images": datasets.List(datasets.Image()), "cover": datasets.Image(), "problem": datasets.Value("string")}
    )
    rows = {"images": [[{"bytes": data, "path": "a.png"}], []], "cover": [{"bytes": data}, None], "problem": ["a", "b"]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "x.parquet")
    source = open_source(str(tmp_path / "x.parquet"))
    assert source.image_columns == ("images", "cover")
    assert source.rows[0] == {
        "images": [{"bytes": data, "path": "a.png"}],
        "cover": {"bytes": data, "path": None},
        "problem": "a",
    }
    assert source.rows[1] == {"images": [], "cover": None, "problem": "b"}


def test_a_missing_dataset_is_an_error_with_the_nearest_name(tmp_path):
    write(tmp_path / "geometry.parquet", ["a"])
    with pytest.raises(DataError, match=r"no file or folder .*geometri\.parquet'; did you mean .*geometry\.parquet\?"):
        open_source(str(tmp_path / "geometri.parquet"))
    with pytest.raises(DataError, match="no file or folder"):
        open_source(str(tmp_path / "nowhere" / "at" / "all"))
    with pytest.raises(DataError, match=r"set data\.train_files"):
        open_source("")


def test_files_of_another_format_are_an_error(tmp_path):
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(DataError, match=r"suffix '\.txt'; readable are \.parquet, \.json, \.jsonl, \.csv"):
        open_source(str(tmp_path / "x.txt"))
    with pytest.raises(DataError, match="holds no file that ends in"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv"])
def test_damaged_and_empty_files_are_an_error(tmp_path, suffix):
    for name, content in (("empty", b""), ("damaged", b"\x00\xff{{{ not,a\ntable")):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(content)
        with pytest.raises(DataError, match=name):
            open_source(str(path))


def test_a_table_without_rows_is_an_error(tmp_path):
    datasets.Dataset.from_dict({"problem": [], "answer": []}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(DataError, match="has no rows"):
        open_source(str(tmp_path / "x.parquet"))


def test_an_unreachable_hub_dataset_is_a_data_error(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/nothing@train cannot be read"):
        open_source("nobody/nothing@train")
