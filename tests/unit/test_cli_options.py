"""`trigon options`, and the options that the help of `trigon train` names."""

import re

import pytest

from trigon.config.legacy import RENAMED
from trigon.config.options import descriptions, options
from trigon.tools.cli.main import main
from trigon.tools.cli.train import HELP

NAMES = [option.name for option in options().values()]


def run(capsys, *arguments):
    """Return the exit status of the command, and what it prints to each stream."""
    status = main(["options", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def printed_names(out):
    return re.findall(r"^([a-z_0-9.]+)=", out, re.MULTILINE)


def test_without_patterns_every_option_is_printed_with_its_default(capsys):
    status, out, _ = run(capsys)
    assert status == 0
    assert printed_names(out) == NAMES
    assert "worker.actor.optim.lr=1e-06\n" in out
    assert "trainer.logger=[" in out


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["optim.lr"], [name for name in NAMES if "optim.lr" in name]),
        (["trainer.val_*"], [name for name in NAMES if name.startswith("trainer.val_")]),
        (["max_num_seqs", "data.max_pixels"], ["data.max_pixels", "worker.rollout.max_num_seqs"]),
        (["--trainer.max_steps=3"], ["trainer.max_steps"]),
    ],
)
def test_patterns_select_options_in_the_order_of_the_schema(capsys, patterns, expected):
    status, out, _ = run(capsys, "--", *patterns)
    assert (status, printed_names(out)) == (0, expected)


def test_an_older_name_gives_the_present_one(capsys):
    old, new = next(iter(RENAMED.items()))
    status, out, _ = run(capsys, old)
    assert status == 0
    assert new in printed_names(out)
    assert old in out


def test_an_option_is_explained_with_the_defaults_of_both_devices(capsys):
    status, out, _ = run(capsys, "worker.rollout.max_num_seqs")
    assert status == 0
    assert out.startswith(
        "worker.rollout.max_num_seqs=null (by device: 128, on a GPU 1024)\n    an integer, at least 1"
    )
    text = " ".join(out.split())
    assert descriptions()["worker", "rollout", "max_num_seqs"] in text
    assert max(map(len, out.splitlines())) <= 100


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name(capsys):
    status, out, err = run(capsys, "temperatur_")
    assert (status, out) == (2, "")
    assert "no option matches 'temperatur_'; did you mean worker.rollout.temperature?" in err


def test_the_options_that_the_help_of_train_names_exist():
    named = re.findall(r"\b(?:worker|data|algorithm|trainer)\.[a-z_.]*[a-z_]", HELP)
    assert len(named) >= 20
    assert set(named) <= set(NAMES)
