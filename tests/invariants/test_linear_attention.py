"""No state of linear attention passes from one sequence of a row into another one.

Named after public reports of such leaks in other trainers. The models have layers whose state
decays slowly, so that a leak shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.oracle import group_of, make_group, make_prompt, packed_logprobs, random_words
from trigon.models.linear_attention import gated_delta_rule
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.types import RolloutGroup

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def exact(request: pytest.FixtureRequest, tiny_model: TinyModel) -> tuple[Policy, Processors]:
    """Return a policy in float64, so that a difference is a leak and not rounding."""
    folder = str(tiny_model(request.param))
    processors = load_processors(folder)
    model = load_model(folder, dtype=torch.float64, device="cpu")
    if processors.family.experts != "none":
        model.set_experts_implementation("eager")  # the default takes no float64
    policy = Policy(model, processors.family, temperature=1.0, banned_token_ids=processors.banned_token_ids)
    return policy, processors


def some_group(processors: Processors, seed: int, lengths: Sequence[int], *, words: int = 6) -> RolloutGroup:
    grids = [(8, 6)] if processors.family.has_vision else []
    return make_group(make_prompt(processors, grids, seed=seed, words_before=words), lengths, seed=10 + seed)


def logprobs_and_gradient(
    exact: tuple[Policy, Processors], groups: Sequence[RolloutGroup], counted: int, *, max_tokens: int = 1_000_000
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probabilities of one group's completions, and the gradient of their sum."""
    policy, processors = exact
    policy.zero_grad()
    own = packed_logprobs(policy, processors, groups, max_tokens=max_tokens)[counted]
    torch.cat(own).sum().backward()
    return own, {name: weight.grad.clone() for name, weight in policy.named_parameters() if weight.grad is not None}


def assert_same(
    actual: tuple[Sequence[Tensor], dict[str, Tensor]], expected: tuple[Sequence[Tensor], dict[str, Tensor]]
) -> None:
    for own, other in zip(actual[0], expected[0], strict=True):
        torch.testing.assert_close(own, other, atol=1e-9, rtol=0)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        # Norms compute in float32 whatever the dtype of the model is.
        assert float((actual[1][name] - gradient).norm()) <= 1e-6 * float(gradient.norm()) + 1e-9, name


def test_packed_sequences_do_not_inherit_state_transformers_5_8_ms_swift_9618_9565_torchtitan_3892(exact) -> None:
    """A group behind another one is the group alone: state and convolution begin at zero."""
    _, processors = exact
    first, second = some_group(processors, 1, [70, 5], words=80), some_group(processors, 2, [9, 66, 3])
    alone = logprobs_and_gradient(exact, [second], 0)
    assert_same(logprobs_and_gradient(exact, [first, second], 1), alone)
    assert_same(logprobs_and_gradient(exact, [second, first], 0), alone)
    other = some_group(processors, 3, [70, 5], words=80)
    assert_same(logprobs_and_gradient(exact, [other, second], 1), alone)


def test_completions_share_their_prompt_and_nothing_else_nemo_automodel_2131_slime_1686(exact) -> None:
    """Each completion alone with its prompt is the one in its group, and gradients add up."""
    policy, processors = exact
    group = some_group(processors, 4, [67, 1, 12, 12], words=70)
    together, gradient = logprobs_and_gradient(exact, [group], 0)
    policy.zero_grad()
    for index, rollout in enumerate(group.rollouts):
        alone = packed_logprobs(policy, processors, [group_of(group.prompt, [rollout.completion.token_ids])])[0][0]
        torch.testing.assert_close(alone, together[index], atol=1e-9, rtol=0)
        alone.sum().backward()
    for name, weight in policy.named_parameters():
        if weight.grad is not None:
            assert float((weight.grad - gradient[name]).norm()) <= 1e-6 * float(gradient[name].norm()) + 1e-9, name


def test_padding_does_not_corrupt_states_maxtext_5295(exact) -> None:
    """Segments are padded to one length; how long the others are changes nothing."""
    _, processors = exact
    group = some_group(processors, 5, [9, 10])
    prompt, [first, second] = group.prompt, [rollout.completion.token_ids for rollout in group.rollouts]
    longer = tuple(random_words(63, torch.Generator().manual_seed(5)))
    before = packed_logprobs(*exact, [group])[0]
    after = packed_logprobs(*exact, [group_of(prompt, [first, longer, second, longer[:16]])])[0]
    for actual, expected in zip((after[0], after[2]), before, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("words", [1, 2, 3], ids=lambda words: f"prompt of {words}")
def test_a_prompt_shorter_than_the_convolution_leaves_zeros_before_it(exact, words: int) -> None:
    policy, processors = exact
    prompt = make_prompt(processors, [], seed=6, words_before=words)
    completion = tuple(random_words(9, torch.Generator().manual_seed(6)))
    [[in_one], [in_two]] = packed_logprobs(
        policy,
        processors,
        [
            group_of(prompt, [completion]),
            # The same tokens, of which more belong to the prompt.
            group_of(replace(prompt, token_ids=prompt.token_ids + completion[:4]), [completion[4:]]),
        ],
    )
    torch.testing.assert_close(in_one[4:], in_two, atol=1e-9, rtol=0)


def test_decays_in_bfloat16_change_logprobs_much_less_than_other_weights_and_activations(tiny_model: TinyModel) -> None:
    """FSDP rounds them with all other weights; vLLM has A_log in float32."""
    folder = str(tiny_model("qwen3_5"))
    processors = load_processors(folder)
    group = some_group(processors, 7, [64] * 4, words=300)

    def logprobs(dtype: torch.dtype, rounded: tuple[str, ...] = ()) -> Tensor:
        model = load_model(folder, dtype=torch.float32, device="cpu")
        mixer = model.model.language_model.layers[0].linear_attn
        mixer.A_log.data = torch.linspace(-5.37, -1.03, mixer.num_v_heads)  # no multiples of what bfloat16 can hold
        mixer.dt_bias.data = torch.linspace(1.01, -1.03, mixer.num_v_heads)
        for name in rounded:
            weight = getattr(mixer, name).data
            weight.copy_(weight.bfloat16())
        model.to(dtype)
        policy = Policy(model, processors.family, temperature=1.0, banned_token_ids=processors.banned_token_ids)
        with torch.no_grad():
            return torch.cat(packed_logprobs(policy, processors, [group])[0])

    exact = logprobs(torch.float32)
    rounded, bfloat16 = logprobs(torch.float32, ("A_log", "dt_bias")), logprobs(torch.bfloat16)
    assert 0 < float((rounded - exact).abs().mean()) < float((bfloat16 - exact).abs().mean()) / 3


def test_the_rule_in_chunks_is_the_rule_token_by_token() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    B, L, H, V = 2, 128, 4, 5
    query, key, value, beta = random(B, L, 2, 3), random(B, L, 2, 3), random(B, L, H, V), random(B, L, H).sigmoid()
    decay, initial = -random(B, L, H).square() / 10, random(B, H, 3, V)
    outputs, final = gated_delta_rule(query, key, value, decay, beta, state=initial)

    unit_query, unit_key = (
        (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(2, 2) for part in (query, key)
    )
    state = initial
    for t in range(L):
        state = state * decay[:, t, :, None, None].exp()
        found = torch.einsum("bhkv,bhk->bhv", state, unit_key[:, t])
        written = beta[:, t, :, None] * (value[:, t] - found)
        state = state + unit_key[:, t, :, :, None] * written[:, :, None]
        read = torch.einsum("bhkv,bhk->bhv", state, unit_query[:, t]) * 3**-0.5
        torch.testing.assert_close(outputs[:, t], read, atol=1e-12, rtol=0)
    torch.testing.assert_close(final, state, atol=1e-12, rtol=0)


def test_autocast_does_not_round_the_rule() -> None:
    """A single process computes with autocast, ranks that shard a policy without it."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 256, 2, 16, generator=generator).bfloat16() for _ in range(3))
    decay, beta = -0.1 * torch.rand(1, 256, 2, generator=generator), torch.rand(1, 256, 2, generator=generator)
    inputs = (query, key, value, decay, beta)
    expected = gated_delta_rule(*inputs, state=None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gated_delta_rule(*inputs, state=None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_zeros_leave_the_state_unchanged() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 8, 1, 4, generator=generator) for _ in range(3))
    decay, beta = -torch.rand(1, 8, 1, generator=generator), torch.rand(1, 8, 1, generator=generator)
    short, state = gated_delta_rule(query, key, value, decay, beta, state=None)
    padded = [torch.cat([part, torch.zeros_like(part)], 1) for part in (query, key, value, decay, beta)]
    long, padded_state = gated_delta_rule(*padded, state=None)
    torch.testing.assert_close(long[:, :8], short)
    torch.testing.assert_close(padded_state, state)
