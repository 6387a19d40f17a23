"""`trigon completion`: the scripts complete in the shells themselves."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from trigon.config.options import options
from trigon.tools.cli.completion_scripts import script
from trigon.tools.cli.main import COMMANDS, main

ASK = r"""
source "$1"
COMP_LINE="$2"; COMP_POINT=${#2}
_trigon
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, Path]:
    """Return a file with the script of each shell."""
    folder = tmp_path_factory.mktemp("completion")
    names = {"bash": "trigon.bash", "zsh": "_trigon", "fish": "trigon.fish"}
    for shell, name in names.items():
        (folder / name).write_text(script(shell))
    return {shell: folder / name for shell, name in names.items()}


@pytest.fixture
def complete(scripts, tmp_path):
    """Return a function that completes a line in bash, in a folder with run.yaml and data/."""
    (tmp_path / "run.yaml").touch()
    (tmp_path / "data").mkdir()

    def ask(line: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", ASK, "bash", str(scripts["bash"]), line],
            capture_output=True, text=True, cwd=tmp_path, check=False,
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout.split()

    return ask


def test_commands_are_completed(complete):
    assert complete("trigon ") == [*COMMANDS, "help", "version"]
    assert complete("trigon qu") == ["quickstart"]
    assert complete("trigon help qu") == ["quickstart"]
    assert complete("trigon zz") == []


def test_parts_of_the_names_of_options_are_completed_one_at_a_time(complete):
    sections = ["worker.actor.", "worker.critic.", "worker.rollout.", "worker.ref.", "worker.reward."]
    assert complete("trigon train worker.") == ["worker.hybrid_engine=", *sections]
    expected = [f"{option.name}=" for option in options().values() if option.name.startswith("data.max_")]
    assert complete("trigon train run.yaml data.max_") == expected
    assert len(expected) > 3
    assert complete("trigon train d") == ["data."]
    assert complete("trigon quickstart trainer.max_st") == ["trainer.max_steps="]


def test_the_last_part_of_a_name_is_enough_where_only_one_option_has_it(complete):
    assert complete("trigon train gpu_memory_u") == ["worker.rollout.gpu_memory_utilization="]
    assert complete("trigon train lr_warmup_r") == []  # of the actor and of the critic
    assert complete("trigon train max_") == []


def test_values_of_choices_and_booleans_are_completed(complete):
    assert "grpo" in complete("trigon train algorithm.adv_estimator=")
    assert complete("trigon train algorithm.adv_estimator=dr") == ["dr_grpo"]
    assert complete("trigon train data.shuffle=") == ["true", "false"]
    assert complete("trigon train worker.actor.optim.lr=") == ["data", "run.yaml"]
    assert complete("trigon train data.train_files=ru") == ["run.yaml"]


def test_flags_their_values_and_files_are_completed(complete):
    assert complete("trigon train --pr") == ["--print-config"]
    assert complete("trigon plot --band ") == ["std", "minmax", "ci95"]
    assert complete("trigon plot runs/a --x t") == ["tokens"]
    assert complete("trigon export --output da") == ["data"]
    assert complete("trigon export ru") == ["run.yaml"]
    assert complete("trigon completion ") == ["bash", "zsh", "fish"]
    assert complete("trigon train ru") == ["run.yaml"]
    assert complete("trigon options worker.rollout.top_") == ["worker.rollout.top_p", "worker.rollout.top_k"]


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_its_flags_in_every_script(scripts, complete, command):
    flags = complete(f"trigon {command} -")
    assert {"-h", "--help"} <= set(flags)
    for shell in ("zsh", "fish"):
        assert re.search(rf"\b{command}\b", scripts[shell].read_text())


def test_completing_starts_no_python(scripts, tmp_path):
    done = subprocess.run(
        [shutil.which("bash"), "--norc", "-c", ASK, "bash", str(scripts["bash"]), "trigon train data.max_"],
        capture_output=True, text=True, env={"PATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "data.max_pixels=" in done.stdout


def typed(command: list[str], folder: Path, lines: list[str], keys: str, expected: str) -> str:
    """Return what a shell shows in a terminal after lines and keys, or after 20 s."""
    terminal, other_end = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(folder), "PS1": "$ "}
    process = subprocess.Popen(
        command,
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
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


def test_the_tab_key_completes_in_an_interactive_bash(scripts, tmp_path):
    shell = ["bash", "--norc", "--noprofile", "-i"]
    lines = [f"source {scripts['bash']}", "touch run.yaml"]
    for keys, expected in [
        (
            "trigon train data.max_prom\t256 alg\tadv\tdr\t",
            "data.max_prompt_length=256 algorithm.adv_estimator=dr_grpo ",
        ),
        ("trigon train run\t", "trigon train run.yaml "),
    ]:
        assert expected in typed(shell, tmp_path, lines, keys, expected)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_the_tab_key_completes_in_an_interactive_zsh(scripts, tmp_path):
    lines = [f"fpath+=({scripts['zsh'].parent})", "autoload -Uz compinit; compinit -u -D"]
    for keys, expected in [
        ("trigon train data.max_prom\t", "data.max_prompt_length="),
        ("trigon train algorithm.adv_estimator=dr\t", "algorithm.adv_estimator=dr_grpo"),
        ("trigon quicks\t", "trigon quickstart"),
        ("trigon plot --ban\tci\t", "ci95 "),
    ]:
        assert expected in typed(["zsh", "-f", "-i"], tmp_path, lines, keys, expected)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trigon quicks", "quickstart"),
        ("trigon train data.max_prom", "data.max_prompt_length="),
        ("trigon train algorithm.adv_estimator=dr", "algorithm.adv_estimator=dr_grpo"),
        ("trigon train --pri", "--print-config"),
        ("trigon plot --band ci", "ci95"),
        ("trigon help plo", "plot"),
    ],
)
def test_fish_completes(scripts, tmp_path, line, expected):
    command = f"source {scripts['fish']}; complete -C {line!r}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", command], capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )  # fmt: skip
    assert expected in [word.partition("\t")[0] for word in done.stdout.splitlines()]


def test_the_command_prints_the_script(capsys):
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == script("bash")


def test_the_scripts_are_valid(scripts):
    subprocess.run(["bash", "-n", scripts["bash"]], check=True)
    for shell, argument in (("zsh", "-n"), ("fish", "--no-execute")):
        if shutil.which(shell):
            subprocess.run([shell, argument, scripts[shell]], check=True)
    assert not any("@" in line for line in scripts["bash"].read_text().splitlines() if re.search(r"@[A-Z_]+@", line))
