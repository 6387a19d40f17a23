"""`trigon view` as a command: what it refuses, what it prints, how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from support.view_runs import make_row, write_run
from trigon.report.run_folder import RunFolder
from trigon.tools.cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", num_steps=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: RUN"),
        (["--host", "0.0.0.0"], "would show the runs to other machines; add --open-to-network"),
        (["--export", "a.html", "--select", "solvd=all"], "there is no filter 'solvd'; did you mean solved?"),
    ],
)
def test_wrong_usage_is_one_line(run, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(["view", *arguments, *([str(run), "--cache", str(tmp_path / "cache")] if arguments else [])])
    assert stop.value.code == 2
    [*_, line] = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_a_folder_without_a_run_fails(tmp_path, capsys):
    assert main(["view", str(tmp_path / "missing"), "--cache", str(tmp_path / "cache")]) == 1
    assert "there is no run at" in capsys.readouterr().err


def test_an_export_says_what_it_wrote(run, tmp_path, capsys):
    arguments = ["--export", str(tmp_path / "run.html"), "--rollouts", "4", "--select", "solved=some"]
    assert main(["view", str(run), "--cache", str(tmp_path / "cache"), *arguments]) == 0
    assert "4 of 4 rollouts, 1 image\n" in capsys.readouterr().out
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert text.count('.png": "data:image/png;base64,') == 1
    assert "https://" not in text.split("<script>")[0]


def test_an_export_of_several_runs_has_a_group_of_each_and_names_what_cannot_be_read(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", num_steps=2)
    (other / "metrics.jsonl").write_text("no metrics\n")
    (other / "config.yaml").write_text("a: [")
    arguments = ["--export", str(tmp_path / "new" / "both.html"), "--rollouts", "1", "--cache", str(tmp_path / "cache")]
    assert main(["view", str(run), str(other), *arguments]) == 0
    out, err = capsys.readouterr()
    assert "8 of 36 rollouts" in out
    assert "warning: other: metrics.jsonl has a line without the metrics of a step" in err
    assert "warning: other: config.yaml is not valid YAML" in err
    assert str(tmp_path) not in err
    text = (tmp_path / "new" / "both.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in text


def test_an_export_has_as_many_rollouts_as_asked_for_whatever_the_sizes_of_groups(run, tmp_path, capsys):
    with RunFolder(run) as folder:
        folder.write_rollouts(1, "validation", [make_row(f"val:{number}", 0, 1.0) for number in range(40)])
    arguments = ["--export", str(tmp_path / "run.html"), "--rollouts", "26", "--cache", str(tmp_path / "cache")]
    assert main(["view", str(run), *arguments]) == 0
    num_exported = int(re.search(r"(\d+) of 52 rollouts", capsys.readouterr().out)[1])  # 12 of them in groups of 4
    assert 22 <= num_exported <= 26


def test_the_command_serves_until_ctrl_c(run, tmp_path):
    command = [sys.executable, "-m", "trigon", "view", run, "--port", "0", "--no-browser", "--cache", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("trigon view: ")
        url = process.stdout.readline().split()[0]
        with urlopen(f"{url}api/state", timeout=60) as answer:
            assert json.load(answer)["runs"][0]["last_step"] == 1
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
