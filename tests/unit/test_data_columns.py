"""Dotted names reach into structs, in rows and in the columns of a table."""

import json

import datasets
import pytest

from support.builders import make_builder
from trigon.data.dataset import open_prompts
from trigon.data.rows import column_names, column_value, has_column, without_column
from trigon.errors import DataError

ROW = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra": {"index": 3, "media": {"images": []}},
    "reward_model.style": "column",
    "empty": None,
}


pytestmark = pytest.mark.usefixtures("own_datasets_cache")


def scan(path, processors, **changes):
    return open_prompts(
        str(path),
        make_builder(processors, **({"prompt_key": "prompt", "answer_key": "reward_model.ground_truth"} | changes)),
        filter_overlong_prompts=True,
        max_bad_row_fraction=0.5,
        num_workers=1,
    )


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward_model", ROW["reward_model"]),
        ("reward_model.ground_truth", "4"),
        ("extra.index", 3),
        ("extra.media.images", []),
        ("reward_model.style", "column"),  # the exact name wins
        ("empty", None),
        ("empty.field", None),
        ("reward_model.missing", None),
        ("nothing", None),
        ("nothing.at.all", None),
    ],
)
def test_a_dotted_name_reaches_into_structs(name, value):
    assert column_value(ROW, name) == value
    assert has_column(ROW, name) == (not name.startswith("nothing"))


def test_a_struct_can_have_a_field_with_a_dot():
    assert column_value({"a": {"b.c": 1, "b": {"c": 2}}}, "a.b.c") == 1
    assert column_value({"a.b": {"c": 1}, "a": {"b": {"c": 2}}}, "a.b.c") == 1


def test_a_column_is_left_out_without_changing_the_row():
    row = {"a": {"b": 1, "c": 2}, "d": 3}
    assert without_column(row, "a.b") == {"a": {"c": 2}, "d": 3}
    assert without_column(row, "d") == {"a": {"b": 1, "c": 2}}
    assert without_column(row, "x.y") == row
    assert row == {"a": {"b": 1, "c": 2}, "d": 3}


def test_names_of_fields_follow_their_column():
    assert column_names({"a": {"b": {"c": 1}}, "d": [{"e": 1}]}) == ("a", "a.b", "a.b.c", "d")


def test_a_dataset_of_verl_is_read(processors, tmp_path):
    rows = [
        {
            "data_source": "geometry",
            "prompt": [{"role": "user", "content": f"{number} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number},
        }
        for number in range(3)
    ]
    rows[1]["reward_model"] = {"style": "rule", "ground_truth": None}
    prompts = scan(write(tmp_path / "train.jsonl", rows), processors)
    assert [prompt.ground_truth for prompt in prompts] == ["1", "3"]
    assert prompts.num_skipped == {"answer": 1}
    assert prompts[0].row["extra_info"] == {"index": 0}


def test_a_null_struct_is_an_empty_ground_truth(processors, tmp_path):
    rows = [{"prompt": f"{n}?", "reward_model": {"ground_truth": "1"} if n else None} for n in range(2)]
    prompts = scan(write(tmp_path / "train.jsonl", rows), processors)
    assert prompts.num_skipped == {"answer": 1}
    assert prompts.row_indices == (1,)


def test_ground_truths_of_several_types_are_found(processors, tmp_path):
    rows = [{"prompt": "1?", "reward_model": {"ground_truth": truth}} for truth in ("a", [1, 2], 3)]
    prompts = scan(write(tmp_path / "train.jsonl", rows), processors)
    assert [prompt.ground_truth for prompt in prompts] == ["a", [1, 2], 3]


def test_an_exact_column_name_with_a_dot_wins(processors, tmp_path):
    rows = [{"prompt": "1?", "reward_model.ground_truth": "exact", "reward_model": {"ground_truth": "nested"}}]
    assert scan(write(tmp_path / "train.jsonl", rows), processors)[0].ground_truth == "exact"


def test_nested_images_are_used_and_left_out_of_the_row(processors, tmp_path, png_file):
    rows = [{"prompt": "<image>?", "reward_model": {"ground_truth": "1"}, "media": {"images": ["a.png"], "size": 2}}]
    png_file(tmp_path / "a.png")
    prompt = scan(write(tmp_path / "train.jsonl", rows), processors, image_key="media.images")[0]
    assert prompt.vision is not None
    assert prompt.row["media"] == {"size": 2}
    assert prompt.image_refs == ("train:0/media.images/0 (a.png)",)


def test_nested_image_columns_are_proposed(processors, tmp_path):
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "reward_model": {"ground_truth": datasets.Value("string")},
            "media": {"images": datasets.List(datasets.Image())},
        }
    )
    row = {"prompt": "1?", "reward_model": {"ground_truth": "1"}, "media": {"images": []}}
    datasets.Dataset.from_list([row], features=features).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"images in 'media\.images'; set data\.image_key=media\.images"):
        scan(tmp_path / "train.parquet", processors)


def test_a_missing_column_is_named_with_nested_ones(processors, tmp_path):
    path = write(tmp_path / "train.jsonl", [{"prompt": "1?", "reward_model": {"ground_truth": "1", "style": "rule"}}])
    with pytest.raises(DataError) as caught:
        scan(path, processors, answer_key="ground_truth")
    assert "only prompt, reward_model, reward_model.ground_truth, reward_model.style" in str(caught.value)
    assert "did you mean data.answer_key=reward_model.ground_truth?" in str(caught.value)
    with pytest.raises(DataError, match=r"did you mean data.answer_key=reward_model.ground_truth\?"):
        scan(path, processors, answer_key="reward_model.groundtruth")


@pytest.fixture
def png_file():
    def write_png(path):
        from PIL import Image

        Image.new("RGB", (56, 56), "red").save(path)

    return write_png
