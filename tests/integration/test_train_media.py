"""Runs with vLLM on datasets of videos, of mixed text and images, and of several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from support.images import png
from support.runs import NO_VALIDATION, assert_learned, lines, make_run, rollouts
from support.videos import make_video

STEPS = 2


def train(made: Path, folder: Path, train_file: Path, *overrides: str) -> None:
    make_run(
        made,
        folder,
        f"data.train_files={train_file}",
        *NO_VALIDATION,
        "data.prompt_key=problem",
        "worker.rollout.limit_images=0",
        *overrides,
        steps=STEPS,
    )
    assert_learned(folder)
    assert [line["step"] for line in lines(folder) if line["step"] > 0] == [1, 2]


def train_rollouts(folder: Path) -> list[dict[str, Any]]:
    """Return the training rollouts of a run."""
    files = rollouts(folder).items()
    return [json.loads(line) for name, text in files if name.startswith("step") for line in text.splitlines()]


@pytest.mark.extended
@pytest.mark.long(cases=["2"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_on_videos(made: Path, tmp_path: Path, workers: int) -> None:
    (tmp_path / "clips").mkdir()
    rows = []
    for number in range(4):
        (tmp_path / "clips" / f"{number}.mp4").write_bytes(make_video(frames=8 + 4 * number, first=number))
        rows.append({"problem": "<video>How many sides?", "answer": "3", "videos": f"clips/{number}.mp4"})
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    worker_options = () if workers == 1 else ("trainer.n_gpus_per_node=2", "worker.rollout.tensor_parallel_size=1")
    train(
        made,
        tmp_path / "run",
        path,
        "data.video_fps=5",
        "data.max_video_frames=6",
        "data.max_prompt_length=200",
        *worker_options,
    )
    sources = {name for row in train_rollouts(tmp_path / "run") for name in row["images"]}
    assert sources == {f"train:{number}/videos/0 ({number}.mp4)" for number in range(4)}


@pytest.mark.extended
def test_a_run_on_text_one_image_and_three(made: Path, tmp_path: Path) -> None:
    rows = [
        {"problem": "What is 1 + 2?", "answer": "3", "images": []},
        {"problem": "<image>How many sides?", "answer": "3", "images": [png(84, 84)]},
        {"problem": "<image>, <image> or <image>?", "answer": "3", "images": [png(56, 84, i) for i in (1, 2, 3)]},
        {"problem": "What is 2 + 2?", "answer": "4", "images": []},
    ]
    path = tmp_path / "train.parquet"
    features = datasets.Features(
        {"problem": datasets.Value("string"), "answer": datasets.Value("string"), "images": [datasets.Image()]}
    )
    rows = [{**row, "images": [{"bytes": each, "path": None} for each in row["images"]]} for row in rows]
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    train(made, tmp_path / "run", path, "data.max_prompt_length=200")
    assert sorted({len(row["images"]) for row in train_rollouts(tmp_path / "run")}) == [0, 1, 3]


@pytest.mark.long
def test_a_run_on_two_files_with_weights(made: Path, tmp_path: Path) -> None:
    for name, count in (("one", 2), ("two", 8)):
        text = "".join(json.dumps({"problem": f"{name} + {i}?", "answer": str(i)}) + "\n" for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text(text)
    train(
        made,
        tmp_path / "run",
        tmp_path / "one.jsonl",
        f"data.train_files=[{tmp_path / 'one.jsonl'},{tmp_path / 'two.jsonl'}]",
        "data.train_weights=[2,0.5]",
        f"data.val_files=[{tmp_path / 'one.jsonl'},{tmp_path / 'two.jsonl'}]",
    )
    prompt_ids = {row["prompt_id"] for row in train_rollouts(tmp_path / "run")}
    assert {name for name in prompt_ids if name.startswith("one")} == {"one:0", "one:1", "one:0#2", "one:1#2"}
    assert len({name for name in prompt_ids if name.startswith("two")}) == 4
