"""A folder of an evaluation: what a later evaluation removes, what it refuses, and when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trigon
from trigon.errors import ConfigError, ModelError
from trigon.tools.cli.main import main
from trigon.tools.eval.evaluate import check_output, open_output, remove_earlier
from trigon.tools.eval.settings import ModelSource

RUN = (
    *("config.yaml", "metrics.jsonl", "run.lock", "skipped_rows.jsonl"),
    *("rollouts/validation_000000.jsonl", "images/a.png"),
)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Return a folder with all that an evaluation writes, of one model and of several."""
    folder = tmp_path / "ev"
    write(folder, "evaluation.json", *RUN, *(f"blind/{name}" for name in RUN))
    write(folder / "1-a", *RUN, *(f"blind/{name}" for name in RUN))
    for name in ("1-a", "2-b"):
        write(folder / "exported" / name, "config.json")
        (folder / "exported" / name / "trigon_export.json").write_text('{"step": 3}')
    return folder


def test_an_earlier_evaluation_is_removed_but_for_the_exports_in_use(earlier):
    remove_earlier(earlier, kept=[earlier / "exported" / "2-b", Path("owner/model")])
    assert files_of(earlier) == ["exported/2-b/config.json", "exported/2-b/trigon_export.json"]
    write(earlier, "evaluation.json")
    remove_earlier(earlier, kept=[])
    assert list(earlier.iterdir()) == []


FOREIGN = (
    *("notes.md", "global_step_2/actor/model.safetensors", "run/metrics.jsonl", "blind/rollouts.md", "2-notes/a.md"),
    *("1-a/global_step_2/actor/model.safetensors", "1-a/blind/notes.md", "exported/mine/config.json"),
)


def test_anything_else_stays_and_a_folder_of_no_evaluation_is_refused(earlier, tmp_path):
    write(earlier, *FOREIGN)
    write(tmp_path / "other", "rollouts/a.jsonl")
    (earlier / "3-c").symlink_to(tmp_path / "other")
    remove_earlier(earlier, kept=[])
    (earlier / "3-c").unlink()
    assert files_of(earlier) == sorted(FOREIGN)
    assert files_of(tmp_path / "other") == ["rollouts/a.jsonl"]
    for refuse in (lambda: check_output(earlier), lambda: remove_earlier(earlier, kept=[])):
        with pytest.raises(ConfigError, match="is no earlier evaluation"):
            refuse()
    assert files_of(earlier) == sorted(FOREIGN)


def test_a_new_folder_is_named_like_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = ModelSource("owner/model", "hub", "owner/model", 0, None)
    assert [open_output(None, source) for _ in range(2)] == [Path("evaluations/model"), Path("evaluations/model-2")]
    assert open_output("a/b", source).is_dir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_output("~/ev", source) == tmp_path / "home" / "ev"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./missing", "good.jsonl"], "there is no model folder"),
        (["owner/nosuchmodel", "good.jsonl", "--reward", "math"], "nosuchmodel"),
        (["model", "bad.jsonl", "--reward", "math"], "bad.jsonl"),
        (["model", "missing.jsonl", "--reward", "math"], "data.val_files: there is no missing.jsonl"),
        (["model", "good.jsonl", "--reward", "math", "--by", "levl"], "the rows have no column 'levl'"),
        (["model", "good.jsonl", "--reward", "reward.py:score"], "no reward today"),
        (["model", "good.jsonl"], "worker.reward.reward_function is not set"),
        (["model", "good.jsonl", "--reward", "math", "--k", "3"], "pass@3 needs at least 3 completions"),
        (["model", "good.jsonl", "--reward", "math", "worker.rollot.n=3"], "did you mean worker.rollout.n"),
        (["model", "good.jsonl", "--reward", "math", "--output", "."], "is no earlier evaluation"),
    ],
)
def test_an_evaluation_that_fails_early_leaves_the_earlier_one(
    earlier, tmp_path, monkeypatch, capsys, own_datasets_cache, arguments, message
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model", "config.json")
    (tmp_path / "good.jsonl").write_text(json.dumps({"prompt": "?", "answer": "1", "level": "a"}) + "\n")
    (tmp_path / "bad.jsonl").write_text("no json\n")
    (tmp_path / "reward.py").write_text("raise RuntimeError('no reward today')\n")
    before = files_of(earlier)
    assert main(["eval", "--output", str(earlier), *arguments]) in (1, 2)
    assert message in capsys.readouterr().err
    assert files_of(earlier) == before


def test_the_file_of_a_reward_function_may_be_a_path(tmp_path):
    write(tmp_path / "model", "config.json")
    (tmp_path / "reward.py").write_text("def main(predict_str, ground_truth):\n    return 0.0\n")
    rows, options = [{"prompt": "?", "answer": "1"}], {"reward": tmp_path / "reward.py", "output": tmp_path / "new"}
    with pytest.raises(ModelError, match="no weights"):
        trigon.evaluate(tmp_path / "model", rows, **options)
