"""Loss averaging: values by hand, and independence of micro-batching."""

import itertools

import pytest
import torch

from trigon.algorithms.reduce import Denominators, count_denominators, reduce_loss, sequence_means

SIX_IN_TWO = Denominators(tokens=6, sequences=2)
NOTHING = Denominators(tokens=0, sequences=0)
PER_TOKEN = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
SEQUENCES = torch.tensor([0, 0, 0, 0, 1, 1])


def test_token_averaging_by_hand():
    loss = reduce_loss(
        PER_TOKEN,
        torch.ones(6),
        SEQUENCES,
        2,
        averaging="token",
        fixed_length=1,
        denominators=SIX_IN_TWO,
    )
    assert loss.item() == pytest.approx(21 / 6)


def test_sequence_averaging_is_the_mean_of_sequence_means():
    loss = reduce_loss(
        PER_TOKEN,
        torch.ones(6),
        SEQUENCES,
        2,
        averaging="seq",
        fixed_length=1,
        denominators=SIX_IN_TWO,
    )
    assert loss.item() == pytest.approx((2.5 + 5.5) / 2)


@pytest.mark.parametrize(
    ("averaging", "weights"),
    [
        ("token", [1 / 20] * 4),
        ("seq", [1 / 40, 1 / 8, 1 / 24, 1 / 8]),  # as in docs/algorithms.md
        ("seq_fixed", [1 / 32] * 4),
    ],
)
def test_the_weight_of_a_token_by_hand(averaging, weights):
    lengths = torch.tensor([10, 2, 6, 2])
    index = torch.arange(4).repeat_interleave(lengths)
    values = torch.zeros(20, requires_grad=True)
    reduce_loss(
        values, torch.ones(20), index, 4, averaging=averaging, fixed_length=8, denominators=Denominators(20, 4)
    ).backward()
    assert values.grad.tolist() == pytest.approx(torch.tensor(weights)[index].tolist())


@pytest.mark.parametrize("averaging", ["token", "seq", "seq_fixed"])
def test_micro_batching_does_not_change_the_gradient(averaging):
    generator = torch.Generator().manual_seed(0)
    lengths = [10, 2, 6, 2]
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    mask = (torch.rand(sum(lengths), generator=generator) > 0.2).double()
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = list(itertools.pairwise(starts))
    denominators = count_denominators([mask[a:b] for a, b in spans])

    def gradient(batches):
        leaf = values.clone().requires_grad_()
        for batch in batches:
            part = torch.cat([leaf[slice(*spans[i])] for i in batch])
            part_mask = torch.cat([mask[slice(*spans[i])] for i in batch])
            index = torch.cat([torch.full((lengths[i],), k) for k, i in enumerate(batch)])
            reduce_loss(
                part.square(),
                part_mask,
                index,
                len(batch),
                averaging=averaging,
                fixed_length=7,
                denominators=denominators,
            ).backward()
        return leaf.grad

    together = gradient([[0, 1, 2, 3]])
    torch.testing.assert_close(gradient([[0], [1], [2], [3]]), together)
    torch.testing.assert_close(gradient([[3, 0], [2, 1]]), together)


def test_masked_tokens_contribute_nothing_even_when_not_finite():
    values = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    loss = reduce_loss(
        values,
        torch.tensor([1.0, 0.0, 0.0]),
        torch.zeros(3, dtype=torch.int64),
        1,
        averaging="token",
        fixed_length=1,
        denominators=Denominators(1, 1),
    )
    loss.backward()
    assert loss.item() == 1.0
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_a_fully_masked_update_has_zero_loss_not_nan():
    for averaging in ("token", "seq", "seq_fixed"):
        loss = reduce_loss(
            PER_TOKEN,
            torch.zeros(6),
            SEQUENCES,
            2,
            averaging=averaging,
            fixed_length=7,
            denominators=NOTHING,
        )
        assert loss.item() == 0.0


def test_denominators_count_trainable_tokens_and_sequences_only():
    counted = count_denominators([torch.tensor([1.0, 0.0, 1.0]), torch.zeros(4), torch.ones(2)])
    assert counted == Denominators(tokens=4, sequences=2)


def test_fixed_length_averaging_divides_each_sum_by_the_same_length():
    loss = reduce_loss(
        PER_TOKEN,
        torch.ones(6),
        SEQUENCES,
        2,
        averaging="seq_fixed",
        fixed_length=8,
        denominators=SIX_IN_TWO,
    )
    assert loss.item() == pytest.approx((10 + 11) / 8 / 2)


def test_sequence_means_count_trainable_tokens_only():
    means = sequence_means(PER_TOKEN, torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]), SEQUENCES, 2)
    assert means.tolist() == [2.5, 0.0]
