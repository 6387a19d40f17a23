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


def test_temperature_flattens_the_distribution():
    weights = [math.sqrt(p) for p in (0.5, 0.3, 0.15, 0.05)]
    expected = math.log(weights[0] / sum(weights))
    assert drawn(0.0, replace(PLAIN, temperature=2.0)) == (0, pytest.approx(expected, abs=1e-6))


def test_top_k_keeps_the_k_most_probable_tokens_and_renormalises():
    sampling = replace(PLAIN, top_k=2)
    assert drawn(0.0, sampling) == (0, pytest.approx(math.log(0.5 / 0.8), abs=1e-6))
    assert drawn(1 - 2**-53, sampling) == (1, pytest.approx(math.log(0.3 / 0.8), abs=1e-6))


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    assert drawn(1 - 2**-53, replace(PLAIN, top_p=0.79))[0] == 1
    assert drawn(1 - 2**-53, replace(PLAIN, top_p=0.81))[0] == 2
    assert drawn(0.9, replace(PLAIN, top_p=0.9)) == (2, pytest.approx(math.log(0.15 / 0.95), abs=1e-6))


def test_top_p_below_the_largest_probability_keeps_one_token():
    assert drawn(1 - 2**-53, replace(PLAIN, top_p=0.1)) == (0, 0.0)


def test_top_p_is_applied_after_top_k():
    # Of 0.5 + 0.3, the first alone is 0.625.
    assert drawn(1 - 2**-53, replace(PLAIN, top_k=2, top_p=0.6)) == (0, 0.0)


def test_banned_tokens_have_no_probability():
    assert drawn(0.0, banned=(0, 1)) == (2, pytest.approx(math.log(0.75), abs=1e-6))
    assert drawn(1 - 2**-53, banned=(3,)) == (2, pytest.approx(math.log(0.15 / 0.95), abs=1e-6))
    assert drawn(1 - 2**-53, replace(PLAIN, top_k=1), banned=(0,)) == (1, 0.0)


def test_greedy_takes_the_most_probable_allowed_token_with_log_probability_zero():
    greedy = replace(PLAIN, temperature=0.0)
    assert drawn(0.99, greedy) == (0, 0.0)
    assert drawn(0.99, greedy, banned=(0,)) == (1, 0.0)


def test_the_most_probable_token_is_drawn_when_the_rest_underflows():
    assert drawn(1 - 2**-53, logits=torch.tensor([1000.0, 0.0, -torch.inf])) == (0, 0.0)


def test_rows_are_drawn_independently():
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    tokens, logprobs = draw(logits, torch.tensor([0.6, 0.6], dtype=torch.float64), PLAIN, banned_token_ids=())
    assert tokens.tolist() == [1, 3]
    assert logprobs.exp().tolist() == pytest.approx([0.3, 0.5])


def test_frequencies_are_the_probabilities():
    uniforms = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, _ = draw(LOGITS.expand(20_000, -1), uniforms, PLAIN, banned_token_ids=())
    assert (tokens.bincount() / 20_000).tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.01)
