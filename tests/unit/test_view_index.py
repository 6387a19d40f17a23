"""The index of `trigon view` finds what the rollouts files have, while they are written."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from support.view_runs import make_row, write_image, write_run, write_step
from trigon.errors import DataError
from trigon.report.rollouts import RolloutRow, Split
from trigon.report.run import open_run
from trigon.report.run_folder import RunFolder
from trigon.tools.view.index import IndexedRun, RolloutFilter, index_path, parse_filter
from trigon.tools.view.runs import MetricsFile, open_runs


def index_of(folder: Path, cache: Path, *files: tuple[int, Split, list[RolloutRow]]) -> IndexedRun:
    """Return the index of a run with these rollouts files, each (step, split, rows)."""
    with RunFolder(folder) as run:
        for file in files:
            run.write_rollouts(*file)
    return open_index(folder, cache)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", num_steps=2)
    with RunFolder(folder) as run:
        failed = replace(make_row("train:9", 0, nan, response="Die Größe ist 5%."), outcome="failed", error="boom")
        cut = make_row("train:9", 1, 0.25, response="A long one " + "and on " * 20, finish_reason="length")
        run.write_rollouts(2, "filtered", [replace(row, filtered="low", advantage=None) for row in (failed, cut)])
        run.write_rollouts(2, "validation", [make_row("val:0", 0, 1.0), make_row("val:1", 0, 0.0, tokens=None)])
    return folder


def open_index(folder: Path, cache: Path) -> IndexedRun:
    cache.mkdir(exist_ok=True)
    record = open_run(folder)
    index = IndexedRun(record, index_path(cache, record.path))
    index.update()
    return index


def found(index: IndexedRun, **filters: str) -> list[tuple[str, int, str]]:
    groups = index.summaries(index.find(parse_filter(filters)).ids)
    return [(group["split"], group["step"], group["prompt_id"]) for group in groups]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"split": "validation"}, [("validation", 2, "val:0"), ("validation", 2, "val:1")]),
        ({"solved": "some"}, [("train", 2, "train:1"), ("train", 1, "train:1")]),
        ({"solved": "all", "split": "train"}, [("train", 2, "train:2"), ("train", 1, "train:2")]),
        ({"solved": "none", "max_step": "1"}, [("train", 1, "train:0")]),
        ({"filtered": "low"}, [("filtered", 2, "train:9")]),
        ({"filtered": "no", "min_step": "2", "solved": "none"}, [("train", 2, "train:0"), ("validation", 2, "val:1")]),
        ({"outcome": "not_ok"}, [("filtered", 2, "train:9")]),
        ({"outcome": "timeout"}, []),
        ({"finish_reason": "length"}, [("filtered", 2, "train:9")]),
        ({"min_reward": "0.2", "max_reward": "0.9"}, [("filtered", 2, "train:9")]),
        ({"min_tokens": "10"}, [("filtered", 2, "train:9")]),
        ({"text": "DIE GRÖSSE ist 5%"}, [("filtered", 2, "train:9")]),
        ({"text": "5_"}, []),  # % and _ are characters, not wildcards
        ({"text": "in val:1?"}, [("validation", 2, "val:1")]),
        ({"text": "\\"}, []),
        ({"tokens": "recorded", "split": "validation"}, [("validation", 2, "val:0")]),
        ({"prompt_id": "train:0", "sort": "oldest"}, [("train", 1, "train:0"), ("train", 2, "train:0")]),
    ],
)
def test_a_filter_finds_the_groups_that_it_describes(folder, tmp_path, filters, expected):
    assert found(open_index(folder, tmp_path / "cache"), **filters) == expected


@pytest.mark.parametrize(
    ("sort", "first"),
    [("best", "train:2"), ("worst", "train:0"), ("spread", "train:1"), ("longest", "train:9"), ("mismatch", "train:0")],
)
def test_groups_are_sorted_as_asked(folder, tmp_path, sort, first):
    index = open_index(folder, tmp_path / "cache")
    rows = index.summaries(index.find(RolloutFilter(sort=sort, max_step=2)).ids)
    assert rows[0]["prompt_id"] == first
    assert len(rows) == 9
    assert index.find(RolloutFilter(min_reward=1.0, split="train")).num_rollouts == 2 * (2 + 4)


def test_a_group_is_read_whole_from_its_file(folder, tmp_path):
    index = open_index(folder, tmp_path / "cache")
    rows = index.read_group("train", 2, 1)
    assert [(row.prompt_id, row.sample, row.reward) for row in rows] == [("train:1", k, float(k % 2)) for k in range(4)]
    assert rows[0].tokens.texts == ["I ", "count ", "0."]
    assert index.read_group("train", 2, 7) is None
    [summary] = [row for row in index.summaries(index.find(RolloutFilter()).ids) if row["prompt_id"] == "train:9"]
    assert summary["rewards"] == [None, 0.25]
    assert summary["mismatch"] == pytest.approx(0.01)


def test_the_same_prompt_twice_in_a_step_is_two_groups(tmp_path):
    rows = [make_row("train:0", sample, 0.0) for sample in (0, 1, 0, 1)]
    index = index_of(tmp_path / "run", tmp_path / "cache", (1, "train", rows))
    assert [(row["number"], row["num"]) for row in index.history(index.prompt_of("train", 1, 0))] == [(0, 2), (1, 2)]


def test_the_history_of_a_prompt_has_no_other_prompt_of_the_same_id(tmp_path):
    trained = make_row("geo:7", 0, 0.0, image_files=("images/a.png",))
    other_text, other_image = replace(trained, prompt="Why?"), replace(trained, image_files=("images/b.png",))

    def history(validated, split):
        reformatted = replace(trained, prompt="In another format", image_files=())
        files = [(1, "train", [trained]), (3, "train", [reformatted])]
        files += [(step, "validation", [validated]) for step in (2, 4)]
        index = index_of(tmp_path / "run", tmp_path / "cache", *files)
        return [group["step"] for group in index.history(index.prompt_of(split, {"train": 1}.get(split, 2), 0))]

    assert history(trained, "train") == [1, 2, 3, 4]  # validated on training prompts
    assert (history(other_text, "train"), history(other_text, "validation")) == ([1, 3], [2, 4])
    assert (history(other_image, "train"), history(other_image, "validation")) == ([1, 3], [2, 4])


def test_the_history_of_a_prompt_has_its_other_occurrences(tmp_path):
    steps = {1: ("train:7", "train:7#2"), 2: ("train:71", "train:7#3")}
    files = [(step, "train", [make_row(name, 0, 0.0) for name in names]) for step, names in steps.items()]
    index = index_of(tmp_path / "run", tmp_path / "cache", *files)
    ids = ["train:7", "train:7#2", "train:7#3"]
    assert [group["prompt_id"] for group in index.history(index.prompt_of("train", 1, 1))] == ids
    assert sorted(prompt_id for _, _, prompt_id in found(index, prompt_id="train:7")) == ids


def test_the_index_follows_a_run_that_is_written_resumed_and_rewound(folder, tmp_path):
    index = open_index(folder, tmp_path / "cache")
    before = index.progress().version
    index.update()
    assert index.progress().version == before, "files that have not changed are not read again"
    with RunFolder(folder) as run:
        write_step(run, 3, write_image(folder, (0, 0, 0)))
        index.update()
        assert found(index, min_step="3") == [("train", 3, f"train:{k}") for k in range(3)]
        run.write_rollouts(3, "train", [make_row("train:new", 0, 1.0)])
        index.update()
        assert found(index, min_step="3") == [("train", 3, "train:new")]
        run.rewind(1)
    index.update()
    assert found(index) == [("train", 1, f"train:{k}") for k in range(3)]
    assert found(index, text="train:new") == []


def test_an_index_is_kept_between_starts_and_made_again_if_it_is_damaged(folder, tmp_path):
    first = open_index(folder, tmp_path / "cache")
    second = open_index(folder, tmp_path / "cache")
    assert second.progress().version == first.progress().version
    [path] = (tmp_path / "cache").iterdir()
    path.write_bytes(b"not a database" * 1000)
    assert len(found(open_index(folder, tmp_path / "cache"))) == 9


def test_nothing_is_written_to_the_run_folder(folder, tmp_path):
    def content() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}

    before = content()
    [run] = open_runs([folder], cache=tmp_path / "cache")
    run.update()
    assert run.state()["num_indexed"] == 4
    assert content() == before


def test_lines_that_are_no_rollouts_are_skipped_and_reported(folder, tmp_path):
    path = folder / "rollouts" / "step_000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    wrong = json.loads(lines[3])
    for changes in ({"response": 5}, {"reward": "high"}, {"image_files": [7]}, {"version": 4}):
        lines.append(json.dumps(wrong | changes).encode() + b"\n")
    path.write_bytes(b"".join(lines) + b'{"half a line')
    index = open_index(folder, tmp_path / "cache")
    assert len(found(index, max_step="1")) == 3
    [problem] = index.problems()
    assert "rollouts/step_000001.jsonl, line 13 is not a rollout" in problem
    assert "3 more lines" in problem


def test_a_diverged_run_is_indexed_and_its_mismatch_is_that_of_the_finite_tokens(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=1)
    tokens = replace(make_row("a", 0, 0.0).tokens, sampling_logprobs=[-0.5, -1.0, nan], old_logprobs=[-0.75, nan, -inf])
    rows = [make_row("a", 0, 0.0, tokens=each) for each in (tokens, replace(tokens, old_logprobs=[nan] * 3))]
    index = index_of(folder, tmp_path / "cache", (2, "train", rows[:1]), (3, "train", rows[1:]))
    groups = index.summaries(index.find(parse_filter({"min_step": "2"})).ids)
    assert {group["step"]: group["mismatch"] for group in groups} == {2: 0.25, 3: None}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepp": "1"}, r"there is no filter 'stepp'; did you mean (min_)?s\w+\?"),
        ({"solved": "most"}, r"solved cannot be 'most': .*'none', 'some' or 'all'"),
        ({"min_step": "1.5"}, r"min_step cannot be '1.5': .* integer"),
        ({"max_reward": "nan"}, r"max_reward cannot be 'nan': .* number"),
        ({"min_step": "9" * 30}, r"min_step cannot be"),
        ({"text": "a" * 1001}, r"at most 1000 characters"),
    ],
)
def test_a_wrong_filter_is_an_error(values, message):
    with pytest.raises(DataError, match=message):
        parse_filter(values)


def test_new_lines_of_metrics_are_read_and_all_of_a_file_that_replaced_it(folder):
    file = MetricsFile(folder / "metrics.jsonl")
    file.update()
    first = file.columns(0)
    assert first["metrics"]["reward/overall"] == pytest.approx([0.1, 0.2])
    with (folder / "metrics.jsonl").open("ab") as lines:
        lines.write(b'{"step": 3, "metrics": {"new": null}}\nno json\n{"step": 4, "met')
    file.update()
    assert file.columns(2)["steps"] == [3]
    assert "no json" in file.problem
    with RunFolder(folder) as run:
        (folder / "metrics.jsonl").unlink()
        run.append_metrics(1, {"reward/overall": 7.0})
    file.update()
    assert file.columns(0)["metrics"] == {"reward/overall": [7.0]}
    assert file.version > first["version"]
    assert file.problem == ""


def test_runs_have_names_that_differ(tmp_path):
    folders = [write_run(tmp_path / name / "run", num_steps=1) for name in ("a", "b")]
    runs = open_runs([*folders, folders[0]], cache=tmp_path / "cache")
    assert [run.name for run in runs] == ["a", "b"]
    folders = [write_run(tmp_path / "c" / name, num_steps=1) for name in ("a", "b")]
    runs = open_runs([tmp_path / "a" / "run", *folders], cache=tmp_path / "cache")
    assert [run.name for run in runs] == ["a/run", "c/a", "c/b"]
    assert [run.name for run in open_runs(folders[:1], cache=tmp_path / "cache")] == ["c/a"]


def test_a_cache_that_cannot_be_made_is_an_error(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="choose another --cache"):
        open_runs([folder], cache=tmp_path / "file" / "cache")
