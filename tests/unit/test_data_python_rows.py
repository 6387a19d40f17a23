"""Datasets given as Python objects have the prompts, checks and counts of the data in files."""

import datetime
import io
from decimal import Decimal

import datasets
import numpy as np
import pytest
from PIL import Image

from support.builders import make_builder
from support.images import png
from support.models import processors_of
from trigon.data.dataset import open_prompts
from trigon.data.images import open_image
from trigon.data.sources import open_python_rows
from trigon.errors import DataError

pytestmark = pytest.mark.usefixtures("own_datasets_cache")


@pytest.fixture(scope="module")
def processors(tiny_vlm):
    return processors_of(tiny_vlm)


def source_of(data):
    return open_python_rows(data, spec="python:train", name="train")


def scan(processors, data, **changes):
    spec = "python:train"
    if isinstance(data, str):
        spec, source = data, None
    else:
        source = source_of(data)
    return open_prompts(
        spec,
        make_builder(processors, **changes),
        filter_overlong_prompts=True,
        max_bad_row_fraction=1.0,
        num_workers=2,
        source=source,
    )


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
        for index in range(4):
            a, b = prompts[index], from_file[index]
            assert (a.prompt_id, a.token_ids, a.ground_truth, a.row) == (
                b.prompt_id,
                b.token_ids,
                b.ground_truth,
                b.row,
            )
            assert a.vision.hashes == b.vision.hashes


def test_images_for_workers_decode_to_the_same_pixels(processors, tmp_path):
    from_file = scan(processors, in_file(tmp_path, rows()))
    prompts = scan(processors, rows(), process_images=False)
    for index in range(4):
        [encoded] = prompts[index].vision.encoded
        [stored] = from_file.image_files(index)
        decoded, expected = (
            open_image({"bytes": file}, where="", image_dir=None, max_pixels=10_000) for file in (encoded, stored)
        )
        assert np.array_equal(np.asarray(decoded), np.asarray(expected))


def test_a_file_that_was_opened_is_kept_encoded_and_a_decoded_image_is_kept(tmp_path):
    encoded = png(60, 56, seed=2)
    (tmp_path / "figure.png").write_bytes(encoded)
    decoded = Image.new("RGB", (56, 56))
    opened = Image.open(tmp_path / "figure.png")
    [row] = source_of([{"images": [opened, decoded]}]).rows
    assert row["images"] == [{"bytes": encoded, "path": str(tmp_path / "figure.png")}, decoded]
    opened.load()
    opened.putpixel((0, 0), (1, 2, 3))
    [row] = source_of([{"images": opened}]).rows
    assert row["images"] is opened


def test_bad_rows_are_skipped_by_reason_as_those_of_files(processors):
    given = [
        *rows(),
        {"problem": "no marker", "answer": "1", "images": [Image.new("RGB", (56, 56))]},
        {"problem": "<image>?", "answer": "1", "images": [Image.new("RGB", (5000, 10))]},
        {"problem": "<image>?", "answer": "1", "images": ["missing.png"]},
        {"problem": "<image>?", "answer": "1", "images": ["/etc/passwd"]},
        {"problem": "<image>?", "images": [Image.new("F", (56, 56))], "answer": "1"},
        {"problem": "no answer"},
    ]
    prompts = scan(processors, given)
    assert len(prompts) == 4
    assert prompts.num_skipped == {
        "markers": 1,
        "image_shape": 1,
        "image_missing": 1,
        "image_outside": 1,
        "image_unreadable": 1,
        "answer": 1,
    }
    assert prompts.examples["markers"][0].startswith("train:4: <image> markers in the text: 0, images: 1")


def test_the_fingerprint_is_that_of_the_content(processors):
    fingerprint = scan(processors, rows()).fingerprint
    assert scan(processors, rows()).fingerprint == fingerprint
    for change in (
        lambda given: given[0].update(answer="other"),
        lambda given: given[0]["images"][0].putpixel((0, 0), (1, 2, 3)),
        lambda given: given[3]["images"].__setitem__(0, Image.open(io.BytesIO(png(60, 56, seed=3)))),
        lambda given: given.reverse(),
        lambda given: given[1].update(source="x"),
    ):
        given = rows()
        change(given)
        assert scan(processors, given).fingerprint != fingerprint


def test_an_image_that_is_decoded_between_two_starts_is_the_same_data(processors, tmp_path):
    (tmp_path / "figure.png").write_bytes(png(60, 56, seed=2))
    image = Image.open(tmp_path / "figure.png")
    data = [{"problem": "<image>What?", "answer": "1", "images": [image]}]
    first = scan(processors, data).fingerprint
    image.load()  # as a notebook does that shows it
    assert scan(processors, data).fingerprint == first
    image.putpixel((0, 0), (1, 2, 3))
    assert scan(processors, data).fingerprint != first


def test_an_image_whose_file_was_closed_is_an_error_with_its_row(tmp_path):
    (tmp_path / "figure.png").write_bytes(png(60, 56, seed=2))
    with Image.open(tmp_path / "figure.png") as image:
        pass
    with pytest.raises(DataError, match=r"row 1, 'images'\[0\]: the image cannot be read .* open it again"):
        source_of([{"images": []}, {"images": [image]}])


def test_keys_of_rows_and_values_in_arrays_are_checked():
    with pytest.raises(DataError, match="row 0 has the key 0, a int; keys are text"):
        source_of([{0: "x", "problem": "a"}])
    with pytest.raises(DataError, match=r"'problem'\[0\] is a decimal.Decimal"):
        source_of([{"problem": np.array([Decimal(1)], dtype=object)}])


def test_a_change_of_the_list_after_the_start_changes_nothing(processors):
    given = rows()
    prompts = scan(processors, given)
    given[0]["problem"] = "changed"
    given[0]["images"].clear()
    given.clear()
    assert "What is 0?" in prompts[0].text
    assert len(prompts[0].image_refs) == 1


def test_a_dataset_is_not_changed_by_its_use(processors, tmp_path):
    dataset = datasets.load_dataset("parquet", data_files=in_file(tmp_path, rows()), split="train")
    dataset = dataset.with_transform(lambda batch: {"problem": ["transformed"] * len(batch["problem"])})
    assert "What is 0?" in scan(processors, dataset)[0].text
    assert dataset[0] == {"problem": "transformed"}
    assert isinstance(dataset.with_format(None)[0]["images"][0], Image.Image)


def test_values_of_rows_become_plain():
    day = datetime.date(2024, 2, 29)
    [row] = source_of([{"a": (1, np.int64(2)), "b": {"c": np.zeros((2, 2))}, "d": day, "e": [], "f": None}]).rows
    assert row == {"a": [1, 2], "b": {"c": [[0.0, 0.0], [0.0, 0.0]]}, "d": day, "e": [], "f": None}


def test_columns_are_those_of_all_rows_and_fields_have_dots():
    source = source_of([{"a": {"b": 1}}, {"c": 2, "pictures": [None, Image.new("L", (1, 1))]}])
    assert source.columns == ("a", "a.b", "c", "pictures")
    assert source.rows[0] == {"a": {"b": 1}, "c": None, "pictures": None}
    assert source.image_columns == ("pictures",)


def test_images_in_another_column_are_an_error(processors):
    given = [{"problem": "?", "answer": "1", "picture": Image.new("RGB", (56, 56))}]
    with pytest.raises(
        DataError, match=r"python:train has no column 'images', but images in 'picture'; set data\.image_key"
    ):
        scan(processors, given)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "python:train has no rows; it is an empty list"),
        ({"problem": "?"}, "python:train is a builtins.dict; give a list of dicts"),
        ("text", "python:train is a builtins.str"),
        ([3], "python:train: row 0 is a int; each row is a dict"),
        ([{"a": 1}, {"a": object()}], "python:train: row 1, 'a' is a builtins.object; values are text"),
        ([{"a": {"b": [{1, 2}]}}], r"row 0, 'a'\['b'\]\[0\] is a builtins.set"),
        ([{"a": {1: 2}}], "row 0, 'a' has the key 1, a int; keys are text"),
        ([{"image": np.zeros((4, 4, 3))}], r"row 0, 'image' is an array of shape \(4, 4, 3\); give an image as PIL"),
    ],
)
def test_what_is_no_dataset_is_an_error_that_says_where(data, message):
    with pytest.raises(DataError, match=message):
        source_of(data)


def test_other_objects_of_the_library_are_an_error_that_says_what_to_give():
    dataset = datasets.Dataset.from_list([{"a": 1}])
    with pytest.raises(
        DataError, match=r"has the splits train, test; give one of them: data\['train'\] or data\['test'\]"
    ):
        source_of(datasets.DatasetDict(train=dataset, test=dataset))
    with pytest.raises(DataError, match="is streamed, and training draws rows in any order"):
        source_of(dataset.to_iterable_dataset())


def test_a_table_of_pandas_is_an_error_that_says_how_to_give_it():
    import pandas

    with pytest.raises(DataError, match=r"DataFrame; give .* of a table, give datasets.Dataset.from_pandas\(table\)"):
        source_of(pandas.DataFrame({"a": [1]}))
