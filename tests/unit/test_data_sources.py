"""Datasets are opened, or an error lists what exists instead."""

import csv
import io
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trigon.data.sources import open_source
from trigon.data.text_rows import MAX_ROW_CHARACTERS
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


# What a file says and what a reward function receives: values that a type inference would change.
VALUES = [
    *("007", "1.50", "[1, 2]", "true", "null", "None", "NA", "nan", "", " 12 ", "2024-01-01", "½ é 数 \U0001f600"),
    *(7, 0.1234567890123456789, 2**70, True, False, None, [1, 0.5, "a"], {"x": [], "y": {"z": 1}}, []),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_values_are_those_of_the_file(tmp_path, suffix, indent):
    rows = [{"problem": [{"role": "user", "content": str(value)}], "answer": value} for value in VALUES]
    path = tmp_path / f"x{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=indent is None) for row in rows) + "\r\n")
    else:
        path.write_text(json.dumps(rows, ensure_ascii=indent is None, indent=indent))
    source = open_source(str(path))
    found = [source.rows[index] for index in range(len(source.rows))]
    assert [repr(row["answer"]) for row in found] == [repr(value) for value in VALUES]
    assert found == rows


def test_all_dates_stay_text(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"problem": "When?", "answer": f"2024-01-0{day}"}) + "\n" for day in (1, 2)))
    rows = open_source(str(path)).rows
    assert [rows[index]["answer"] for index in (0, 1)] == ["2024-01-01", "2024-01-02"]


def test_csv_values_are_texts_and_empty_fields_are_none(tmp_path):
    texts = ["007", "1.50", "true", "null", "None", "NA", "nan", " 12 ", 'a "quoted", b', "two\r\nlines", "½", ""]
    with (tmp_path / "x.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([["problem", "answer"], *(["?", text] for text in texts)])
    rows = open_source(str(tmp_path / "x.csv")).rows
    assert [rows[index]["answer"] for index in range(len(rows))] == [text or None for text in texts]


def test_rows_of_different_shapes_are_one_dataset(tmp_path):
    shapes = {
        "a.jsonl": [{"problem": "p", "answer": 1, "images": []}, {"problem": "q", "answer": 0.5, "images": ["a.png"]}],
        "b.jsonl": [{"problem": [{"role": "user", "content": "r"}], "answer": "x", "level": {"min": 1}}],
        "c.json": [{"problem": "s", "answer": None, "images": "b.png", "level": "hard"}],
    }
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shapes["a.jsonl"]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shapes["b.jsonl"]))
    (tmp_path / "c.json").write_text(json.dumps(shapes["c.json"]))
    source = open_source(str(tmp_path))
    assert set(source.columns) == {"problem", "answer", "images", "level", "level.min"}
    columns = dict.fromkeys(("problem", "answer", "images", "level"))
    assert [source.rows[index] for index in range(4)] == [columns | row for rows in shapes.values() for row in rows]


def test_rows_of_text_files_may_be_sliced_as_others(tmp_path):
    path = write(tmp_path / "x.csv", [str(number) for number in range(10)])
    for slice_, expected in {"[3:5]": "34", "[-2:]": "89", "[:20%]": "01", "[8:30]": "89"}.items():
        assert "".join(problems(open_source(f"{path}@train{slice_}"))) == expected
    assert problems(open_source(str(path)).first(2)) == ["0", "1"]
    for slice_ in ("[50:]", "[2:2]", "[a:b]"):
        with pytest.raises(DataError, match=r"x\.csv"):
            open_source(f"{path}@train{slice_}")


def test_rows_stay_those_that_were_opened(tmp_path):
    path = write(tmp_path / "x.jsonl", ["old", "other"])
    source = open_source(str(path))
    write(path, ["a new file of other rows"])
    assert problems(source) == ["old", "other"]


LATIN = '{"problem": "Wie groß?", "answer": "1"}\n'.encode("latin-1")
GOOD = b'{"problem": "?", "answer": "1"}\n'
BROKEN = {
    "latin.jsonl": (GOOD + LATIN, ["line 2", "not UTF-8", "0xdf"]),
    "latin.json": (b"[" + GOOD + b"," + LATIN + b"]", ["row 1", "not UTF-8", "0xdf"]),
    "latin.csv": ("problem,answer\n?,1\nWie groß?,1\n".encode("latin-1"), ["line 3", "not UTF-8", "0xdf"]),
    "utf16.jsonl": ('{"problem": "?", "answer": "1"}\n'.encode("utf-16"), ["UTF-16"]),
    "cut.jsonl": (GOOD + GOOD[:20], ["line 2", "not JSON"]),
    "cut.json": (b"[" + GOOD, ["row 0", "file ends"]),
    "comma.json": (b"[" + GOOD + GOOD + b"]", ["row 0", "comma"]),
    "broken.json": (b"[" + GOOD + b", {problem: 1}]" + b" " * 2**21, ["row 1", "not JSON"]),
    "two.json": (b"[" + GOOD + b"]" + GOOD, ["follows the array"]),
    "pretty.json": (b'{\n  "problem": "?"\n}', ["line 1", "one array of objects"]),
    "list.jsonl": (GOOD + b"[1]\n", ["line 2", "one array of objects"] ),
    "text.jsonl": (GOOD + b'"a"\n', ["line 2", "a text"]),
    "deep.jsonl": (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", ["line 1", "levels"]),
    "deeper.jsonl": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ["line 1", "recursion"]),
    "digits.jsonl": (b'{"a": ' + b"1" * 5000 + b"}", ["line 1", "digits"]),
    "fields.csv": (b"problem,answer\n?,1\n?,1,2\n", ["line 3", "3 fields"]),
    "quotes.csv": (b'problem,answer\n?,"1\n', ["line 2", "not CSV"]),
    "names.csv": (b"problem,problem\n?,1\n", ["'problem' twice"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_row_is_named_with_its_line(tmp_path, name):
    content, facts = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_source(str(tmp_path / name))
    message = str(caught.value)
    assert all(fact in message for fact in (name, *facts)), message
    assert len(message) < 400 + len(str(tmp_path))


def test_a_folder_that_datasets_has_saved_is_read(tmp_path):
    saved = datasets.Dataset.from_list([{"problem": name, "answer": "007"} for name in "abc"])
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=saved, validation=saved.select([2])).save_to_disk(tmp_path / "both")
    assert problems(open_source(str(tmp_path / "one"))) == ["a", "b", "c"]
    assert problems(open_source(f"{tmp_path / 'one'}@train[1:]")) == ["b", "c"]
    assert problems(open_source(str(tmp_path / "both"))) == ["a", "b", "c"]
    assert problems(open_source(f"{tmp_path / 'both'}@val")) == ["c"]
    with pytest.raises(DataError, match="no split 'test', only train, validation"):
        open_source(f"{tmp_path / 'both'}@test")
    (tmp_path / "one" / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match="one@train cannot be read"):
        open_source(str(tmp_path / "one"))


def repeated(text, num_rows):
    return pa.DictionaryArray.from_arrays(np.zeros(num_rows, np.int32), pa.array([text]))


EXPANDING = {
    "texts": lambda: {"problem": repeated("a" * 900_000, 1000), "answer": repeated("1", 1000)},
    "rows": lambda: {"problem": repeated("a", 1_100_000), "answer": repeated("1", 1_100_000)},
    "lists": lambda: {"problem": pa.ListArray.from_arrays(pa.array([0, 70_000_000], pa.int32()), pa.nulls(70_000_000))},
}


@pytest.mark.parametrize("name", EXPANDING)
@pytest.mark.faults
def test_a_small_parquet_file_that_would_fill_the_memory_is_refused(tmp_path, name):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(EXPANDING[name]()), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match=r"x\.parquet has .* the same"):
        open_source(str(path))


def test_a_small_parquet_file_of_repeated_texts_is_read(tmp_path):
    columns = {"problem": repeated("What is it? " * 1000, 2000), "answer": repeated("1", 2000)}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", store_schema=False)
    assert len(open_source(str(tmp_path / "x.parquet")).rows) == 2000


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
@pytest.mark.faults
def test_a_row_that_would_fill_the_memory_is_refused(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    long = "a" * (MAX_ROW_CHARACTERS + 1)
    rows = f"problem,answer\n{long},1\n" if suffix == ".csv" else f'{{"problem": "{long}", "answer": "1"}}'
    path.write_text(f"[{rows}]" if suffix == ".json" else rows)
    with pytest.raises(DataError, match=r"(line 1|line 2|row 0) is longer than 67,108,864 characters") as caught:
        open_source(str(path))
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_text_files_of_a_hub_dataset_are_read_as_local_ones(tmp_path, monkeypatch, suffix):
    write(tmp_path / f"train{suffix}", ["007", "1.50"])
    write(tmp_path / f"test{suffix}", ["true"])
    load = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda repo_id: load(str(tmp_path)))  # for a download
    source = open_source("owner/data")
    assert (source.name, problems(source)) == ("train", ["007", "1.50"])
    assert problems(open_source("owner/data@test")) == ["true"]
    assert problems(open_source("owner/data@train[1:]")) == ["1.50"]


def test_text_files_of_a_hub_dataset_that_was_downloaded_are_read_offline(tmp_path, monkeypatch):
    write(tmp_path / "datasets--owner--data" / "snapshots" / "0" / "train.jsonl", ["007"])
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert problems(open_source("owner/data")) == ["007"]
