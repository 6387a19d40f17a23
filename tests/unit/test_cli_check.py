"""The commands `trigon check` and `trigon init`: output, exit status, and what they write."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from support.planted import FAULTS, good_run
from trigon.config.load import load_config
from trigon.tools.check.run import Problem, Result, console_lines
from trigon.tools.cli.main import main


@pytest.fixture(autouse=True)
def _own_cache(own_datasets_cache):
    """Do not fill the cache that other tests share."""


@pytest.fixture
def run(tmp_path, tiny_vlm):
    return good_run(tmp_path, tiny_vlm)


def test_a_run_that_would_fail_has_exit_status_1_and_says_what_to_do(run, capsys):
    FAULTS["a missing image"][1](run)
    assert main(["check", *run.write()]) == 1
    out, _ = capsys.readouterr()
    (failed,) = [part for part in out.split("\n") if part.startswith("FAIL")]
    assert failed.startswith("FAIL      rows ")
    assert "1 of 40 rows (2.5 %) cannot be used (image_missing)" in " ".join(out.split())
    assert "-> correct the paths, or set data.image_dir" in " ".join(out.split())
    assert out.splitlines()[-1].endswith(": the run would fail")


def test_the_report_as_json(run, capsys):
    FAULTS["a row twice"][1](run)
    assert main(["check", *run.write(), "--json"]) == 0
    out, _ = capsys.readouterr()
    report = json.loads(out)
    assert report["would_fail"] is False
    (check,) = [each for each in report["checks"] if each["status"] == "warning"]
    assert check["name"] == "duplicates"
    (problem,) = check["problems"]
    assert problem["kind"] == "duplicates.prompt"
    assert problem["examples"] == ["train:4 = train:5"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "no run is given"),
        (["nowhere.yaml"], "there is no file nowhere.yaml"),
        (["run"], "cannot read the argument"),
    ],
)
def test_wrong_usage_has_exit_status_2(arguments, part, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert part in err


def test_control_characters_are_shown_as_text():
    problem = Problem("rows.prompt", "a\x1b[2J row", examples=("b\u202e",))
    text = console_lines(Result("rows", problems=[problem], text="c\x9b31m"))
    assert not set("\x1b\x9b\u202e") & set(text)
    assert r"a\x1b[2J row" in text


def test_init_writes_a_run_and_says_the_next_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my run"]) == 0
    out = capsys.readouterr().out
    commands = [line.strip() for line in out.splitlines() if line.startswith("  ")]
    assert commands == ["cd 'my run'", "trigon check run.yaml", "python reward.py", "trigon train run.yaml"]
    folder = tmp_path / "my run"
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    for row in rows:
        assert "<image>" in row["problem"]
        with Image.open(folder / row["images"][0]) as image:
            assert image.format == "PNG"
    assert sorted(path.name for path in folder.iterdir()) == ["data.jsonl", "images", "reward.py", "run.yaml"]
    monkeypatch.chdir(folder)
    loaded = load_config(Path("run.yaml"), ())
    assert loaded.warnings == ()
    assert loaded.config.worker.actor.model.model_path == "Qwen/Qwen2.5-VL-3B-Instruct"


@pytest.mark.extended
@pytest.mark.parametrize("command", [["reward.py"], ["-m", "pytest", "-q", "-p", "no:cacheprovider", "reward.py"]])
def test_the_reward_function_that_init_writes_passes_its_test(tmp_path, command):
    assert main(["init", str(tmp_path)]) == 0
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, capture_output=True, timeout=100)
    (tmp_path / "reward.py").write_text(
        (tmp_path / "reward.py").read_text().replace("0.9 * is_right", "0.8 * is_right")
    )
    broken = subprocess.run([sys.executable, *command], cwd=tmp_path, check=False, capture_output=True, timeout=100)
    assert broken.returncode == 1


@pytest.mark.parametrize("typed", ["./models/m", "models/link", "owner/a model: with #signs"])
def test_init_writes_a_model_so_that_the_run_finds_it_in_its_folder(tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to("m")
    assert main(["init", "my_run", "--model", typed]) == 0
    monkeypatch.chdir(tmp_path / "my_run")
    path = load_config(Path("run.yaml"), ()).config.worker.actor.model.model_path
    if typed.startswith("owner/"):
        assert path == typed
    else:
        assert Path(path).is_absolute()
        assert Path(path).samefile(tmp_path / "models" / "m")


def test_init_with_the_path_of_no_model_is_an_error_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert main(["init", "my_run", "--model", "./models/mien"]) in (1, 2)
    assert "there is no model at ./models/mien; did you mean models/mine?" in capsys.readouterr().err
    assert not (tmp_path / "my_run").exists()


@pytest.mark.parametrize("name", ["run.yaml", "images/3.png"])
def test_init_overwrites_nothing(tmp_path, name, capsys):
    (tmp_path / "images").mkdir()
    (tmp_path / name).write_text("mine")
    assert main(["init", str(tmp_path)]) in (1, 2)
    assert f"has {name} already" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "mine"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [Path(name).name]


def test_what_init_writes_passes_the_checks(tmp_path, tiny_vlm, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--model", str(tiny_vlm)]) == 0
    capsys.readouterr()
    options = ["worker.rollout.name=transformers", "trainer.device=cpu", "worker.actor.fsdp.mp_param_dtype=fp32"]
    assert main(["check", "run.yaml", *options]) == 0
    out = capsys.readouterr().out
    assert " 0 with warnings, 0 failed" in out, out
    lines = out.splitlines()
    assert lines[0].startswith("pass      configuration ")
    assert lines[-1].endswith(": the run can start")
    assert re.search(r"<\|vision_start\|><\|image_pad\|> x \d+<\|vision_end\|>Find the area", out)
    assert "<|im_start|>assistant" in out
