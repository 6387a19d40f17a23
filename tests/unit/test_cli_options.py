"""`trigon options`, and the options that the help of `trigon train` names."""

import re

import pytest

from trigon.config.legacy import RENAMED
from trigon.config.options import options
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
        ([next(iter(RENAMED))], [next(iter(RENAMED.values()))]),  # an older name
        (["total_episodes"], ["trainer.total_epochs"]),  # the end of one
        (["optim.lr"], [name for name in NAMES if "optim.lr" in name]),
        (["trainer.val_*"], [name for name in NAMES if name.startswith("trainer.val_")]),
        (["max_num_seqs", "data.max_pixels"], ["data.max_pixels", "worker.rollout.max_num_seqs"]),
        (["--trainer.max_steps=3"], ["trainer.max_steps"]),
        (["num_generations"], ["worker.rollout.n"]),  # another library's name
        (["grpo"], ["algorithm.adv_estimator"]),  # a value
        (["wandb"], ["trainer.logger"]),  # an item of one
    ],
)
def test_patterns_select_options_in_the_order_of_the_schema(capsys, patterns, expected):
    status, out, _ = run(capsys, "--", *patterns)
    assert (status, printed_names(out)) == (0, expected)


def test_a_key_of_easyr1_without_effect_is_shown_with_the_reason(capsys):
    status, out, err = run(capsys, "padding_free", "worker.ref.ulysses_size", "total_epochs")
    assert (status, err) == (0, "")
    assert printed_names(out) == ["trainer.total_epochs"]
    shown = re.findall(r"^([a-z_.]+) has no effect\n    \w", out, re.MULTILINE)
    assert shown == [
        "worker.actor.padding_free",
        "worker.critic.padding_free",
        "worker.ref.padding_free",
        "worker.ref.ulysses_size",
    ]


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name(capsys):
    status, out, err = run(capsys, "temperatur_")
    assert (status, out) == (2, "")
    assert "no option matches 'temperatur_'; did you mean worker.rollout.temperature?" in err


def test_the_options_that_the_help_of_train_names_exist():
    named = re.findall(r"\b(?:worker|data|algorithm|trainer)\.[a-z_.]*[a-z_]", HELP)
    assert len(named) >= 20
    assert set(named) <= set(NAMES)
