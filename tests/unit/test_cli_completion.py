"""`trigon completion`: the shells complete commands, flags, options and values."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trigon.config.options import options
from trigon.tools.cli.completion import complete_option
from trigon.tools.cli.main import COMMANDS, main


@pytest.fixture
def complete(tmp_path):
    """Return a function that completes a line as bash asks for it, beside run.yaml and data/."""
    (tmp_path / "run.yaml").touch()
    (tmp_path / "data").mkdir()

    def ask(line: str) -> list[str]:
        request = {
            "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SHELL": "bash",
            "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
            "COMP_LINE": line, "COMP_POINT": str(len(line)), "PYTHONPATH": str(tmp_path),
        }  # fmt: skip
        command = [sys.executable, "-m", "trigon"]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **request}, check=True, timeout=60)
        return (tmp_path / "answer").read_text().split()

    return ask


@pytest.mark.extended
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trigon ", [*COMMANDS, "help", "version"]),
        ("trigon qu", ["quickstart"]),
        ("trigon train d", [f"{option.name}=" for option in options().values() if option.name.startswith("data.")]),
        ("trigon train run.yaml --print-config gpu_memory_u", ["worker.rollout.gpu_memory_utilization="]),
        ("trigon quickstart lr=3 --seed 1 trainer.max_st", ["trainer.max_steps="]),
        ("trigon train algorithm.adv_estimator=dr", ["algorithm.adv_estimator=dr_grpo"]),
        ("trigon train ru", ["run.yaml"]),
        ("trigon train data.train_files=ru", ["data.train_files=run.yaml"]),
        ("trigon plot --band ", ["std", "minmax", "ci95"]),
        ("trigon export --output d", ["data/"]),
        ("trigon options worker.rollout.top_", ["worker.rollout.top_p", "worker.rollout.top_k"]),
    ],
)
def test_a_line_is_completed(complete, line, expected):
    assert complete(line) == expected


def test_parts_of_the_names_of_options_are_completed_one_at_a_time():
    sections = ["worker.actor.", "worker.critic.", "worker.rollout.", "worker.ref.", "worker.reward."]
    assert complete_option("worker.") == ["worker.hybrid_engine=", *sections]
    assert complete_option("lr_warmup_r") == []  # of the actor and of the critic
    assert complete_option("data.shuffle=") == ["data.shuffle=true", "data.shuffle=false"]


def test_completing_imports_no_heavy_library(complete, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules |= dict.fromkeys(['torch', 'ray'])\n")
    assert complete("trigon doctor --h") == ["--help"]
    assert complete("trigon train data.max_pi") == ["data.max_pixels="]


def typed(folder: Path, lines: list[str], keys: str, expected: str) -> str:
    """Return what an interactive bash shows after lines and keys, or after 20 s."""
    terminal, other_end = pty.openpty()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=other_end, stdout=other_end, stderr=other_end, cwd=folder,
        env={"PATH": path, "TERM": "dumb", "HOME": str(folder), "PS1": "$ "}, start_new_session=True,
    )  # fmt: skip
    os.close(other_end)
    shown = ""

    def wait_for(text: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + 20
        while text not in re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\x07", "", shown) and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")

    try:
        for line in [*lines, "echo READ''Y"]:
            os.write(terminal, f"{line}\n".encode())
        wait_for("READY")
        os.write(terminal, keys.encode())
        wait_for(expected)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\x07", "", shown)


@pytest.mark.extended
@pytest.mark.skipif(not Path(sys.executable).with_name("trigon").exists(), reason="the command is not installed")
def test_the_tab_key_completes_in_an_interactive_bash(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "trigon.bash").write_text(capsys.readouterr().out)
    lines = [f"source {tmp_path / 'trigon.bash'}", "touch run.yaml"]
    for keys, expected in [
        (
            "trigon train data.max_prom\t256 alg\tadv\tdr\t",
            "data.max_prompt_length=256 algorithm.adv_estimator=dr_grpo ",
        ),
        ("trigon train run\t", "trigon train run.yaml "),
    ]:
        assert expected in typed(tmp_path, lines, keys, expected)
