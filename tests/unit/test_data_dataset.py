"""Opening a dataset scans every row: usable rows are numbered, bad ones named and counted."""

import json
import re
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.builders import make_builder
from support.images import png
from support.models import processors_of
from support.videos import make_video
from trigon.data.dataset import open_prompts
from trigon.data.rows import UnusableRow
from trigon.errors import DataError

pytestmark = pytest.mark.usefixtures("own_datasets_cache")


GEOMETRY3K = datasets.Features(
    {
        "images": datasets.List(datasets.Image()),
        "problem": datasets.Value("string"),
        "answer": datasets.Value("string"),
    }
)


def write_parquet(path, rows):
    """Write (images, problem, answer) rows with geometry3k's schema."""
    columns = {
        "images": [[{"bytes": data, "path": None} for data in images] for images, _, _ in rows],
        "problem": [problem for _, problem, _ in rows],
        "answer": [answer for _, _, answer in rows],
    }
    datasets.Dataset.from_dict(columns, features=GEOMETRY3K).to_parquet(path)
    return path


def good(number):
    return [png(56 + number, 56, seed=number)], f"<image>What is {number}?", str(number)


def scan(
    spec,
    processors,
    *,
    filter_overlong_prompts=True,
    max_bad_row_fraction=0.0,
    on_progress=None,
    on_skipped=None,
    **changes,
):
    return open_prompts(
        str(spec),
        make_builder(processors, **changes),
        filter_overlong_prompts=filter_overlong_prompts,
        max_bad_row_fraction=max_bad_row_fraction,
        num_workers=2,
        on_progress=on_progress,
        on_skipped=on_skipped,
    )


def test_rows_become_prompts(processors, tmp_path):
    path = write_parquet(tmp_path / "geometry.parquet", [good(i) for i in range(5)])
    prompts = scan(path, processors)
    assert len(prompts) == prompts.num_rows == 5
    assert [prompt.prompt_id for prompt in prompts] == [f"geometry:{i}" for i in range(5)]
    assert [prompt.ground_truth for prompt in prompts] == ["0", "1", "2", "3", "4"]
    assert tuple(len(prompt.token_ids) for prompt in prompts) == prompts.prompt_lengths
    assert prompts[3].image_refs == ("geometry:3/images/0",)
    assert prompts.num_skipped == {}


def test_scanning_decodes_but_does_not_process(processors, tmp_path):
    prompts = scan(write_parquet(tmp_path / "x.parquet", [good(0), good(1)]), processors)
    assert prompts.builder.image_processor.calls == 0
    prompts[0]
    assert prompts.builder.image_processor.calls == 1


def test_progress_is_reported_to_the_end(processors, tmp_path):
    reported = []
    path = write_parquet(tmp_path / "x.parquet", [([], f"{i}?", "1") for i in range(100)])
    scan(path, processors, on_progress=lambda done, total: reported.append((done, total)))
    assert reported[-1] == (100, 100)
    assert reported == sorted(reported)


def test_bad_rows_are_skipped_counted_and_named(processors, tmp_path):
    rows = [
        good(0),
        ([png()[:-2000]], "<image>?", "1"),
        good(2),
        ([png()], "no marker", "1"),
        ([b""], "<image>?", "1"),
        ([png(1001, 1000)], "<image>?", "1"),
        ([png(300, 1)], "<image>?", "1"),
        ([], "", "1"),
        ([], "text", None),
        ([], "x" * 2000, "1"),
        good(10),
    ]
    prompts = scan(write_parquet(tmp_path / "x.parquet", rows), processors, max_bad_row_fraction=0.7)
    assert prompts.row_indices == (0, 2, 10)
    assert prompts.num_skipped == {
        "image_unreadable": 2,
        "markers": 1,
        "image_pixels": 1,
        "image_shape": 1,
        "prompt": 1,
        "answer": 1,
        "overlong": 1,
    }
    first, second = prompts.examples["image_unreadable"]
    assert first.startswith("x:1/images/0: ")
    assert second.startswith("x:4/images/0: ")
    assert [prompt.prompt_id for prompt in prompts] == ["x:0", "x:2", "x:10"]


def test_rows_whose_text_is_not_utf8_are_skipped_and_named(processors, tmp_path):
    answers = pa.array([b"1", b"caf\xe9", b"3"], pa.binary())
    latin = pa.Array.from_buffers(pa.string(), len(answers), answers.buffers())
    pq.write_table(pa.table({"problem": ["a", "b", "c"], "answer": latin}), tmp_path / "x.parquet")
    prompts = scan(tmp_path / "x.parquet", processors, max_bad_row_fraction=0.5)
    assert [prompt.ground_truth for prompt in prompts] == ["1", "3"]
    (message,) = prompts.examples["encoding"]
    assert all(fact in message for fact in ("x:1", "'answer'", "not UTF-8", "0xe9"))

    halves = [{"problem": "a \ud83d", "answer": "1"}, {"problem": "b", "answer": "2"}]
    (tmp_path / "y.jsonl").write_text("".join(json.dumps(row) + "\n" for row in halves))
    prompts = scan(tmp_path / "y.jsonl", processors, max_bad_row_fraction=0.5)
    assert prompts.row_indices == (1,)
    assert "y:0" in prompts.examples["encoding"][0]


def test_too_many_bad_rows_are_an_error(processors, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [good(0), ([png()], "no marker", "1"), good(2), good(3)])
    assert len(scan(path, processors, max_bad_row_fraction=0.25)) == 3
    with pytest.raises(DataError) as caught:
        scan(path, processors, max_bad_row_fraction=0.24)
    assert "1 of 4 rows cannot be used, more than data.max_bad_row_fraction=0.24 allows" in str(caught.value)
    assert "1 x markers: x:1: <image> markers in the text: 0, images: 1" in str(caught.value)


def test_overlong_rows_are_skipped_or_an_error(processors, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [good(0), ([], "x" * 2000, "1")])
    prompts = scan(path, processors)
    assert prompts.num_skipped == {"overlong": 1}
    with pytest.raises(
        DataError, match=r"1 of 2 prompts are too long \(x:1: .* more than max_prompt_length=512\); raise"
    ):
        scan(path, processors, filter_overlong_prompts=False)


def test_a_dataset_without_usable_rows_is_an_error(processors, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [([], "x" * 2000, "1")])
    with pytest.raises(DataError, match="none of its 1 rows can be used"):
        scan(path, processors)


def test_rows_with_and_without_images_and_additional_columns(processors, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.png").write_bytes(png())
    rows = [
        {"images": ["figures/a.png"], "problem": "<image>?", "answer": 1, "level": {"hard": True}},
        {"images": [], "problem": "1 + 1?", "answer": 2, "level": {"hard": False}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = scan(tmp_path / "rows.jsonl", processors)
    assert prompts[0].vision is not None
    assert prompts[0].image_refs == ("rows:0/images/0 (a.png)",)
    assert prompts[1].vision is None
    assert prompts[1].row == {"problem": "1 + 1?", "answer": 2, "level": {"hard": False}}


def test_chat_messages_are_read_from_parquet(processors, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>?"}]
    datasets.Dataset.from_list([{"images": [{"bytes": png()}], "problem": messages, "answer": "1"}]).to_parquet(
        tmp_path / "x.parquet"
    )
    assert scan(tmp_path / "x.parquet", processors)[0].text == "system: Be brief.\n\nuser: <image>?"


def test_a_missing_column_is_an_error(processors, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [good(0)])
    with pytest.raises(DataError, match=r"x\.parquet has no column 'prompt', only answer, images, problem; did you"):
        scan(path, processors, prompt_key="prompt")


def test_images_in_another_column_are_an_error(processors, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [([png()], "What is it?", "1")])
    with pytest.raises(
        DataError, match=r"x\.parquet has no column 'image', but images in 'images'; set data\.image_key=images"
    ):
        scan(path, processors, image_key="image")


def test_images_for_a_text_model_are_an_error(tiny_model, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [([], "1 + 1?", "2"), good(1)])
    with pytest.raises(DataError, match="x:1 has images in column 'images', but a llama model takes none"):
        scan(path, processors_of(tiny_model("llama")), max_bad_row_fraction=1.0)


def test_the_fingerprint_depends_on_the_content_and_not_on_the_path(processors, tmp_path):
    rows = [good(0), good(1)]
    (tmp_path / "moved").mkdir()
    fingerprint = scan(write_parquet(tmp_path / "x.parquet", rows), processors).fingerprint
    assert scan(write_parquet(tmp_path / "moved" / "y.parquet", rows), processors).fingerprint == fingerprint
    others = [
        [good(1), good(0)],
        [good(0), good(2)],
        [good(0), (good(1)[0], good(1)[1], "another answer")],
        [good(0), ([png(57, 56, seed=9)], good(1)[1], good(1)[2])],
    ]
    for number, other in enumerate(others):
        path = write_parquet(tmp_path / f"other{number}.parquet", other)
        assert scan(path, processors).fingerprint != fingerprint


def test_a_row_that_becomes_unusable_later_is_named(processors, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    row = {"images": ["a.png"], "problem": "<image>?", "answer": "1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    prompts = scan(tmp_path / "rows.jsonl", processors)
    (tmp_path / "a.png").unlink()
    with pytest.raises(UnusableRow) as caught:
        prompts[0]
    assert caught.value.reason == "image_missing"
    assert str(caught.value).startswith("rows:0/images/0 (a.png): no such file")


def test_videos_in_another_column_are_an_error(processors, tmp_path):
    features = datasets.Features(
        {"problem": datasets.Value("string"), "answer": datasets.Value("string"), "clips": [datasets.Video()]}
    )
    rows = [{"problem": "<video>?", "answer": "1", "clips": [{"bytes": make_video(), "path": None}]}]
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    with pytest.raises(DataError, match=r"no column 'videos', but videos in 'clips'; set data\.video_key=clips"):
        scan(path, processors)
    prompts = scan(path, processors, video_key="clips")
    assert prompts[0].vision.kind == "video"
    assert prompts[0].image_refs == ("train:0/clips/0",)


def test_bad_videos_are_skipped_and_counted(processors, tmp_path):
    (tmp_path / "good.mp4").write_bytes(make_video())
    (tmp_path / "bad.mp4").write_bytes(make_video()[:700])
    rows = [
        {"problem": "<video>?", "answer": "1", "videos": name}
        for name in ("good.mp4", "bad.mp4", "none.mp4", "../good.mp4", "good.mp4")
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = scan(path, processors, max_bad_row_fraction=0.6)
    assert prompts.row_indices == (0, 4)
    assert prompts.num_skipped == {"video_unreadable": 1, "video_missing": 1, "video_outside": 1}
    assert prompts.builder.video_processor.calls == 0


def write_paths(folder, paths):
    """Write a dataset with these image paths into its own folder, and the images."""
    folder.mkdir()
    for path in paths:
        if path.is_absolute():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png())
    rows = [{"problem": "<image>?", "answer": "1", "images": [str(path)]} for path in paths]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "train.jsonl"


def test_absolute_image_paths_propose_a_value_that_works(processors, tmp_path):
    images = tmp_path / "images"
    for name, paths, proposed in (
        ("one", [images / "a" / "1.png"], images / "a"),
        ("many", [images / "a" / "1.png", images / "b" / "c" / "2.png", images / "a" / "3.png"], images),
    ):
        path = write_paths(tmp_path / name, paths)
        with pytest.raises(DataError) as caught:
            scan(path, processors)
        assert re.findall(r"data\.image_dir=(\S+)", str(caught.value))[-1] == str(proposed)
        assert len(scan(path, processors, image_dir=proposed)) == len(paths)


def test_relative_paths_out_of_the_folder_propose_no_value(processors, tmp_path):
    with pytest.raises(DataError, match=r"write their paths relative to it, and set data\.image_dir to it") as caught:
        scan(write_paths(tmp_path / "data", [Path("../../1.png")]), processors)
    assert "data.image_dir=" not in str(caught.value)


def test_skipped_rows_are_passed_on_even_if_there_are_too_many(processors, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [good(0), ([png()], "no marker", "1"), ([], "x" * 2000, "1")])
    for allowed in (0.5, 0.0):
        skipped = []
        try:
            scan(path, processors, max_bad_row_fraction=allowed, on_skipped=skipped.extend)
        except DataError:
            assert allowed == 0.0
        assert [(row.row, row.reason) for row in skipped] == [(1, "markers"), (2, "overlong")]
        assert (
            skipped[0].message
            == "x:1: <image> markers in the text: 0, images: 1; put <image> into the text where each belongs"
        )


def test_overlong_prompts_propose_a_length_that_works(processors, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [([], "x " * (20 + number), "1") for number in range(20)])
    with pytest.raises(DataError) as caught:
        scan(path, processors, max_prompt_length=10)
    every, most = map(int, re.findall(r"data\.max_prompt_length=(\d+)", str(caught.value)))
    assert scan(path, processors, max_prompt_length=every).num_skipped == {}
    assert scan(path, processors, max_prompt_length=every - 1).num_skipped == {"overlong": 1}
    assert len(scan(path, processors, max_prompt_length=most)) == 18
    with pytest.raises(DataError, match=rf"data\.max_prompt_length={every} is enough for all"):
        scan(path, processors, max_prompt_length=most, filter_overlong_prompts=False)
