"""The train-inference mismatch: metrics and correction weights by hand."""

from __future__ import annotations

import math

import pytest
import torch

from trigon.algorithms.losses import correction_weights, mismatch_metrics
from trigon.algorithms.unread import UnreadMetrics, read_metrics
from trigon.config.schema import AlgorithmConfig
from trigon.metrics import Metric

HALF, QUARTER = math.log(0.5), math.log(0.25)


def read(*batches: UnreadMetrics) -> dict[str, Metric]:
    return read_metrics(batches)[0]


def test_mismatch_by_hand():
    metrics = read(
        mismatch_metrics(
            torch.tensor([HALF, HALF, HALF]), torch.tensor([HALF, QUARTER, 0.0]), trainable=torch.tensor([0, 1])
        )
    )
    assert metrics["mismatch/probs_diff_mean"].value == pytest.approx(0.125)
    assert metrics["mismatch/probs_diff_max"].value == pytest.approx(0.25)
    assert metrics["mismatch/logprobs_diff_mean"].value == pytest.approx(math.log(2) / 2)
    assert metrics["mismatch/k3"].value == pytest.approx((0.5 + math.log(2) - 1.0) / 2)
    assert metrics["mismatch/weight_mean"].value == pytest.approx(0.75)
    assert metrics["mismatch/weight_max"].value == pytest.approx(1.0)
    # (1 + 1/2)^2 / (2 (1 + 1/4))
    assert metrics["mismatch/effective_share"].value == pytest.approx(0.9)
    assert mismatch_metrics(torch.zeros(2), torch.zeros(2), torch.tensor([], dtype=torch.int64)) == {}


def test_metrics_of_two_halves_merge_to_those_of_the_batch():
    engine, trainer = torch.tensor([-1.0, -2.0, -0.5, -3.0]), torch.tensor([-1.5, -1.0, -0.4, -3.3])
    full = read(mismatch_metrics(engine, trainer, torch.arange(4)))
    halves = read(*(mismatch_metrics(engine[s], trainer[s], torch.arange(2)) for s in (slice(2), slice(2, 4))))
    for key, metric in full.items():
        assert halves[key].value == pytest.approx(metric.value), key


def weights(ratios, kind, level, *, low=0.5, high=2.0, lengths=None, mask=None):
    lengths = [len(ratios)] if lengths is None else lengths
    found, bounded = correction_weights(
        torch.tensor([math.log(ratio) - 1.0 for ratio in ratios]),
        torch.full((len(ratios),), -1.0),
        kind,
        AlgorithmConfig(mismatch_level=level, mismatch_low=low, mismatch_high=high),
        loss_mask=torch.ones(len(ratios)) if mask is None else torch.tensor(mask),
        sequence_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        num_sequences=len(lengths),
    )
    return pytest.approx(found.tolist(), abs=1e-6), bounded.tolist()


TOKENS = [0.4, 1.0, 1.5, 3.0]
SEQUENCES = [1.0, 4.0, 9.0, 1.0]  # geometric means sqrt(1 x 4) = 2 and sqrt(9 x 1) = 3


@pytest.mark.parametrize(
    ("kind", "level", "ratios", "expected", "bounded"),
    [
        ("truncate", "token", TOKENS, [0.4, 1.0, 1.5, 2.5], [0.0, 0.0, 0.0, 1.0]),
        ("mask", "token", TOKENS, [0.0, 1.0, 1.5, 0.0], [1.0, 0.0, 0.0, 1.0]),
        ("reject", "token", [1.0, 3.0, 1.5, 0.7], [0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]),
        ("truncate", "sequence", SEQUENCES, [2.0, 2.0, 2.5, 2.5], [0.0, 0.0, 1.0, 1.0]),
        ("mask", "sequence", SEQUENCES, [2.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]),
        ("reject", "sequence", SEQUENCES, [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_correction_weights_by_hand(kind, level, ratios, expected, bounded):
    assert weights(ratios, kind, level, high=2.5, lengths=[2, 2]) == (expected, bounded)


@pytest.mark.parametrize("kind", ["truncate", "mask", "reject"])
def test_the_weight_of_a_sequence_does_not_depend_on_its_length(kind):
    short, long = weights([1.05], kind, "sequence"), weights([1.05] * 500, kind, "sequence")
    assert long[0] == [short[0].expected[0]] * 500
    assert long[1] == [0.0] * 500


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_tokens_do_not_affect_their_sequence(level):
    assert weights([1.0, 50.0], "reject", level, mask=[1.0, 0.0])[0] == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["truncate", "mask", "reject"])
def test_a_sequence_does_not_depend_on_others_in_the_batch(kind):
    for level in ("token", "sequence"):
        together = weights([0.3, 1.2, 2.5, 1.0], kind, level, lengths=[2, 2])
        apart = [weights(part, kind, level) for part in ([0.3, 1.2], [2.5, 1.0])]
        assert together[0] == [*apart[0][0].expected, *apart[1][0].expected]
        assert together[1] == [*apart[0][1], *apart[1][1]]
