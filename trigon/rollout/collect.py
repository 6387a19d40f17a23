"""Turns prompts into scored groups: the sampling half of a training step, and all of a validation.

Depends on the rollout protocol and the reward pool, not on trainers or a specific engine. A group
is scored as soon as it is sampled, while the engine samples other groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from trigon.errors import EngineError
from trigon.rewards.contract import RewardRequest, turn_input
from trigon.rewards.pool import RewardPool
from trigon.rollout.protocol import RolloutEngine
from trigon.types import Completion, EncodedMedia, Phase, Prompt, Rollout, RolloutGroup, SamplingParams, Score, Vision


def collect(
    prompts: Sequence[Prompt],
    rollout: RolloutEngine,
    rewards: RewardPool,
    sampling: SamplingParams,
    *,
    step: int,
    phase: Phase,
) -> list[RolloutGroup]:
    """Sample sampling.n completions for each prompt, score them, and return the groups in order.

    A prompt that the engine failed to sample has no group. The engine must be awake. Announces the
    phases "gen", whose progress counts completions, and "reward": the scoring that remains once all
    are sampled.
    Raises: EngineError and RewardError as engine and pool do; EngineError if the engine failed for
    every prompt.
    """
    num_completions = len(prompts) * sampling.n
    with rewards.scoring(num_completions=num_completions) as scoring:

        def on_group(index: int, completions: Sequence[Completion]) -> None:
            requests = [None if each.error else _request(prompts[index], each) for each in completions]
            scoring.add(index * sampling.n, requests)

        with phase("gen", total=num_completions) as advance:
            rows = rollout.generate(prompts, sampling, step=step, on_progress=advance, on_group=on_group)
        sampled = [(prompt, completions) for prompt, completions in zip(prompts, rows, strict=True) if completions]
        if prompts and not sampled:
            raise EngineError(
                f"The rollout engine failed to sample any of {len(prompts)} prompts, twice each. See the engine's log."
            )
        with phase("reward") as advance:
            scores = scoring.result(on_progress=advance)
    next_score = iter(scores)
    groups = [
        RolloutGroup(prompt, tuple(Rollout(each, _failed(each) or next(next_score)) for each in completions))
        for prompt, completions in sampled
    ]
    assert next(next_score, None) is None, "on_group had other completions"
    return groups


def _failed(completion: Completion) -> Score | None:
    """Return the score of a completion whose environment failed; None for any other."""
    return Score(0.0, {}, "failed", completion.error) if completion.error else None


def dummy_requests(prompt: Prompt) -> list[RewardRequest]:
    """Return two different dummy completions of a prompt, on which a reward function is checked.

    Two, because a batch function may return the wrong number of results.
    """
    return [
        _request(
            prompt,
            Completion(
                token_ids=(0,) * length,
                sampling_logprobs=(0.0,) * length,
                finish_reason="stop",
                text=text,
                policy_version=0,
            ),
        )
        for text, length in (("A dummy completion that checks the reward function.", 9), ("Another one.", 3))
    ]


def _request(prompt: Prompt, completion: Completion) -> RewardRequest:
    turns = _turns(completion)
    return RewardRequest(
        response=completion.text,
        response_length=completion.num_sampled,
        ground_truth=prompt.ground_truth,
        prompt=prompt.text,
        finish_reason=completion.finish_reason,
        row=prompt.row,
        turns=turns,
        media=prompt.vision if isinstance(prompt.vision, EncodedMedia) else prompt.read_media,
        turn_media=_turn_media(completion) if turns else (),
    )


def _turns(completion: Completion) -> list[dict[str, Any]]:
    """Return the turns of an episode as a reward function gets them; [] without (has_turns)."""
    if not completion.has_turns:
        return []
    return [turn_input(turn.observation, turn.text, turn.reward) for turn in completion.turns]


def _turn_media(completion: Completion) -> list[EncodedMedia | None]:
    """Return the images in the observation of each turn, None where there are none."""
    media = completion.vision
    assert not isinstance(media, Vision), "engines return the images of observations as files"
    if media is None:
        return [None] * len(completion.turns)
    ends = accumulate(turn.num_images for turn in completion.turns)
    spans = [slice(end - turn.num_images, end) for end, turn in zip(ends, completion.turns, strict=True)]
    parts = [EncodedMedia(media.encoded[span], media.hashes[span]) for span in spans]
    return [part if part.encoded else None for part in parts]
