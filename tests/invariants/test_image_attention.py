"""In a model whose images attend in both directions, they attend to nothing but themselves.

The tokens of an image see all of it. No image reaches an earlier token, another image, another
completion or another prompt, and a completion has the same log-probabilities alone, in its group
and in a row behind another group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.oracle import group_of, make_episode, make_group, make_prompt, pack_groups, packed_logprobs
from trigon.data.packing import pack_rollouts
from trigon.models.families import family_named, supported_model_types
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.types import Completion, PackedGroups, Prompt, Rollout, RolloutGroup, Score, Vision

FAMILIES = [each for each in supported_model_types() if family_named(each).image_layers != "none"]
GRID = (4, 4)

TinyModel = Callable[..., Path]


def open_policy(folder: Path) -> tuple[Policy, Processors]:
    processors = load_processors(str(folder))
    model = load_model(str(folder), dtype=torch.float64, device="cpu")
    return Policy(model, processors.family, temperature=0.7, banned_token_ids=processors.banned_token_ids), processors


def with_changed_image(prompt: Prompt, number: int) -> Prompt:
    """Return the prompt with other pixels in one of its images."""
    vision = prompt.vision
    assert isinstance(vision, Vision)
    parts = list(vision.pixel_values.split(vision.grid_thw.prod(1).tolist()))
    parts[number] = parts[number].flip(0)
    return replace(prompt, vision=replace(vision, pixel_values=torch.cat(parts)))


def packed_row(processors: Processors, groups: Sequence[RolloutGroup]) -> PackedGroups:
    [row] = pack_groups(processors, groups)
    return row.packed


@torch.no_grad()
def changed_tokens(policy: Policy, before: PackedGroups, after: PackedGroups) -> list[int]:
    """Return the tokens of a row whose last hidden states differ."""
    states = [policy.row_states(packed, run_dummy_vision=False)[0] for packed in (before, after)]
    return (states[0] != states[1]).any(1).nonzero()[:, 0].tolist()


def image_runs(policy: Policy, packed: PackedGroups) -> list[list[int]]:
    """Return the tokens of each image of a row, by its placeholders."""
    is_image = packed.token_ids == policy.family.image_token_id(policy.model.config)
    places = is_image.nonzero()[:, 0].tolist()
    runs: list[list[int]] = []
    for place in places:
        if not runs or place != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(place)
    return runs


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_image_reaches_itself_and_what_follows_it_in_its_group_alone(tiny_model: TinyModel, model_type: str) -> None:
    policy, processors = open_policy(tiny_model(model_type))
    prompts = [make_prompt(processors, [GRID, GRID, GRID], seed=1), make_prompt(processors, [GRID], seed=2)]
    others = make_group(make_prompt(processors, [GRID], seed=3), [5], seed=13)
    groups = [make_group(prompt, [3, 4], seed=11) for prompt in prompts]
    before = packed_row(processors, [others, *groups])
    after = packed_row(processors, [others, group_of_same(groups[0], with_changed_image(prompts[0], 1)), groups[1]])
    image = image_runs(policy, before)[2]  # the first is of the other group
    end = before.spans[1].completions[-1][1]
    assert changed_tokens(policy, before, after) == list(range(image[0], end))


def group_of_same(group: RolloutGroup, prompt: Prompt) -> RolloutGroup:
    return group_of(prompt, [rollout.completion.token_ids for rollout in group.rollouts])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_observed_image_reaches_what_follows_it_in_its_completion_alone(
    tiny_model: TinyModel, model_type: str
) -> None:
    policy, processors = open_policy(tiny_model(model_type))
    episodes = [make_episode(processors, [(None, 2), ([GRID], 3)], seed=seed) for seed in (5, 6, 7)]
    prompt = make_prompt(processors, [GRID], seed=1)
    changed = with_changed_pixels(episodes[1])
    before, after = (episode_row(processors, prompt, each) for each in (episodes, [episodes[0], changed, episodes[2]]))
    image = image_runs(policy, before)[2]  # of the prompt, and of each completion
    start, end = before.spans[0].completions[1]
    assert start < image[0]
    assert changed_tokens(policy, before, after) == list(range(image[0], end))


def with_changed_pixels(completion: Completion) -> Completion:
    vision = completion.vision
    assert isinstance(vision, Vision)
    return replace(completion, vision=replace(vision, pixel_values=vision.pixel_values.flip(0)))


def episode_row(processors: Processors, prompt: Prompt, completions: Sequence[Completion]) -> PackedGroups:
    group = RolloutGroup(prompt, tuple(Rollout(each, Score(0.0, {}, "ok", "")) for each in completions))
    positions = positions_of(processors.family, processors.hf_config)
    [row] = pack_rollouts([group], max_tokens=1_000_000, positions=positions)
    return row.packed


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_completion_is_the_same_alone_in_its_group_and_behind_another(tiny_model: TinyModel, model_type: str) -> None:
    policy, processors = open_policy(tiny_model(model_type))
    group = make_group(make_prompt(processors, [GRID, GRID], seed=1), [3, 7, 7, 1], seed=11)
    other = make_group(make_prompt(processors, [GRID, GRID], seed=2), [7, 2], seed=12)
    completions = [rollout.completion.token_ids for rollout in group.rollouts]

    def scores(groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        with torch.no_grad():
            return packed_logprobs(policy, processors, groups)

    [together], [_, behind] = scores([group]), scores([other, group])
    for number, completion in enumerate(completions):
        [[alone]] = scores([group_of(group.prompt, [completion])])
        for each in (together[number], behind[number]):
            torch.testing.assert_close(each, alone, atol=1e-9, rtol=0)
