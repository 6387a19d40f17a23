"""All commands have one style of help, and answer wrong arguments in the same way."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trigon.tools.cli.main import COMMANDS, find_command, main
from trigon.tools.cli.parser import MAX_COLUMNS, ArgumentParser, new_folder, parser_of

COMMAND_NAMES = list(COMMANDS)
HEAVY = ("torch", "vllm", "transformers", "datasets", "numpy", "pandas", "pyarrow", "matplotlib", "ray")


def parser(command: str) -> ArgumentParser:
    return parser_of(find_command(command))


def takes_options() -> list[str]:
    return [command for command in COMMANDS if parser(command).takes_options]


def required(command: str) -> list[str]:
    """Return arguments that the command does not run without, "x" for each positional one."""
    found = parser(command)
    needed = [
        argument
        for action in found._actions
        if action.required and action.nargs not in ("*", "?")
        for argument in (*action.option_strings[:1], *([next(iter(action.choices))] if action.choices else ["x"]))
    ]
    return needed + ["x" for group in found._mutually_exclusive_groups if group.required]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Return the exit status of the command, and what it prints to each stream."""
    try:
        status = main(list(arguments))
    except SystemExit as system_exit:  # argparse exits so
        status = system_exit.code
    return (status, *capsys.readouterr())


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_a_help_page_has_usage_arguments_and_examples_in_100_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "250")
    status, out, err = run(capsys, command, "--help")
    assert (status, err) == (0, "")
    assert run(capsys, "help", command) == (0, out, "")
    assert out.startswith(f"usage: trigon {command} ")
    assert [line for line in out.splitlines() if len(line) > MAX_COLUMNS] == []
    _, _, examples = out.partition("\nexamples:\n")
    assert re.findall(rf"^  trigon {command}\b", examples, flags=re.MULTILINE) != [], "a command has an example"
    for action in parser(command)._actions:
        assert action.help, f"trigon {command}: {action.dest} has no help"


def test_help_pages_import_no_heavy_library():
    script = f"""
import sys
from trigon.tools.cli.main import COMMANDS, find_command
from trigon.tools.cli.parser import parser_of
for command in COMMANDS:
    parser_of(find_command(command)).format_help()
    print(command, *(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == COMMAND_NAMES, "a command is followed by what its help has loaded"


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_an_unknown_flag_is_one_line_with_status_2_and_a_misspelt_one_is_corrected(capsys, command):
    status, out, err = run(capsys, command, "--qqqqqq")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"trigon {command}: error: ")
    longest = max(parser(command).flags, key=len)
    status, _, err = run(capsys, command, *required(command), f"{longest[:-1]}q")
    assert status == 2
    assert f"{longest[:-1]}q; did you mean {longest}?" in err


def test_dashes_and_underscores_of_a_flag_are_taken_for_each_other(capsys):
    _, _, err = run(capsys, "export", "--local-dir", "x")
    assert "unknown flag --local-dir; did you mean --local_dir?" in err
    assert "unknown flag --zzz (" in run(capsys, "export", "x", "--zzz")[2]
    assert "did you mean --seed?" in run(capsys, "quickstart", "--see", "3")[2]  # flags cannot be abbreviated


@pytest.mark.parametrize("command", [command for command in COMMANDS if required(command)])
def test_a_missing_argument_is_one_line_with_status_2(capsys, command):
    status, out, err = run(capsys, command)
    assert (status, out) == (2, "")
    assert err.startswith(f"trigon {command}: error: ")
    assert "required" in err
    assert err.count("\n") == 1


FLAGS = [
    (command, action.option_strings[-1], "nonsense")
    for command in COMMANDS
    for action in parser(command)._actions
    if action.option_strings and (action.type not in (None, Path, new_folder) or action.choices)
]
"""Every flag that takes a number, one of a few values, or a text of another form."""


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        *FLAGS,
        *[("tiny", "--skill", "nan"), ("tiny", "--skill", "2"), ("tiny", "--max-updates", "-1")],
        *[("score", "--kwargs", "[]"), ("score", "--timeout", "0"), ("score", "--max-memory-gb", "0.5")],
        *[("plot", "--smooth", "0"), ("plot", "--reference", "nan:x"), ("plot", "--output", "a.gif")],
        *[("plan", "--rows", "0"), ("plan", "--keep-rate", "1.5"), ("eval", "-n", "0")],
        *[("view", "--port", "70000"), ("view", "--rollouts", "-1")],
    ],
)
def test_a_bad_value_of_a_flag_is_one_line_with_status_2(capsys, command, flag, value):
    status, out, err = run(capsys, command, *required(command), flag, value)
    assert (status, out) == (2, "")
    assert f"argument {flag}" in err or f"/{flag}" in err
    assert value in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", takes_options())
@pytest.mark.parametrize("arguments", [["--max-steps=3"], ["-trainer.max_steps", "3"]])
def test_an_option_with_dashes_is_answered_with_how_it_is_written(capsys, command, arguments):
    status, out, err = run(capsys, command, *required(command), *arguments)
    assert (status, out) == (2, "")
    assert "options have no dashes, and an equals sign; write trainer.max_steps=3 (" in err


@pytest.mark.parametrize("command", [command for command in takes_options() if "--config" not in parser(command).flags])
def test_a_file_as_a_flag_is_answered_with_how_it_is_given(capsys, command):
    status, _, err = run(capsys, command, "--config", "run.yaml")
    assert status == 2
    assert "write config=run.yaml" in err or "a configuration of its own" in err


@pytest.mark.parametrize("command", takes_options())
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_stepz=3", "did you mean trainer.max_steps?"),
        ("trainer.max_steps=many", "trainer.max_steps is 'many' (command line), but must be"),
        ("trainer", "cannot read the argument 'trainer'"),
    ],
)
def test_a_wrong_option_has_status_2_with_a_hint(capsys, command, override, message):
    if "=" not in override and required(command):
        pytest.skip(f"trigon {command} has other arguments without an equals sign")
    # trigon check reports what is wrong in a configuration, as its result.
    status, out, err = run(capsys, command, *required(command) * 2, override)
    assert status == (1 if command == "check" and "=" in override else 2)
    assert message in out + err


@pytest.mark.parametrize(
    "arguments",
    [
        ("init", "file"),
        ("init", "file/run", "--tiny"),
        ("tiny", "file"),
        ("quickstart", "--folder", "file/quick"),
        ("plot", "file"),
        ("view", "file"),
        ("push", "file", "me/model"),
        ("eval", "file", "data.jsonl", "--reward", "math"),
    ],
    ids=" ".join,
)
def test_a_file_in_place_of_a_folder_is_one_line(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    status, _, err = run(capsys, *arguments)
    assert status in (1, 2)
    assert "file is a file" in err
    assert len(err.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "text"


def test_a_file_of_a_run_is_answered_with_the_folder(capsys, tmp_path):
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    for name in ("metrics.jsonl", "rollouts/step_000001.jsonl"):
        (tmp_path / "run" / name).write_text("")
        status, _, err = run(capsys, "plot", str(tmp_path / "run" / name), "-o", str(tmp_path / "curves.csv"))
        assert (status, f"name the folder of the run, {tmp_path / 'run'}" in err) == (1, True)


@pytest.mark.parametrize("name", ["model/weights", "data/train.parquet"])
def test_a_tiny_model_overwrites_nothing(capsys, tmp_path, name):
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("mine")
    status, _, err = run(capsys, "tiny", str(tmp_path), "--skill", "0")
    assert (status, "nothing is overwritten" in err) == (2, True)
    assert (tmp_path / name).read_text() == "mine"
