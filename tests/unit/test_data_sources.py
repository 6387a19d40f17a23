"""Datasets are opened, or an error lists what exists instead."""

import csv
import datetime
import io
import json
from decimal import Decimal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from support.builders import make_builder
from support.images import png
from trigon.data.dataset import open_prompts
from trigon.data.images import open_image
from trigon.data.media_files import MediaSource
from trigon.data.sources import open_python_rows, open_source
from trigon.data.text_rows import MAX_ROW_CHARACTERS
from trigon.errors import DataError

pytestmark = pytest.mark.usefixtures("own_datasets_cache")


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
    if suffix != ".parquet":
        write(path, ["a new file of other rows"])  # rows stay those that were opened
    assert source.name == "geometry"
    assert source.folder == tmp_path
    assert problems(source) == ["first", "second"]
    assert source.rows[1] == {"problem": "second", "answer": "one", "level": "hard"}


# Files, the split that is asked for, and the problems of its rows.
FOLDERS = {
    "globs": (["a[b]/c*/x[1].jsonl", "ab/cc/x1.jsonl"], {"a[b]": "0", "a[b]/c*/x[1].jsonl": "0"}),
    "at sign": (["me@home/x.jsonl"], {"me@home/x.jsonl": "0", "me@home/x.jsonl@train": "0", "me@home@train": "0"}),
    "one split": (["test.jsonl"], {"test.jsonl": "0", "test.jsonl@train": "0", "test.jsonl@test": "0"}),
    "sorted": (["b.jsonl", "a/2.jsonl", "a/1.json"], {".": "210"}),
    "splits": (
        ["data/train-0-of-2.parquet", "data/train-1-of-2.parquet", "data/test-0-of-1.parquet"],
        {".": "01", ".@test": "2"},
    ),
    "parts": (["data/part-1-of-2.jsonl", "data/part-2-of-2.jsonl"], {".": "01"}),
    "a fold": (["geometry-3-of-9.jsonl"], {".": "0"}),
    "folders": (["train/x.jsonl", "val/x.jsonl"], {".@val": "1", ".@validation": "1", ".": "0"}),
    "evaluation": (["train.jsonl", "eval.jsonl"], {".": "0", ".@test": "1", ".@eval": "1"}),
    "names of hubs": (
        ["data/test_mini-00000-of-00001.parquet", "data/test-00000-of-00001-5a1b.parquet"],
        {".@test": "1", ".@test_mini": "0"},
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_files_of_a_split_are_found(tmp_path, name):
    files, specs = FOLDERS[name]
    for number, file in enumerate(files):
        write(tmp_path / file, [str(number)])
    for other in ("README.md", ".git/config.json", ".cache/x.jsonl", "_old.jsonl", "a.png"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text("{}")
    (tmp_path / "dataset_infos.json").write_text("{}")  # a metadata file of hub datasets
    for spec, expected in specs.items():
        source = open_source(f"{tmp_path}/{spec}")
        assert "".join(problems(source)) == expected, spec
        if spec.startswith("."):
            assert source.name == (spec.partition("@")[2] or "train")
            assert source.folder == tmp_path


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ("geometri.parquet", ["no file or folder", "geometri.parquet", "geometry.parquet?"]),
        ("nowhere/at/all", ["no file or folder"]),
        ("geometry.parquet@validation", ["one file with one split"]),
        ("data@validation", ["no split 'validation'", "train"]),
        ("mixed", ["mixes .csv, .jsonl"]),
        ("some", ["test.jsonl", "more.json", "train-more.json"]),
        ("some@train[:2]", ["more.json"]),
        ("shards", ["2 of the 4 files of 'train'"]),
        ("x.txt", ["suffix '.txt'", ".parquet, .json, .jsonl, .csv"]),
        ("texts", ["no file that ends in"]),
        ("empty.parquet", ["has no rows"]),
    ],
)
def test_what_cannot_be_opened_is_named_with_what_there_is(tmp_path, spec, facts):
    shards = [f"shards/data/{name}-of-00004.parquet" for name in ("train-00000", "train-00002")]
    some = ["some/train.jsonl", "some/test.jsonl", "some/more.json", "some/other.csv"]
    for name in ("geometry.parquet", "data/train.jsonl", "mixed/x.jsonl", "mixed/y.csv", *some, *shards):
        write(tmp_path / name, ["a"])
    (tmp_path / "texts").mkdir()
    for name in ("x.txt", "texts/x.txt"):
        (tmp_path / name).write_text("a")
    datasets.Dataset.from_dict({"problem": [], "answer": []}).to_parquet(tmp_path / "empty.parquet")
    with pytest.raises(DataError) as caught:
        open_source(str(tmp_path / spec))
    assert all(fact in str(caught.value) for fact in facts), caught.value


def test_no_dataset_and_an_unreachable_one_are_errors(monkeypatch):
    with pytest.raises(DataError, match=r"data\.train_files"):
        open_source("")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/nothing@train"):
        open_source("nobody/nothing@train")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv"])
def test_damaged_and_empty_files_are_an_error(tmp_path, suffix):
    for name, content in (("empty", b""), ("damaged", b"\x00\xff{{{ not,a\ntable")):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(content)
        with pytest.raises(DataError, match=name):
            open_source(str(path))


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


LATIN = '{"problem": "Wie groß?", "answer": "1"}\n'.encode("latin-1")
GOOD = b'{"problem": "?", "answer": "1"}\n'
BROKEN = {
    "latin.jsonl": (GOOD + LATIN, ["line 2", "not UTF-8", "0xdf"]),
    "latin.csv": ("problem,answer\n?,1\nWie groß?,1\n".encode("latin-1"), ["line 3", "not UTF-8", "0xdf"]),
    "utf16.jsonl": ('{"problem": "?", "answer": "1"}\n'.encode("utf-16"), ["UTF-16"]),
    "cut.jsonl": (GOOD + GOOD[:20], ["line 2", "not JSON"]),
    "broken.json": (b"[" + GOOD + b", {problem: 1}]" + b" " * 2**21, ["row 1", "not JSON"]),
    "two.json": (b"[" + GOOD + b"]" + GOOD, ["follows the array"]),
    "pretty.json": (b'{\n  "problem": "?"\n}', ["line 1", "one array of objects"]),
    "list.jsonl": (GOOD + b"[1]\n", ["line 2", "one array of objects"] ),
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
    several = {name: datasets.Dataset.from_dict({"problem": [name], "answer": ["1"]}) for name in ("test", "eval")}
    datasets.DatasetDict(several).save_to_disk(tmp_path / "several")
    for split in several:
        assert problems(open_source(f"{tmp_path / 'several'}@{split}")) == [split]
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


@pytest.mark.extended
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


@pytest.mark.extended
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
    with monkeypatch.context() as patched:
        patched.setattr(datasets, "load_dataset_builder", lambda repo_id: load(str(tmp_path)))  # for a download
        source = open_source("owner/data")
        assert (source.name, problems(source)) == ("train", ["007", "1.50"])
        assert problems(open_source("owner/data@test")) == ["true"]
        assert problems(open_source("owner/data@train[1:]")) == ["1.50"]
    write(tmp_path / "hub" / "datasets--owner--data" / "snapshots" / "0" / f"train{suffix}", ["007"])
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # and it was downloaded before
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert problems(open_source("owner/data")) == ["007"]


# Rows in Python: the same prompts, checks and counts as of files


def source_of(data):
    return open_python_rows(data, spec="python:train", name="train")


def scan(processors, data, **changes):
    spec = "python:train"
    if isinstance(data, str):
        spec, source = data, None
    else:
        source = source_of(data)
    builder = make_builder(processors, max_bad_row_fraction=1.0, **changes)
    return open_prompts(spec, builder, num_workers=2, source=source)


def pictures():
    """Return images as programs have them: decoded, of several modes, and opened files."""
    rgb = Image.open(io.BytesIO(png(56, 84, seed=1)))
    rgb.load()
    transparent = Image.new("RGBA", (56, 56), (10, 200, 30, 100))
    palette = Image.fromarray(np.arange(56 * 56, dtype=np.uint8).reshape(56, 56) % 200).convert("P")
    return [rgb, transparent, palette, Image.open(io.BytesIO(png(60, 56, seed=2)))]


def rows():
    return [
        {"problem": f"<image>What is {number}?", "answer": str(number), "images": [image]}
        for number, image in enumerate(pictures())
    ]


def in_file(folder, given):
    """Write rows as a Parquet file, in which images are encoded as the library does it."""
    features = datasets.Features(
        {
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
        }
    )
    path = folder / "train.parquet"
    datasets.Dataset.from_list(given, features=features).to_parquet(path)
    return str(path)


def test_a_list_a_dataset_and_a_file_have_the_same_prompts(processors, tmp_path):
    path = in_file(tmp_path, rows())
    from_file = scan(processors, path)
    for data in (rows(), datasets.load_dataset("parquet", data_files=path, split="train")):
        prompts = scan(processors, data)
        sent = scan(processors, data, process_images=False)
        for index in range(4):
            a, b = prompts[index], from_file[index]
            for field in ("prompt_id", "token_ids", "ground_truth", "row"):
                assert getattr(a, field) == getattr(b, field)
            assert a.vision.hashes == b.vision.hashes
            decoded, expected = (
                open_image(MediaSource({"bytes": file}, "", 10_000))
                for file in (*sent[index].vision.encoded, *from_file.image_files(index))
            )
            assert np.array_equal(np.asarray(decoded), np.asarray(expected))


def test_the_fingerprint_is_that_of_the_content(processors):
    fingerprint = scan(processors, rows()).content.fingerprint
    assert scan(processors, rows()).content.fingerprint == fingerprint
    for change in (
        lambda given: given[0].update(answer="other"),
        lambda given: given[0]["images"][0].putpixel((0, 0), (1, 2, 3)),
        lambda given: given[3]["images"].__setitem__(0, Image.open(io.BytesIO(png(60, 56, seed=3)))),
        lambda given: given.reverse(),
        lambda given: given[1].update(source="x"),
    ):
        given = rows()
        change(given)
        assert scan(processors, given).content.fingerprint != fingerprint


def test_an_image_whose_file_was_closed_is_an_error_with_its_row(tmp_path):
    (tmp_path / "figure.png").write_bytes(png(60, 56, seed=2))
    with Image.open(tmp_path / "figure.png") as image:
        pass
    with pytest.raises(DataError, match=r"row 1, 'images'\[0\]: the image cannot be read .* open it again"):
        source_of([{"images": []}, {"images": [image]}])


def test_a_dataset_is_not_changed_by_its_use_nor_the_prompts_by_a_change_of_the_rows(processors, tmp_path):
    dataset = datasets.load_dataset("parquet", data_files=in_file(tmp_path, rows()), split="train")
    dataset = dataset.with_transform(lambda batch: {"problem": ["transformed"] * len(batch["problem"])})
    assert "What is 0?" in scan(processors, dataset)[0].text
    given = rows()
    prompts = scan(processors, given)
    given[0]["images"].clear()
    given.clear()
    assert len(prompts[0].image_refs) == 1
    assert dataset[0] == {"problem": "transformed"}
    assert isinstance(dataset.with_format(None)[0]["images"][0], Image.Image)


def test_values_become_plain_and_columns_are_those_of_all_rows():
    day = datetime.date(2024, 2, 29)
    [row] = source_of([{"a": (1, np.int64(2)), "b": {"c": np.zeros((2, 2))}, "d": day, "e": [], "f": None}]).rows
    assert row == {"a": [1, 2], "b": {"c": [[0.0, 0.0], [0.0, 0.0]]}, "d": day, "e": [], "f": None}
    source = source_of([{"a": {"b": 1}}, {"c": 2, "pictures": [None, Image.new("L", (1, 1))]}])
    assert source.columns == ("a", "a.b", "c", "pictures")
    assert source.rows[0] == {"a": {"b": 1}, "c": None, "pictures": None}
    assert source.image_columns == ("pictures",)


DATASET = datasets.Dataset.from_list([{"a": 1}])


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        ([], ["no rows"]),
        ({"problem": "?"}, ["is a dict", "list of dicts"]),
        ("text", ["is a str"]),
        (iter([{"a": 1}]), ["is a list_iterator", "list(iterator)"]),
        ([3], ["row 0", "int", "dict"]),
        ([{"a": 1}, {"a": object()}], ["row 1, 'a'", "builtins.object"]),
        ([{"a": {"b": [{1, 2}]}}], ["row 0, 'a'['b'][0]", "builtins.set"]),
        ([{0: "x", "problem": "a"}], ["row 0", "key 0", "int"]),
        ([{"a": np.array([Decimal(1)], dtype=object)}], ["'a'[0]", "decimal.Decimal"]),
        ([{"image": np.zeros((4, 4, 3))}], ["row 0, 'image'", "(4, 4, 3)", "PIL.Image.fromarray"]),
        (datasets.DatasetDict(train=DATASET, test=DATASET), ["train, test", "data['train'] or data['test']"]),
        (DATASET.to_iterable_dataset(), ["streamed"]),
        (DATASET.to_pandas(), ["DataFrame", "datasets.Dataset.from_pandas(table)"]),
    ],
)
def test_what_is_no_dataset_is_an_error_that_says_where(data, facts):
    with pytest.raises(DataError) as caught:
        source_of(data)
    assert all(fact in str(caught.value) for fact in ("python:train", *facts)), caught.value
