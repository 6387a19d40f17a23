"""Suggestions of the nearest known name."""

import pytest

from trigon.system.terminal import did_you_mean, nearest, nearest_key

LOSSES = ("default", "gspo", "gspo_token", "cispo", "sapo")


@pytest.mark.parametrize(
    ("name", "known", "cutoff", "expected"),
    [
        ("csipo", LOSSES, None, "cispo"),
        ("gspo-token", LOSSES, None, "gspo_token"),
        ("something else", LOSSES, None, None),
        ("sequence", ("token", "seq", "seq_fixed"), None, "seq"),  # it starts with a known one
        ("abc", ("",), None, None),
        ("problems", ["prob"], 0.6, "prob"),
        ("xproblems", ["prob"], 0.9, None),
    ],
)
def test_the_most_similar_name_is_suggested_if_it_is_similar_enough(name, known, cutoff, expected):
    assert nearest(name, known, **({} if cutoff is None else {"cutoff": cutoff})) == expected


def test_a_hint_is_empty_without_a_similar_name():
    assert did_you_mean("csipo", LOSSES) == "; did you mean cispo?"
    assert did_you_mean("something else", LOSSES) == ""


def test_a_key_is_compared_by_its_full_name_and_its_last_part():
    keys = ("data.seed", "worker.rollout.seed", "worker.actor.optim.lr")
    assert nearest_key("lr", keys) == "worker.actor.optim.lr"
    assert nearest_key("rollout.seed", keys) == "worker.rollout.seed"
