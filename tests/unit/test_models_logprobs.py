"""The shift by one, and log-probabilities in chunks compared with those of all logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trigon.models.logprobs import CHUNK_BYTES, Predictions, rows_per_chunk, target_and_source_positions, token_logprobs
from trigon.types import GroupSpan, TokenLogprobs

TOKENS, WIDTH, VOCABULARY = 11, 6, 13
BANNED = (2, 12)
TARGETS = torch.tensor([0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11])


def test_each_token_is_predicted_by_the_state_before_it_and_the_first_by_the_prompts_last() -> None:
    targets, sources = target_and_source_positions(
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


def reference_predictions(dtype: torch.dtype) -> Predictions:
    """Return the predictions of a reference model of another width."""
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(TOKENS, WIDTH + 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH + 3, generator=generator, dtype=torch.float64)
    return Predictions(states.to(dtype), weight.to(dtype))


def by_definition(
    states: Tensor,
    weight: Tensor,
    reference: Predictions,
    *,
    temperature: float,
    banned: tuple[int, ...],
    cap: float | None,
) -> dict[str, Tensor]:
    """Return what is computed in chunks, from the tables of all tokens that are not banned."""
    allowed = [token for token in range(VOCABULARY) if token not in banned]

    def table(states: Tensor, weight: Tensor) -> Tensor:
        logits = states @ weight[allowed].T
        return ((logits if cap is None else cap * torch.tanh(logits / cap)) / temperature).log_softmax(-1)

    log_p, log_q = table(states, weight), table(reference.states, reference.head_weight)
    indices = torch.tensor([allowed.index(token) for token in TARGETS.tolist()])
    return {
        "logprobs": log_p.gather(1, indices[:, None])[:, 0],
        "entropy": -(log_p * log_p.exp()).sum(-1),
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1),
    }


def scored(
    states: Tensor,
    weight: Tensor,
    reference: Predictions | None = None,
    *,
    temperature: float = 1.0,
    banned: tuple[int, ...] = BANNED,
    chunk: int = 4,
    cap: float | None = None,
    targets: Tensor = TARGETS,
    entropy_gradient: bool = True,
) -> TokenLogprobs:
    return token_logprobs(
        states,
        weight,
        targets,
        temperature=temperature,
        banned_token_ids=banned,
        chunk_tokens=chunk,
        entropy_gradient=entropy_gradient,
        against=reference,
        logit_cap=cap,
    )


@pytest.mark.parametrize("cap", [None, 1.5], ids=["", "bounded"])
@pytest.mark.parametrize("banned", [(), BANNED], ids=["all tokens", "banned tokens"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_chunks_give_the_same_values_and_gradients_as_the_full_tables(
    dtype: torch.dtype, atol: float, chunk: int, temperature: float, banned: tuple[int, ...], cap: float | None
) -> None:
    states, weight = inputs(dtype)
    reference = reference_predictions(dtype)
    scores = scored(states, weight, reference, temperature=temperature, banned=banned, chunk=chunk, cap=cap)
    weights = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    expected = by_definition(states, weight, reference, temperature=temperature, banned=banned, cap=cap)
    for name, value in expected.items():
        found = getattr(scores, name)
        torch.testing.assert_close(found, value, atol=atol, rtol=0)
        gradients = torch.autograd.grad(weights @ found, (states, weight), retain_graph=True)
        expected_gradients = torch.autograd.grad(weights @ value, (states, weight), retain_graph=True)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, atol=10 * atol, rtol=0)
    frozen = scored(states, weight.detach(), temperature=temperature, banned=banned, chunk=chunk, cap=cap)
    [of_states] = torch.autograd.grad(frozen.logprobs.sum(), states)
    assert torch.equal(of_states, torch.autograd.grad(scores.logprobs.sum(), states, retain_graph=True)[0])


def test_equal_logits_by_hand() -> None:
    inputs, targets = (torch.ones(1, 2), torch.zeros(5, 2)), torch.tensor([3])
    scores = scored(*inputs, temperature=0.5, banned=(0,), targets=targets, entropy_gradient=False)
    assert scores.logprobs.tolist() == pytest.approx([-math.log(4)])
    assert scores.entropy.tolist() == pytest.approx([math.log(4)])
    assert not scores.entropy.requires_grad


def peaked_logits() -> Tensor:
    """Return exact float32 logits up to 1000, of distributions with entropies from 0.1 to 1e-6."""
    generator = torch.Generator().manual_seed(0)
    gaps = torch.tensor([4.0, 6.0, 8.0, 12.0, 16.0, 20.0])[:, None]
    logits = 4 * torch.rand(6, VOCABULARY, generator=generator) - gaps
    logits[:, 5] = 0.0
    return torch.cat([logits + size for size in (-1000.0, 0.0, 100.0, 1000.0)])


@pytest.mark.parametrize("quantity", ["logprobs", "entropy"])
def test_large_logits_do_not_change_the_precision_of_values_and_gradients(quantity: str) -> None:
    logits = peaked_logits()
    results = []
    for dtype in (torch.float32, torch.float64):
        states = logits.to(dtype).requires_grad_()  # with the identity as head these are the logits
        targets = torch.full((len(logits),), 5 if quantity == "entropy" else 3)
        scores = scored(states, torch.eye(VOCABULARY, dtype=dtype), targets=targets, chunk=5)
        value = getattr(scores, quantity)
        (gradient,) = torch.autograd.grad(value.sum(), states)
        results.append((value.detach().double(), gradient.double()))
    (value, gradient), (expected, expected_gradient) = results
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    error = (gradient - expected_gradient).norm(dim=1) / expected_gradient.norm(dim=1)
    assert float(error.max()) < 1e-5


# -- the KL over the whole vocabulary --------------------------------------------------------------


def test_the_full_kl_by_hand() -> None:
    # policy (1/4, 3/4), reference (1/2, 1/2); the third token is banned
    states = torch.tensor([[1.0]], dtype=torch.float64)
    weight = torch.tensor([[math.log(1 / 4)], [math.log(3 / 4)], [9.0]], dtype=torch.float64)
    reference = Predictions(states, torch.tensor([[0.0], [0.0], [-9.0]], dtype=torch.float64))
    [kl] = scored(states, weight, reference, banned=(2,), targets=torch.tensor([0])).kl
    assert float(kl) == pytest.approx(math.log(2) / -4 + 3 / 4 * math.log(3 / 2), rel=1e-12)


# -- under autocast --------------------------------------------------------------------------------


def test_a_certain_token_has_zero_gradient_under_autocast() -> None:
    # Its probability is exactly 1, so that its gradient is 0 if forward and backward use the same
    # logits.
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(VOCABULARY, 64, generator=generator).requires_grad_()
    states = (7.0 * weight.detach()[TARGETS]).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = scored(states, weight, banned=())
    assert scores.logprobs.abs().max() < 1e-6
    gradients = torch.autograd.grad(scores.logprobs.sum(), (states, weight))
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_under_autocast_gradients_are_those_of_a_bfloat16_computation(temperature: float) -> None:
    states, weight = inputs(torch.float32)
    reference = reference_predictions(torch.float32)
    weights = torch.randn(3, TOKENS, generator=torch.Generator().manual_seed(1))

    def loss(scores: TokenLogprobs) -> Tensor:
        assert scores.kl is not None
        return weights[0] @ scores.logprobs + weights[1] @ scores.entropy + weights[2] @ scores.kl

    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = scored(states, weight, reference, temperature=temperature)
    assert scores.logprobs.dtype == torch.float32
    autocast_loss = loss(scores)
    gradients = torch.autograd.grad(autocast_loss, (states, weight))
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 2
    # The same without autocast, with all inputs in bfloat16.
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (states, weight)]
    low_reference = Predictions(reference.states.bfloat16(), reference.head_weight.bfloat16())
    expected = loss(scored(*low, low_reference, temperature=temperature))
    assert autocast_loss.item() == expected.item()
    for gradient, expected_gradient in zip(gradients, torch.autograd.grad(expected, low), strict=True):
        torch.testing.assert_close(gradient, expected_gradient.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("vocabulary", "device_type", "rows"),
    [
        (151_936, "cpu", 220),
        (32_000, "cpu", 1024),
        (10**9, "cpu", 1),
        (151_936, "cuda", 1536),
        (32_000, "cuda", 2048),
        (10**9, "cuda", 1),
    ],
)
def test_a_chunk_has_as_many_rows_as_fit_and_at_least_one(vocabulary: int, device_type: str, rows: int) -> None:
    assert rows_per_chunk(vocabulary, device_type) == rows
    assert rows == 1 or 4 * rows * vocabulary <= CHUNK_BYTES[device_type]


# -- bounded logits --------------------------------------------------------------------------------


def test_a_bound_of_logits_by_hand() -> None:
    """Logits of plus and minus infinity become plus and minus the bound."""
    states, weight, targets = torch.tensor([[1e30]]), torch.tensor([[1.0], [-1.0]]), torch.tensor([0])
    scores = scored(states, weight, banned=(), targets=targets, cap=math.log(3) / 2)
    assert scores.logprobs.tolist() == pytest.approx([math.log(3 / 4)])
