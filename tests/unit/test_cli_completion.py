"""`trigon completion`: the shells complete commands, flags, options and values."""

from __future__ import annotations

import os
import subprocess
import sys
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


COMPLETE = """
source trigon.bash
compopt() { :; }  # bash has it while a key is pressed only
COMP_LINE=$1 COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMP_WORDS=($COMP_LINE)
_python_argcomplete trigon
printf '%s\\n' "${COMPREPLY[@]}"
complete -p trigon
"""


@pytest.mark.extended
@pytest.mark.skipif(not Path(sys.executable).with_name("trigon").exists(), reason="the command is not installed")
def test_bash_completes_with_the_script_that_is_printed(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "trigon.bash").write_text(capsys.readouterr().out)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    command = ["bash", "--norc", "-c", COMPLETE, "bash", "trigon train data.max_prom"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    completed, registered = done.stdout.splitlines()
    assert completed == "data.max_prompt_length="
    assert registered.endswith("-F _python_argcomplete trigon")
