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
    phase: Phase,
) -> list[RolloutGroup]:
    """Sample the completions of each prompt, score them, and return the groups in order.

    A group has sampling.n completions, and a baseline with sampling.with_baseline. A prompt that
    the engine failed to sample has no group. The engine must be awake. Announces the phases "gen",
    whose progress counts completions, and "reward": the scoring that remains once all are sampled.
    Raises: EngineError and RewardError as engine and pool do; EngineError if the engine failed for
    every prompt.
    """
    return collect_until(prompts, rollout, rewards, sampling, None, phase=phase).groups


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """Groups that are complete and scored, and the completions so far of the other prompts.

    unfinished: each prompt with all of its completions, those included that have ended; with
    SamplingParams.with_baseline the greedy one is the last.
    """

    groups: list[RolloutGroup]
    unfinished: list[tuple[Prompt, tuple[Completion, ...]]]


def collect_until(
    prompts: Sequence[Prompt],
    rollout: RolloutEngine,
    rewards: RewardPool,
    sampling: SamplingParams,
    until: Until | None,
    *,
    phase: Phase,
) -> Collected:
    """Do what collect does until enough groups are complete; both parts are in order of prompts.

    until: None: all are.
    """
    scored: dict[int, _ScoredRow] = {}
    with _scoring(rewards, sampling, len(prompts)) as scoring:

        def add(index: int, completions: Sequence[Completion]) -> None:
            scored[index] = scoring.add(index, prompts[index], completions)

        with phase("gen", total=_count_pending(prompts, sampling, until)) as advance:
            rows = rollout.generate(prompts, sampling, until=until, on_progress=advance, on_group=add)
        _require_some(rows)
        with phase("reward") as advance:
            scoring.finish(on_progress=advance)
        groups, unfinished = [], []
        for index, row in enumerate(rows):
            if _is_unfinished(row):
                unfinished.append((prompts[index], tuple(row)))
            elif row:
                group = scoring.find_group(scored[index])
                assert group is not None, "all that was added is scored"
                groups.append(group)
        return Collected(groups, unfinished)


def collect_as_they_end(
    prompts: Sequence[Prompt],
    rollout: RolloutEngine,
    rewards: RewardPool,
    sampling: SamplingParams,
    until: Until,
    *,
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
    waiting: deque[_ScoredRow] = deque()
    with _scoring(rewards, sampling, len(prompts), min_counted=min_counted) as scoring:

        def add(index: int, completions: Sequence[Completion]) -> None:
            if completions:  # of a group that did not fail
                waiting.append(scoring.add_next(prompts[index], completions))

        def hand_over() -> None:
            for _ in range(len(waiting)):
                row = waiting.popleft()
                group = scoring.find_group(row)
                if group is None:
                    waiting.append(row)
                else:
                    on_scored(group)

        with phase("gen", total=_count_pending(prompts, sampling, until)) as advance:

            def on_progress(num_finished: int | None) -> None:
                hand_over()
                advance(num_finished)

            rows = rollout.generate(prompts, sampling, until=until, on_progress=on_progress, on_group=add)
        with phase("reward") as advance:
            scoring.finish(on_progress=advance)
        hand_over()
    return [(prompt, tuple(row)) for prompt, row in zip(prompts, rows, strict=True) if row and _is_unfinished(row)]


@dataclass(frozen=True, slots=True, eq=False)
class _ScoredRow:
    """The completions of a prompt that are being scored.

    indices: of each completion's request; None if its environment failed, so that it has none.
    """

    prompt: Prompt
    completions: Sequence[Completion]
    indices: Sequence[int | None]


class _Scoring:
    """Scores rows of completions that arrive while others are sampled.

        index      0 ... n - 1 | n ... 2 n - 1 | ... | P n      | P n + 1  | ...
        request    of one row    of another            baseline   baseline

    The greedy completion of a row is scored by itself, so that a function that receives several
    completions at a time receives the n others alone.
    """

    def __init__(self, scoring: Scoring, n: int, num_rows: int) -> None:
        self._scoring, self._n, self._first_baseline = scoring, n, n * num_rows
        self._next_index = 0
        self._next_row = 0

    def add(self, number: int, prompt: Prompt, completions: Sequence[Completion]) -> _ScoredRow:
        """Begin to score a row. Which requests are sent together depends on its number alone."""
        places = range(number * self._n, (number + 1) * self._n)
        indices = [None if each.error else place for place, each in zip(places, completions, strict=False)]
        return self._add(prompt, completions, indices, number)

    def add_next(self, prompt: Prompt, completions: Sequence[Completion]) -> _ScoredRow:
        """Begin to score a row, whose requests follow those of the last call without a gap."""
        indices: list[int | None] = []
        for completion in completions[: self._n]:
            indices.append(None if completion.error else self._next_index)
            self._next_index += not completion.error
        self._next_row += 1
        return self._add(prompt, completions, indices, self._next_row - 1)

    def _add(
        self, prompt: Prompt, completions: Sequence[Completion], indices: list[int | None], number: int
    ) -> _ScoredRow:
        requests = {
            index: _request(prompt, completion)
            for index, completion in zip(indices, completions, strict=False)
            if index is not None
        }
        first = min(requests, default=0)
        self._scoring.add(first, [requests.get(index) for index in range(first, max(requests, default=-1) + 1)])
        for baseline in completions[self._n :]:
            indices.append(None if baseline.error else self._first_baseline + number)
            if not baseline.error:
                self._scoring.add(self._first_baseline + number, [_request(prompt, baseline)])
        return _ScoredRow(prompt, completions, indices)

    def find_group(self, row: _ScoredRow) -> RolloutGroup | None:
        """Return a row with its scores; None while one is missing. Raises: as Scoring.add."""
        found = self._scoring.find_scores([index for index in row.indices if index is not None])
        if found is None:
            return None
        scores = iter(found)
        rollouts = [
            Rollout(completion, Score(0.0, {}, "failed", completion.error) if index is None else next(scores))
            for completion, index in zip(row.completions, row.indices, strict=True)
        ]
        return RolloutGroup(row.prompt, tuple(rollouts[: self._n]), *rollouts[self._n :])

    def finish(self, *, on_progress: Callable[[int | None], object]) -> None:
        """Wait until all that was added is scored. See Scoring.result."""
        self._scoring.result(on_progress=on_progress)


@contextmanager
def _scoring(
    rewards: RewardPool, sampling: SamplingParams, num_prompts: int, *, min_counted: int = 0
) -> Iterator[_Scoring]:
    with rewards.scoring(
        num_completions=num_prompts * sampling.n,
        num_separate=num_prompts * (sampling.num_completions - sampling.n),
        min_counted=min_counted,
    ) as scoring:
        yield _Scoring(scoring, sampling.n, num_prompts)


def _count_pending(prompts: Sequence[Prompt], sampling: SamplingParams, until: Until | None) -> int:
    """Return the number of completions that have not ended before a call."""
    begun = () if until is None else until.begun
    return len(prompts) * sampling.num_completions - sum(not each.is_unfinished for row in begun for each in row)


def _is_unfinished(completions: Sequence[Completion]) -> bool:
    return any(completion.is_unfinished for completion in completions)


def _require_some(rows: Sequence[Sequence[Completion]]) -> None:
    if rows and not any(rows):
        raise EngineError(
            f"The rollout engine failed to sample any of {len(rows)} prompts, twice each. See the engine's log."
        )


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
