"""The packed forward of episodes, with images in observations, equals a Hugging Face forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.oracle import (
    has_no_gradient,
    load_hugging_face,
    make_episode,
    make_prompt,
    make_video_prompt,
    padded_episode,
)
from trigon.data.packing import by_group, pack_rollouts
from trigon.models.features import VisionFeatureCache
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score

TEMPERATURE = 0.7
TinyModel = Callable[..., Path]
Episode = Sequence[tuple[Sequence[tuple[int, int]] | None, int]]

EPISODES: list[Episode] = [
    [(None, 3), ([(4, 6)], 2), ([], 5)],  # samples first; observes an image, then words
    [([(6, 4), (4, 4)], 1), ([(8, 4)], 4)],  # observes two images before it samples
    [(None, 6)],  # one turn
]


def group_of(prompt: Prompt, completions: Sequence[Completion]) -> RolloutGroup:
    return RolloutGroup(prompt, tuple(Rollout(each, Score(0.0, {}, "ok", "")) for each in completions))


def make_groups(processors: Processors) -> list[RolloutGroup]:
    """Return a group with an image in its prompt, one without, and one with a video."""
    has_vision = processors.family.has_vision
    prompts = [
        make_prompt(processors, [(6, 10)] if has_vision else [], seed=1),
        make_prompt(processors, [], seed=2),
    ]
    if processors.family.video != "none":
        prompts.append(make_video_prompt(processors, (2, 4, 6), seconds=0.5, seed=3))
    episodes: list[Episode] = EPISODES
    if not has_vision:
        episodes = [[(None if grids is None else [], length) for grids, length in each] for each in EPISODES]
    return [
        group_of(prompt, [make_episode(processors, each, seed=10 * number + i) for i, each in enumerate(episodes)])
        for number, prompt in enumerate(prompts, start=1)
    ]


def packed(policy: Policy, processors: Processors, groups: Sequence[RolloutGroup], max_tokens: int) -> list[Tensor]:
    """Return log-probabilities and entropies of all sampled tokens."""
    positions = positions_of(processors.family, processors.hf_config)
    rows = pack_rollouts(groups, max_tokens=max_tokens, positions=positions)
    scores = [policy(row.packed, entropy_gradient=True) for row in rows]
    return [
        torch.cat([value for group in by_group(rows, values) for value in group])
        for values in ([each.logprobs for each in scores], [each.entropy for each in scores])
    ]


def some_loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Return a loss with a different weight for every token."""
    weights = torch.randn(2, len(logprobs), generator=torch.Generator().manual_seed(0)).to(logprobs.dtype)
    return weights[0] @ logprobs + weights[1] @ entropy


@pytest.mark.extended(but=["one-row-qwen2_5_vl"])
@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "llava_onevision", "gemma3", "gemma4"),
        *("mistral3", "idefics3", "qwen3", "llama"),
    ],
)
@pytest.mark.parametrize("max_tokens", [1_000_000, 120], ids=["one-row", "many-rows"])
def test_episodes_in_values_and_gradients(tiny_model: TinyModel, model_type: str, max_tokens: int) -> None:
    folder = tiny_model(model_type)
    processors = load_processors(str(folder))
    policy = Policy(
        load_model(str(folder), dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=TEMPERATURE,
        banned_token_ids=processors.banned_token_ids,
        logprob_chunk=7,
    )
    groups = make_groups(processors)
    logprobs, entropy = packed(policy, processors, groups, max_tokens)
    some_loss(logprobs, entropy).backward()

    oracle = load_hugging_face(folder, torch.float32)
    expected = [
        padded_episode(
            oracle,
            group.prompt,
            rollout.completion,
            temperature=TEMPERATURE,
            banned_token_ids=processors.banned_token_ids,
        )
        for group in groups
        for rollout in group.rollouts
    ]
    expected_logprobs, expected_entropy = (torch.cat(values) for values in zip(*expected, strict=True))
    some_loss(expected_logprobs, expected_entropy).backward()

    assert len(logprobs) == sum(rollout.completion.num_sampled for group in groups for rollout in group.rollouts)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    for name, parameter in oracle.named_parameters():
        if parameter.grad is None:
            continue
        if has_no_gradient(name):
            assert max(gradients[name].norm(), parameter.grad.norm()) < 1e-6
            continue
        difference = float((gradients[name] - parameter.grad).norm())
        assert difference <= 1e-5 * (float(parameter.grad.norm()) or 1.0), name
    if processors.family.has_vision:
        tower = processors.family.vision_tower(policy.model)
        assert any(float(p.grad.abs().max()) > 0 for p in tower.parameters() if p.grad is not None)


def test_features_of_observed_images_come_from_the_cache(tiny_model: TinyModel) -> None:
    """The same images in several completions are encoded once, with a frozen tower."""
    folder = tiny_model("qwen2_5_vl")
    processors = load_processors(str(folder))
    policy = Policy(
        load_model(str(folder), dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=TEMPERATURE,
        banned_token_ids=processors.banned_token_ids,
    )
    episode = make_episode(processors, EPISODES[1], seed=5)
    groups = [group_of(make_prompt(processors, [(6, 10)], seed=1), [episode, episode])]
    with torch.no_grad():
        expected = packed(policy, processors, groups, 1_000_000)
        policy.freeze_vision_tower()
        cache = VisionFeatureCache(1 << 30)
        policy.use_feature_cache(cache, all_reduce_max=int)
        actual = [packed(policy, processors, groups, 1_000_000) for _ in range(2)]
    hits, lookups = cache.pop_metrics()
    for values in actual:
        for mine, others in zip(values, expected, strict=True):
            torch.testing.assert_close(mine, others, atol=1e-5, rtol=0)
    assert (hits, lookups) == (7, 14)
