"""Opening a dataset scans every row: usable rows are numbered, bad ones named and counted."""

import re

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.builders import make_builder, write_jsonl
from support.images import counting, png
from support.videos import make_video
from trigon.data import dataset
from trigon.data.dataset import select_prompts
from trigon.data.rows import column_names, column_value, has_column, without_column
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


def scanned(spec, processors, *, on_progress=None, **changes):
    return dataset.scan(str(spec), make_builder(processors, **changes), num_workers=2, on_progress=on_progress)


def scan(spec, processors, **changes):
    return select_prompts(scanned(spec, processors, **changes))


def test_rows_become_prompts(processors, tmp_path):
    reported, own = [], counting(processors)
    path = write_parquet(tmp_path / "geometry.parquet", [good(i) for i in range(40)])
    prompts = scan(path, own, on_progress=lambda more, total: reported.append((more, total)))
    assert len(prompts) == prompts.num_rows == 40
    assert prompts.num_skipped == {}
    assert own.image_processor.calls == 0  # images are decoded, not processed
    first = [prompts[index] for index in range(5)]
    assert own.image_processor.calls == 5
    assert [prompt.prompt_id for prompt in first] == [f"geometry:{i}" for i in range(5)]
    assert [prompt.ground_truth for prompt in first] == ["0", "1", "2", "3", "4"]
    assert first[3].image_refs == ("geometry:3/images/0",)
    assert sum(more for more, _ in reported) == 40
    assert {total for _, total in reported} == {40}


BAD = [
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


def test_bad_rows_are_skipped_counted_and_named(processors, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", BAD)
    prompts = scan(path, processors, max_bad_row_fraction=0.7)
    strict = scanned(path, processors, max_bad_row_fraction=0.63)
    assert prompts.row_indices == (0, 2, 10)
    assert [prompt.prompt_id for prompt in prompts] == ["x:0", "x:2", "x:10"]
    reasons = ["image_unreadable", "markers", "image_unreadable", "image_pixels", "image_shape", "prompt", "answer"]
    assert [(row.row, row.reason) for row in strict.skipped] == [
        *zip((1, 3, 4, 5, 6, 7, 8), reasons, strict=True),
        (9, "overlong"),
    ]
    assert prompts.num_skipped == {reason: reasons.count(reason) for reason in reasons} | {"overlong": 1}
    first, second = prompts.examples["image_unreadable"]
    assert first.startswith("x:1/images/0: ")
    assert second.startswith("x:4/images/0: ")
    with pytest.raises(DataError) as caught:
        select_prompts(strict)
    assert "7 of 11 rows" in str(caught.value)
    assert "data.max_bad_row_fraction=0.63" in str(caught.value)
    assert "1 x markers: x:3: " in str(caught.value)


def test_rows_whose_text_is_not_utf8_are_skipped_and_named(processors, tmp_path):
    answers = pa.array([b"1", b"caf\xe9", b"3"], pa.binary())
    latin = pa.Array.from_buffers(pa.string(), len(answers), answers.buffers())
    pq.write_table(pa.table({"problem": ["a", "b", "c"], "answer": latin}), tmp_path / "x.parquet")
    prompts = scan(tmp_path / "x.parquet", processors, max_bad_row_fraction=0.5)
    assert [prompt.ground_truth for prompt in prompts] == ["1", "3"]
    (message,) = prompts.examples["encoding"]
    assert all(fact in message for fact in ("x:1", "'answer'", "not UTF-8", "0xe9"))
    halves = [{"problem": "a \ud83d", "answer": "1"}, {"problem": "b", "answer": "2"}]
    prompts = scan(write_jsonl(tmp_path / "y.jsonl", halves), processors, max_bad_row_fraction=0.5)
    assert prompts.row_indices == (1,)
    assert "y:0" in prompts.examples["encoding"][0]


def test_rows_of_other_shapes_and_chat_messages_are_read(processors, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.png").write_bytes(png())
    rows = [
        {"images": ["figures/a.png"], "problem": "<image>?", "answer": 1, "level": {"hard": True}},
        {"images": [], "problem": "1 + 1?", "answer": 2, "level": {"hard": False}},
    ]
    prompts = scan(write_jsonl(tmp_path / "rows.jsonl", rows), processors)
    assert prompts[0].image_refs == ("rows:0/images/0 (a.png)",)
    assert prompts[1].vision is None
    assert prompts[1].row == {"problem": "1 + 1?", "answer": 2, "level": {"hard": False}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>?"}]
    datasets.Dataset.from_list([{"images": [{"bytes": png()}], "problem": messages, "answer": "1"}]).to_parquet(
        tmp_path / "x.parquet"
    )
    assert scan(tmp_path / "x.parquet", processors)[0].text == "system: Be brief.\n\nuser: <image>?"


def test_the_fingerprint_depends_on_the_content_and_not_on_the_path(processors, tmp_path):
    rows = [good(0), good(1)]
    (tmp_path / "moved").mkdir()
    content = scan(write_parquet(tmp_path / "x.parquet", rows), processors).content
    assert scan(write_parquet(tmp_path / "moved" / "y.parquet", rows), processors).content.has_rows_of(content)
    others = [
        [good(1), good(0)],
        [good(0), good(2)],
        [good(0), (good(1)[0], good(1)[1], "another answer")],
        [good(0), ([png(57, 56, seed=9)], good(1)[1], good(1)[2])],
    ]
    for number, other in enumerate(others):
        path = write_parquet(tmp_path / f"other{number}.parquet", other)
        assert not scan(path, processors).content.has_rows_of(content)


def test_videos_of_rows(processors, tmp_path):
    features = datasets.Features(
        {"problem": datasets.Value("string"), "answer": datasets.Value("string"), "clips": [datasets.Video()]}
    )
    rows = [{"problem": "<video>?", "answer": "1", "clips": [{"bytes": make_video(), "path": None}]}]
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    with pytest.raises(DataError, match=r"'videos'.*'clips'; set data\.video_key=clips"):
        scan(path, processors)
    prompt = scan(path, processors, video_key="clips")[0]
    assert (prompt.vision.kind, prompt.image_refs) == ("video", ("train:0/clips/0",))
    (tmp_path / "good.mp4").write_bytes(make_video())
    (tmp_path / "bad.mp4").write_bytes(make_video()[:700])
    names = ("good.mp4", "bad.mp4", "none.mp4", "../good.mp4", "good.mp4")
    path = write_jsonl(
        tmp_path / "rows.jsonl", ({"problem": "<video>?", "answer": "1", "videos": name} for name in names)
    )
    own = counting(processors)
    prompts = scan(path, own, max_bad_row_fraction=0.6)
    assert prompts.row_indices == (0, 4)
    assert prompts.num_skipped == {"video_unreadable": 1, "video_missing": 1, "video_outside": 1}
    assert own.video_processor.calls == 0


# Values that messages propose


def test_overlong_prompts_propose_a_length_that_works(processors, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [([], "x " * (20 + number), "1") for number in range(20)])
    with pytest.raises(DataError, match="none of its 20 rows") as caught:
        scan(path, processors, max_prompt_length=10)
    every, most = map(int, re.findall(r"data\.max_prompt_length=(\d+)", str(caught.value)))
    assert scan(path, processors, max_prompt_length=every).num_skipped == {}
    assert scan(path, processors, max_prompt_length=every - 1).num_skipped == {"overlong": 1}
    assert len(scan(path, processors, max_prompt_length=most)) == 18
    with pytest.raises(DataError, match=rf"2 of 20 .*data\.max_prompt_length={every} is enough for all"):
        scan(path, processors, max_prompt_length=most, filter_overlong_prompts=False)


# Columns

ROW = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra": {"index": 3, "media": {"images": []}},
    "reward_model.style": "column",
    "empty": None,
}


def test_a_dotted_name_reaches_into_structs_and_a_row_may_lose_a_column():
    for name, value in {
        "reward_model.ground_truth": "4",
        "extra.media.images": [],
        "reward_model.style": "column",  # the exact name wins
        "empty": None,
        "reward_model.missing": None,
        "nothing": None,
    }.items():
        assert column_value(ROW, name) == value
        assert has_column(ROW, name) == (name != "nothing")
    assert column_value({"a": {"b.c": 1, "b": {"c": 2}}}, "a.b.c") == 1
    assert column_value({"a.b": {"c": 1}, "a": {"b": {"c": 2}}}, "a.b.c") == 1
    assert column_names({"a": {"b": {"c": 1}}, "d": [{"e": 1}]}) == ("a", "a.b", "a.b.c", "d")
    row = {"a": {"b": 1, "c": 2}, "d": 3}
    assert without_column(row, "a.b") == {"a": {"c": 2}, "d": 3}
    assert without_column(row, "d") == {"a": {"b": 1, "c": 2}}
    assert without_column(row, "x.y") == row
    assert row == {"a": {"b": 1, "c": 2}, "d": 3}


VERL = {"prompt_key": "prompt", "answer_key": "reward_model.ground_truth", "max_bad_row_fraction": 0.5}


def test_a_dataset_of_verl_is_read(processors, tmp_path):
    answers = [*({"style": "rule", "ground_truth": truth} for truth in ("a", [1, 2], 3, None)), None]
    question = [{"role": "user", "content": "1 + 1?"}]
    rows = [{"prompt": question, "reward_model": answer, "extra_info": {"index": 0}} for answer in answers]
    prompts = scan(write_jsonl(tmp_path / "train.jsonl", rows), processors, **VERL)
    assert [prompt.ground_truth for prompt in prompts] == ["a", [1, 2], 3]
    assert prompts.num_skipped == {"answer": 2}
    assert prompts[0].row["extra_info"] == {"index": 0}
    exact = [row | {"reward_model.ground_truth": "exact"} for row in rows]
    assert scan(write_jsonl(tmp_path / "exact.jsonl", exact), processors, **VERL)[0].ground_truth == "exact"
