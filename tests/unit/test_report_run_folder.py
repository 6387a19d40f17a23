"""The files of a run folder, its lock, and what a resumed run leaves in it."""

import datetime
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from trigon.errors import CheckpointError, ConfigError
from trigon.report.rollouts import rollout_rows
from trigon.report.run import StepMetrics, read_metrics
from trigon.report.run_folder import RunFolder, RunWriter
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score


def group(text="<think>2</think>\\boxed{4}", *, ground_truth="4", parts=None, overall=1.0):
    prompt = Prompt(
        prompt_id="train:17",
        token_ids=(1, 2, 3),
        vision=None,
        text="<image> What is it?",
        ground_truth=ground_truth,
        row={},
        image_refs=("train:17/images/0 (a.png)",),
    )
    score = Score(overall=overall, parts={"overall": overall} if parts is None else parts, outcome="ok", error="")
    completion = Completion(
        token_ids=(5, 6), sampling_logprobs=(-0.5, -0.25), finish_reason="stop", text=text, policy_version=11
    )
    return RolloutGroup(prompt, (Rollout(completion, score),) * 2)


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        yield folder


@pytest.mark.parametrize("place", ["file/run", "file", "read_only", "read_only/run", "/proc/trigon"])
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "read_only").mkdir(mode=0o500)
    if place.startswith("read_only") and os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    with pytest.raises(ConfigError, match=r"cannot be written: .*Set trainer\.save_checkpoint_path"):
        RunFolder(tmp_path / place)


def test_metrics_are_one_sorted_json_line_per_step(folder):
    folder.append_metrics(1, {"b": 0.1, "a": 1.0})
    folder.append_metrics(2, {"a": float("nan"), "b": float("inf")})
    text = (folder.path / "metrics.jsonl").read_text()
    assert text == ('{"step": 1, "metrics": {"a": 1.0, "b": 0.1}}\n{"step": 2, "metrics": {"a": null, "b": null}}\n')
    first, second = folder.read_metrics()
    assert first == StepMetrics(1, {"a": 1.0, "b": 0.1})
    assert math.isnan(second.metrics["a"])


def test_an_incomplete_last_line_is_not_read_and_is_removed_before_appending(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.append_metrics(1, {"a": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "metr')
    assert [line.step for line in read_metrics(tmp_path)] == [1]
    with RunFolder(tmp_path) as folder:
        folder.append_metrics(2, {"a": 2.0})
    assert read_metrics(tmp_path) == [StepMetrics(1, {"a": 1.0}), StepMetrics(2, {"a": 2.0})]
    (tmp_path / "metrics.jsonl").write_text('garbage\n{"step": 2, "metrics": {}}\n')
    with pytest.raises(CheckpointError, match="garbage"):
        read_metrics(tmp_path)


def write(folder, steps):
    for step in steps:
        folder.write_rollouts(step, "train", rollout_rows([group(f"completion {step}")]))
        if step % 2 == 0:
            folder.write_rollouts(step, "validation", rollout_rows([group(f"validation {step}")]))
        folder.append_metrics(step, {"a": step / 3})


def contents(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "run.lock"
    }


def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path):
    with RunFolder(tmp_path / "uninterrupted") as folder:
        write(folder, range(1, 7))
    with RunFolder(tmp_path / "resumed") as folder:
        write(folder, range(1, 6))
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6')
    (tmp_path / "resumed" / "rollouts" / "notes.jsonl").write_text("of the user")
    with RunFolder(tmp_path / "resumed") as folder:
        folder.rewind(3)
        (folder.path / "rollouts" / "notes.jsonl").unlink()
        write(folder, range(4, 7))
    assert contents(tmp_path / "resumed") == contents(tmp_path / "uninterrupted")


def test_a_run_that_starts_from_the_beginning_moves_earlier_reports(folder):
    assert folder.rewind(0) is None
    folder.append_metrics(0, {"val/reward_score": 0.5})
    folder.write_rollouts(0, "validation", rollout_rows([group()]))
    write(folder, [1])
    moved = folder.rewind(0)
    assert moved == folder.path / "set_aside" / "report"
    assert folder.read_metrics() == []
    assert not (folder.path / "rollouts").exists()
    assert [line.step for line in read_metrics(moved)] == [0, 1]
    assert len(list((moved / "rollouts").iterdir())) == 2
    write(folder, [1])
    assert folder.rewind(0) == folder.path / "set_aside" / "report.2"


def test_a_rollout_is_written_with_prompt_score_and_ground_truth(folder):
    path = folder.write_rollouts(12, "train", rollout_rows([group()]))
    assert path == folder.path / "rollouts" / "step_000012.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "prompt_id": "train:17",
        "sample": 0,
        "prompt": "<image> What is it?",
        "response": "<think>2</think>\\boxed{4}",
        "reward": 1.0,
        "parts": {"overall": 1.0},
        "outcome": "ok",
        "error": "",
        "finish_reason": "stop",
        "num_tokens": 2,
        "policy_version": 11,
        "policy_versions": [],
        "images": ["train:17/images/0 (a.png)"],
        "ground_truth": "4",
        "ground_truth_type": "str",
        "row": {},
        "filtered": "",
        "image_files": [],
        "advantage": None,
        "tokens": None,
        "num_prompt_tokens": 3,
        "turns": [],
        "image_sizes": [],
        "version": 5,
    }
    assert second["sample"] == 1


@pytest.mark.parametrize(
    "text", ["two\nlines\r\n\u2028 \x85 \x1b[31m \x00", "答案 🙂 half a pair \ud83d", "x" * 1_000_000]
)
def test_any_text_stays_on_one_line_and_is_read_back_unchanged(folder, text):
    path = folder.write_rollouts(1, "train", rollout_rows([group(text)]))
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 3
    assert json.loads(lines[0])["response"] == text


def test_rows_and_ground_truths_of_any_type_are_valid_json(folder):
    made = group(
        ground_truth={"choices": (1, float("nan")), "set": {1}, "day": datetime.date(2026, 1, 2)},
        parts={"accuracy": float("inf")},
        overall=math.nan,
    )
    row = {"level": 3, "extra": {"source": "book"}, "sound": {"bytes": b"x" * 1000}}
    made = replace(made, prompt=replace(made.prompt, row=row))
    record = json.loads(folder.write_rollouts(1, "train", rollout_rows([made])).read_text().splitlines()[0])
    assert record["row"] == {"level": 3, "extra": {"source": "book"}, "sound": {"bytes": "1000 bytes"}}
    assert record["ground_truth"] == {"choices": [1, None], "set": "{1}", "day": "2026-01-02"}
    assert (record["ground_truth_type"], record["reward"], record["parts"]) == ("dict", None, {"accuracy": None})


def test_the_lock_of_a_killed_run_is_released(tmp_path):
    script = """
        import sys, time
        from pathlib import Path
        from trigon.report.run_folder import RunFolder
        folder = RunFolder(Path(sys.argv[1]))
        print("locked", flush=True)
        time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"process {other.pid} on "):
            RunFolder(tmp_path)
        other.send_signal(signal.SIGKILL)
        other.wait()
    RunFolder(tmp_path).close()


@pytest.mark.parametrize("change", ["renamed_host", "emptied", "overwritten", "copied_over_itself", "replaced"])
def test_a_run_does_not_depend_on_the_text_of_its_lock(tmp_path, monkeypatch, change):
    messages = []
    lock = tmp_path / "run" / "run.lock"
    with RunFolder(tmp_path / "run") as folder:
        log = RunWriter(folder, warn=messages.append)
        match change:
            case "renamed_host":
                monkeypatch.setattr("socket.gethostname", lambda: "another-name")
            case "emptied":
                lock.write_bytes(b"")
            case "overwritten":
                lock.write_bytes(b"\xff process 1 on another-name")
            case "copied_over_itself":  # by a file of the same text without a lock
                shutil.copy(lock, tmp_path / "copy")
                os.replace(tmp_path / "copy", lock)
            case "replaced":
                (tmp_path / "copy").write_text("process 1 on another-name\n")
                os.replace(tmp_path / "copy", lock)
        log.metrics(1, {"a": 1.0})
        log.metrics(2, {"a": 2.0})
        assert [line.step for line in folder.read_metrics()] == [1, 2]
        with pytest.raises(ConfigError, match="another run"):
            RunFolder(tmp_path / "run")
    is_new_file = change in ("copied_over_itself", "replaced")
    assert ["is locked again" in message for message in messages] == [True] * is_new_file


@pytest.mark.faults
def test_the_configurations_of_earlier_starts_are_kept_once(folder):
    for text in ("a: 1\n", "a: 1\n", "a: 2\n", "a: 1\n"):
        folder.record_start(text, {})
    earlier = folder.path / "earlier_configs"
    assert (folder.path / "config.yaml").read_text() == "a: 1\n"
    assert {path.name: path.read_text() for path in earlier.iterdir()} == {"001.yaml": "a: 1\n", "002.yaml": "a: 2\n"}
    # As if a start died between the copy and the replacement.
    (earlier / "003.yaml").write_text("a: 1\n")
    folder.record_start("a: 3\n", {})
    assert len(list(earlier.iterdir())) == 3


@pytest.mark.faults
def test_each_start_is_a_line_and_a_torn_one_is_removed(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.record_start("a: 1\n", {"after_step": 0, "notes": ["\udc80"]})
    with (tmp_path / "starts.jsonl").open("ab") as file:
        file.write(b'{"time": "2026-')
    with RunFolder(tmp_path) as folder:
        folder.record_start("a: 1\n", {"after_step": 7})
    first, second = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert (first["after_step"], second["after_step"]) == (0, 7)
    assert datetime.datetime.fromisoformat(second["time"]).tzinfo is not None


@pytest.mark.parametrize("name", ["\udcc3\udca9", "\u6570"])
def test_a_name_that_the_locale_cannot_encode_is_refused_with_the_remedy(tmp_path, monkeypatch, name):
    # "\udcc3\udca9" is how Python reads the bytes of an accented letter if LC_ALL=C is ASCII.
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    monkeypatch.setattr(os, "fsencode", lambda path: str(path).encode("ascii", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"run folder.*ascii; set PYTHONUTF8=1"):
        RunFolder(tmp_path / name)
    RunFolder(tmp_path / "plain").close()
