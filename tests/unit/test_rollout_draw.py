"""draw(): temperature, top-k, top-p, bans and log-probabilities, computed by hand."""

import math
from dataclasses import replace

import pytest
import torch

from trigon.rollout.transformers import draw
from trigon.types import SamplingParams

PLAIN = SamplingParams(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=1, ignore_eos=False, seed=0)
LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()  # four tokens, in descending order


def drawn(uniform, sampling=PLAIN, logits=LOGITS, banned=()):
    uniforms = torch.tensor([uniform], dtype=torch.float64)
    tokens, logprobs = draw(logits[None], uniforms, sampling, banned_token_ids=banned)
    return int(tokens), float(logprobs)


@pytest.mark.parametrize(
    ("uniform", "token", "probability"),
    [(0.0, 0, 0.5), (0.499, 0, 0.5), (0.501, 1, 0.3), (0.799, 1, 0.3), (0.801, 2, 0.15), (1 - 2**-53, 3, 0.05)],
)
def test_a_uniform_number_selects_the_token_of_its_interval(uniform, token, probability):
    assert drawn(uniform) == (token, pytest.approx(math.log(probability), abs=1e-6))


LAST = 1 - 2**-53


@pytest.mark.parametrize(
    ("uniform", "changes", "banned", "token", "probability"),
    [
        (0.0, {"temperature": 2.0}, (), 0, 0.5**0.5 / (0.5**0.5 + 0.3**0.5 + 0.15**0.5 + 0.05**0.5)),
        (0.0, {"top_k": 2}, (), 0, 0.5 / 0.8),
        (LAST, {"top_k": 2}, (), 1, 0.3 / 0.8),
        # The smallest set that reaches p.
        (LAST, {"top_p": 0.79}, (), 1, 0.3 / 0.8),
        (LAST, {"top_p": 0.81}, (), 2, 0.15 / 0.95),
        (LAST, {"top_p": 0.1}, (), 0, 1.0),
        (LAST, {"top_k": 2, "top_p": 0.6}, (), 0, 1.0),  # top-k first: of 0.5 + 0.3, the first alone is 0.625
        (0.0, {}, (0, 1), 2, 0.75),
        (LAST, {}, (3,), 2, 0.15 / 0.95),
        (LAST, {"top_k": 1}, (0,), 1, 1.0),
        (0.99, {"temperature": 0.0}, (), 0, 1.0),
        (0.99, {"temperature": 0.0}, (0,), 1, 1.0),
    ],
)
def test_what_is_drawn_by_hand(uniform, changes, banned, token, probability):
    found = drawn(uniform, replace(PLAIN, **changes), banned=banned)
    assert found == (token, pytest.approx(math.log(probability), abs=1e-6))


def test_rows_are_drawn_independently():
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    tokens, logprobs = draw(logits, torch.tensor([0.6, 0.6], dtype=torch.float64), PLAIN, banned_token_ids=())
    assert tokens.tolist() == [1, 3]
    assert logprobs.exp().tolist() == pytest.approx([0.3, 0.5])
    assert drawn(LAST, logits=torch.tensor([1000.0, 0.0, -torch.inf])) == (0, 0.0)  # the rest underflows
