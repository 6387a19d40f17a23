"""Suggestions of the nearest known name."""

from trigon.system.suggestions import did_you_mean, nearest, nearest_key

LOSSES = ("default", "gspo", "gspo_token", "cispo", "sapo")


def test_the_most_similar_name_is_suggested():
    assert nearest("csipo", LOSSES) == "cispo"
    assert nearest("gspo-token", LOSSES) == "gspo_token"
    assert nearest("something else", LOSSES) is None


def test_a_name_that_starts_with_a_known_one_suggests_it():
    assert nearest("sequence", ("token", "seq", "seq_fixed")) == "seq"
    assert nearest("abc", ("",)) is None


def test_a_higher_cutoff_suggests_less():
    assert nearest("problems", ["prob"], cutoff=0.6) == "prob"
    assert nearest("xproblems", ["prob"], cutoff=0.9) is None


def test_a_hint_is_empty_without_a_similar_name():
    assert did_you_mean("csipo", LOSSES) == "; did you mean cispo?"
    assert did_you_mean("something else", LOSSES) == ""


def test_a_key_is_compared_by_its_full_name_and_its_last_part():
    keys = ("data.seed", "worker.rollout.seed", "worker.actor.optim.lr")
    assert nearest_key("lr", keys) == "worker.actor.optim.lr"
    assert nearest_key("rollout.seed", keys) == "worker.rollout.seed"
