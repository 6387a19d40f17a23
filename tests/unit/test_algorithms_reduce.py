"""Loss averaging: values by hand, and independence of micro-batching."""

import itertools

import pytest
import torch

from trigon.algorithms.reduce import Denominators, count_denominators, reduce_loss, sequence_means

AVERAGINGS = ("token", "seq", "seq_fixed")
PER_TOKEN = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
LENGTHS = [4, 2]


def reduced(values, averaging, *, lengths, denominators, mask=None, fixed_length=8):
    return reduce_loss(
        values,
        torch.ones_like(values) if mask is None else mask,
        torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        len(lengths),
        averaging=averaging,
        fixed_length=fixed_length,
        denominators=denominators,
    )


@pytest.mark.parametrize(
    ("averaging", "expected"), [("token", 21 / 6), ("seq", (2.5 + 5.5) / 2), ("seq_fixed", (10 + 11) / 8 / 2)]
)
def test_averages_by_hand(averaging, expected):
    loss = reduced(PER_TOKEN, averaging, lengths=LENGTHS, denominators=Denominators(tokens=6, sequences=2))
    assert loss.item() == pytest.approx(expected)
    masked = reduced(PER_TOKEN, averaging, lengths=LENGTHS, mask=torch.zeros(6), denominators=Denominators(0, 0))
    assert masked.item() == 0.0  # not nan


@pytest.mark.parametrize(
    ("averaging", "weights"),
    [
        ("token", [1 / 20] * 4),
        ("seq", [1 / 40, 1 / 8, 1 / 24, 1 / 8]),  # as in docs/algorithms.md
        ("seq_fixed", [1 / 32] * 4),
    ],
)
def test_the_weight_of_a_token_by_hand(averaging, weights):
    lengths = [10, 2, 6, 2]
    values = torch.zeros(20, requires_grad=True)
    reduced(values, averaging, lengths=lengths, denominators=Denominators(20, 4)).backward()
    assert values.grad.tolist() == pytest.approx(
        [weight for weight, n in zip(weights, lengths, strict=True) for _ in range(n)]
    )


@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_micro_batching_does_not_change_the_gradient(averaging):
    generator = torch.Generator().manual_seed(0)
    lengths = [10, 2, 6, 2]
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    mask = (torch.rand(sum(lengths), generator=generator) > 0.2).double()
    spans = [slice(*span) for span in itertools.pairwise(torch.tensor([0, *lengths]).cumsum(0).tolist())]
    denominators = count_denominators([mask[span] for span in spans])

    def gradient(batches):
        leaf = values.clone().requires_grad_()
        for batch in batches:
            reduced(
                torch.cat([leaf[spans[i]] for i in batch]).square(),
                averaging,
                lengths=[lengths[i] for i in batch],
                mask=torch.cat([mask[spans[i]] for i in batch]),
                fixed_length=7,
                denominators=denominators,
            ).backward()
        return leaf.grad

    together = gradient([[0, 1, 2, 3]])
    torch.testing.assert_close(gradient([[0], [1], [2], [3]]), together)
    torch.testing.assert_close(gradient([[3, 0], [2, 1]]), together)


def test_masked_tokens_contribute_nothing_even_when_not_finite():
    values = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    loss = reduced(values, "token", lengths=[3], mask=torch.tensor([1.0, 0.0, 0.0]), denominators=Denominators(1, 1))
    loss.backward()
    assert loss.item() == 1.0
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_denominators_and_means_count_trainable_tokens_and_sequences_only():
    counted = count_denominators([torch.tensor([1.0, 0.0, 1.0]), torch.zeros(4), torch.ones(2)])
    assert counted == Denominators(tokens=4, sequences=2)
    index = torch.tensor([0, 0, 0, 0, 1, 1])
    means = sequence_means(PER_TOKEN, torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]), index, 2)
    assert means.tolist() == [2.5, 0.0]
