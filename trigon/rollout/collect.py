"""Turns prompts into scored groups: the sampling half of a training step, and all of a validation.

Depends on the rollout protocol and the reward pool, not on trainers or a specific engine. A group
is scored as soon as it is sampled, while the engine samples other groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from trigon.errors import EngineError
from trigon.rewards.contract import RewardRequest, turn_input
from trigon.rewards.pool import RewardPool
from trigon.rewards.scoring import Scoring
from trigon.rollout.protocol import RolloutEngine, Until
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
    return collect_until(prompts, rollout, rewards, sampling, None, step=step, phase=phase).groups


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """Groups that are complete and scored, and the completions so far of the other prompts."""

    groups: list[RolloutGroup]
    unfinished: list[tuple[Prompt, tuple[Completion, ...]]]


def collect_until(
    prompts: Sequence[Prompt],
    rollout: RolloutEngine,
    rewards: RewardPool,
    sampling: SamplingParams,
    until: Until | None,
    *,
    step: int,
    phase: Phase,
) -> Collected:
    """Do what collect does until enough groups are complete; both parts are in order of prompts.

    until: None: all are.
    """
    begun = () if until is None else until.begun
    num_ended = sum(not completion.is_unfinished for row in begun for completion in row)
    with _scoring(prompts, rewards, sampling.n) as scored:
        with phase("gen", total=len(prompts) * sampling.n - num_ended) as advance:
            rows = rollout.generate(prompts, sampling, step=step, until=until, on_progress=advance, on_group=scored.add)
        sampled = [(prompt, completions) for prompt, completions in zip(prompts, rows, strict=True) if completions]
        _require_some(prompts, sampled)
        complete = [(prompt, row) for prompt, row in sampled if not _is_unfinished(row)]
        unfinished = [(prompt, tuple(row)) for prompt, row in sampled if _is_unfinished(row)]
        return Collected(scored.groups(complete, phase), unfinished)


def collect_as_they_end(
    prompts: Sequence[Prompt],
    rollout: RolloutEngine,
    rewards: RewardPool,
    sampling: SamplingParams,
    until: Until,
    *,
    step: int,
    phase: Phase,
    on_scored: Callable[[RolloutGroup], None],
    min_counted: int,
) -> list[tuple[Prompt, tuple[Completion, ...]]]:
    """Sample and score prompts, and hand over each group as soon as it is scored.

    Groups are scored in the order in which they end, so that functions of the batch contract, which
    get several completions at a time, wait for few others.
    on_scored: called in this thread. min_counted: see RewardPool.scoring.
    Returns: the prompts whose completions have not all ended when the call is interrupted, with
    these; in the order of prompts.
    """
    num_ended = sum(not completion.is_unfinished for row in until.begun for completion in row)
    waiting: deque[tuple[range, Prompt, Sequence[Completion]]] = deque()  # for scores
    num_added = 0
    with rewards.scoring(num_completions=len(prompts) * sampling.n, min_counted=min_counted) as scoring:

        def add(index: int, completions: Sequence[Completion]) -> None:
            nonlocal num_added
            indices = range(num_added, num_added + len(completions))
            num_added += len(completions)
            scoring.add(indices.start, [_request(prompts[index], each) for each in completions])
            if completions:  # of a group that did not fail
                waiting.append((indices, prompts[index], completions))

        def hand_over() -> None:
            for _ in range(len(waiting)):
                indices, prompt, completions = waiting.popleft()
                scores = scoring.find_scores(indices)
                if scores is None:
                    waiting.append((indices, prompt, completions))
                else:
                    on_scored(RolloutGroup(prompt, tuple(map(Rollout, completions, scores))))

        with phase("gen", total=len(prompts) * sampling.n - num_ended) as advance:

            def on_progress(num_finished: int | None) -> None:
                hand_over()
                advance(num_finished)

            rows = rollout.generate(prompts, sampling, step=step, until=until, on_progress=on_progress, on_group=add)
        with phase("reward") as advance:
            scoring.result(on_progress=advance)
        hand_over()
    return [(prompt, tuple(row)) for prompt, row in zip(prompts, rows, strict=True) if row and _is_unfinished(row)]


class _Scored:
    """The scores of groups that arrive while others are sampled."""

    def __init__(self, prompts: Sequence[Prompt], scoring: Scoring, n: int) -> None:
        self._prompts, self._scoring, self._n = prompts, scoring, n

    def add(self, index: int, completions: Sequence[Completion]) -> None:
        """Begin to score the completions of a prompt. See OnGroup."""
        requests = [None if each.error else _request(self._prompts[index], each) for each in completions]
        self._scoring.add(index * self._n, requests)

    def groups(self, sampled: Sequence[tuple[Prompt, Sequence[Completion]]], phase: Phase) -> list[RolloutGroup]:
        """Return the scored groups. sampled: all that were added, in order of prompts."""
        with phase("reward") as advance:
            scores = self._scoring.result(on_progress=advance)
        next_score = iter(scores)
        groups = [
            RolloutGroup(prompt, tuple(Rollout(each, _failed(each) or next(next_score)) for each in completions))
            for prompt, completions in sampled
        ]
        assert next(next_score, None) is None, "on_group had other completions"
        return groups


@contextmanager
def _scoring(prompts: Sequence[Prompt], rewards: RewardPool, n: int) -> Iterator[_Scored]:
    with rewards.scoring(num_completions=len(prompts) * n) as scoring:
        yield _Scored(prompts, scoring, n)


def _is_unfinished(completions: Sequence[Completion]) -> bool:
    return any(completion.is_unfinished for completion in completions)


def _require_some(prompts: Sequence[Prompt], sampled: Sequence[object]) -> None:
    if prompts and not sampled:
        raise EngineError(
            f"The rollout engine failed to sample any of {len(prompts)} prompts, twice each. See the engine's log."
        )


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
        image_sizes=prompt.image_sizes,
    )


def _turns(completion: Completion) -> list[dict[str, Any]]:
    """Return the turns of an episode as a reward function gets them; [] without (has_turns)."""
    if not completion.has_turns:
        return []
    return [turn_input(turn.observation, turn.text, turn.reward, turn.image_sizes) for turn in completion.turns]


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
