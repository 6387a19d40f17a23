"""The shift by one, and log-probabilities in chunks against the whole table."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trigon.models.logprobs import CHUNK_BYTES, Predictions, rows_of_chunk, shifted, token_logprobs
from trigon.types import GroupSpan, TokenLogprobs

TOKENS, WIDTH, VOCABULARY = 11, 6, 13
BANNED = (2, 12)
TARGETS = torch.tensor([0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11])


def test_each_token_is_predicted_by_the_state_before_it_and_the_first_by_the_prompts_last() -> None:
    targets, sources = shifted(
        [
            GroupSpan(prompt=(0, 3), completions=((3, 5), (5, 8))),
            GroupSpan(prompt=(8, 9), completions=((9, 10),)),
        ]
    )
    assert targets.tolist() == [3, 4, 5, 6, 7, 9]
    assert sources.tolist() == [2, 3, 2, 5, 6, 8]


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return states.requires_grad_(), weight.requires_grad_()


def whole_table(states: Tensor, weight: Tensor, temperature: float, banned: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The definition, with the distribution over the tokens that are not banned."""
    allowed = [token for token in range(VOCABULARY) if token not in banned]
    table = (states @ weight[allowed].T / temperature).log_softmax(-1)
    places = torch.tensor([allowed.index(token) for token in TARGETS.tolist()])
    return table.gather(1, places[:, None])[:, 0], -(table * table.exp()).sum(-1)


def chunked(
    states: Tensor, weight: Tensor, *, temperature: float = 1.0, banned: tuple[int, ...] = BANNED, chunk: int = 4
) -> TokenLogprobs:
    return token_logprobs(
        states,
        weight,
        TARGETS,
        temperature=temperature,
        banned_token_ids=banned,
        chunk_tokens=chunk,
        entropy_gradient=True,
    )


@pytest.mark.parametrize("banned", [(), BANNED], ids=["all tokens", "banned tokens"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 5e-6), (torch.float64, 1e-14)])
def test_chunks_give_what_the_whole_table_gives(
    dtype: torch.dtype, atol: float, chunk: int, temperature: float, banned: tuple[int, ...]
) -> None:
    states, weight = inputs(dtype)
    scores = chunked(states, weight, temperature=temperature, banned=banned, chunk=chunk)
    logprobs, entropy = whole_table(states, weight, temperature, banned)
    torch.testing.assert_close(scores.logprobs, logprobs, atol=atol, rtol=0)
    torch.testing.assert_close(scores.entropy, entropy, atol=atol, rtol=0)

    weights = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    ours = torch.autograd.grad(weights[0] @ scores.logprobs + weights[1] @ scores.entropy, (states, weight))
    theirs = torch.autograd.grad(weights[0] @ logprobs + weights[1] @ entropy, (states, weight))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=10 * atol, rtol=0)


def test_gradients_are_the_slopes_of_the_function() -> None:
    states, weight = inputs(torch.float64)

    def both(states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scores = chunked(states, weight, temperature=0.8)
        return scores.logprobs, scores.entropy

    assert torch.autograd.gradcheck(both, (states, weight))


def test_equal_logits_by_hand() -> None:
    scores = token_logprobs(
        torch.ones(1, 2),
        torch.zeros(5, 2),
        torch.tensor([3]),
        temperature=0.5,
        banned_token_ids=(0,),
        chunk_tokens=8,
        entropy_gradient=False,
    )
    assert scores.logprobs.tolist() == pytest.approx([-math.log(4)])
    assert scores.entropy.tolist() == pytest.approx([math.log(4)])


def test_entropy_carries_no_gradient_unless_asked() -> None:
    states, weight = inputs(torch.float32)
    scores = token_logprobs(
        states, weight, TARGETS, temperature=1.0, banned_token_ids=(), chunk_tokens=4, entropy_gradient=False
    )
    assert scores.logprobs.requires_grad
    assert not scores.entropy.requires_grad


def test_a_frozen_head_gets_no_gradient_and_does_not_change_that_of_the_states() -> None:
    states, weight = inputs(torch.float64)
    (expected,) = torch.autograd.grad(chunked(states, weight).logprobs.sum(), states)
    frozen = weight.detach()
    (gradient,) = torch.autograd.grad(chunked(states, frozen).logprobs.sum(), states)
    assert torch.equal(gradient, expected)


def test_bfloat16_gives_float32_logprobs_and_sums_the_weights_gradient_in_float32() -> None:
    states, weight = inputs(torch.bfloat16)
    scores = chunked(states, weight, chunk=1)
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    logprobs, _ = whole_table(states.float(), weight.float(), 1.0, BANNED)
    torch.testing.assert_close(scores.logprobs, logprobs, atol=0.05, rtol=0)
    ours = torch.autograd.grad(scores.logprobs.sum(), (states, weight))
    theirs = torch.autograd.grad(logprobs.sum(), (states, weight))
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.bfloat16
        torch.testing.assert_close(our.float(), their.float(), atol=0.05, rtol=0.02)


def test_huge_logits_stay_finite() -> None:
    states, weight = inputs(torch.float32)
    scores = chunked(states * 1e4, weight, temperature=0.1)
    assert torch.isfinite(scores.logprobs).all()
    assert torch.isfinite(scores.entropy).all()
    gradients = torch.autograd.grad(scores.logprobs.sum() + scores.entropy.sum(), (states, weight))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


# -- the KL over the whole vocabulary -----------------------------------------------------------------------------


def other_predictions(dtype: torch.dtype) -> Predictions:
    """Those of another model, wider than ours."""
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(TOKENS, WIDTH + 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH + 3, generator=generator, dtype=torch.float64)
    return Predictions(states.to(dtype), weight.to(dtype))


def compared(
    states: Tensor,
    weight: Tensor,
    theirs: Predictions,
    *,
    temperature: float = 1.0,
    banned: tuple[int, ...] = BANNED,
    chunk: int = 4,
) -> Tensor:
    scores = token_logprobs(
        states,
        weight,
        TARGETS,
        temperature=temperature,
        banned_token_ids=banned,
        chunk_tokens=chunk,
        entropy_gradient=False,
        against=theirs,
    )
    assert scores.kl is not None
    return scores.kl


def test_the_full_kl_by_hand() -> None:
    # ours (1/4, 3/4) against theirs (1/2, 1/2); the third token is banned
    states = torch.tensor([[1.0]], dtype=torch.float64)
    ours = torch.tensor([[math.log(1 / 4)], [math.log(3 / 4)], [9.0]], dtype=torch.float64)
    theirs = Predictions(states, torch.tensor([[0.0], [0.0], [-9.0]], dtype=torch.float64))
    [kl] = token_logprobs(
        states,
        ours,
        torch.tensor([0]),
        temperature=1.0,
        banned_token_ids=(2,),
        chunk_tokens=1,
        entropy_gradient=False,
        against=theirs,
    ).kl
    assert float(kl) == pytest.approx(math.log(2) / -4 + 3 / 4 * math.log(3 / 2), rel=1e-12)


@pytest.mark.parametrize("banned", [(), BANNED], ids=["all tokens", "banned tokens"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-14)])
def test_the_full_kl_is_that_of_the_whole_tables(
    dtype: torch.dtype, atol: float, chunk: int, temperature: float, banned: tuple[int, ...]
) -> None:
    states, weight = inputs(dtype)
    theirs = other_predictions(dtype)
    kl = compared(states, weight, theirs, temperature=temperature, banned=banned, chunk=chunk)
    allowed = [token for token in range(VOCABULARY) if token not in banned]
    ours = (states @ weight[allowed].T / temperature).log_softmax(-1)
    reference = (theirs.states @ theirs.head_weight[allowed].T / temperature).log_softmax(-1)
    expected = (ours.exp() * (ours - reference)).sum(-1)
    torch.testing.assert_close(kl, expected, atol=atol, rtol=0)

    weights = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    for our, their in zip(
        torch.autograd.grad(weights @ kl, (states, weight)),
        torch.autograd.grad(weights @ expected, (states, weight)),
        strict=True,
    ):
        torch.testing.assert_close(our, their, atol=10 * atol, rtol=0)


def test_the_full_kl_from_oneself_is_zero_and_flat() -> None:
    states, weight = inputs(torch.float64)
    kl = compared(states, weight, Predictions(states.detach(), weight.detach()))
    assert kl.abs().max() < 1e-15
    [gradient] = torch.autograd.grad(kl.sum(), (states,))
    assert gradient.abs().max() < 1e-15


# -- under autocast -----------------------------------------------------------------------------------------------


def test_a_confident_token_has_no_gradient_under_autocast_either() -> None:
    # Its probability is 1 to the last bit, so that its gradient is 0, if forward and backward mean the same logits.
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(VOCABULARY, 64, generator=generator).requires_grad_()
    states = (7.0 * weight.detach()[TARGETS]).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = chunked(states, weight, banned=())
    assert scores.logprobs.abs().max() < 1e-6
    ours = torch.autograd.grad(scores.logprobs.sum(), (states, weight))
    assert max(float(gradient.abs().max()) for gradient in ours) < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_under_autocast_gradients_are_those_of_the_rounded_logits(temperature: float) -> None:
    states, weight = inputs(torch.float32)
    theirs = other_predictions(torch.float32)
    weights = torch.randn(3, TOKENS, generator=torch.Generator().manual_seed(1))

    def loss(scores: TokenLogprobs) -> Tensor:
        assert scores.kl is not None
        return weights[0] @ scores.logprobs + weights[1] @ scores.entropy + weights[2] @ scores.kl

    def scored(states: Tensor, weight: Tensor, theirs: Predictions) -> TokenLogprobs:
        return token_logprobs(
            states,
            weight,
            TARGETS,
            temperature=temperature,
            banned_token_ids=BANNED,
            chunk_tokens=4,
            entropy_gradient=True,
            against=theirs,
        )

    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = scored(states, weight, theirs)
    rounded = loss(scores)
    ours = torch.autograd.grad(rounded, (states, weight))
    assert [gradient.dtype for gradient in ours] == [torch.float32] * 2
    # The same by hand: everything in bfloat16 beforehand.
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (states, weight)]
    lower = Predictions(theirs.states.bfloat16(), theirs.head_weight.bfloat16())
    expected = loss(scored(*low, lower))
    assert rounded.item() == expected.item()
    for our, their in zip(ours, torch.autograd.grad(expected, low), strict=True):
        torch.testing.assert_close(our, their.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("vocabulary", "rows"), [(151_936, 220), (32_000, 1024), (1024, 1024), (10**9, 1)])
def test_a_chunk_holds_as_many_rows_as_its_bytes_and_never_none(vocabulary: int, rows: int) -> None:
    assert rows_of_chunk(vocabulary) == rows
    assert rows == 1 or 4 * rows * vocabulary <= CHUNK_BYTES
