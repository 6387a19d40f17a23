"""Turns prompts into scored groups: the sampling half of a training step, and all of a validation.

Depends on the rollout protocol and the reward pool, not on trainers or a specific engine. A group
is scored as soon as it is sampled, while the engine samples other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from trigon.errors import BadRow, EngineError
from trigon.rewards.contract import RewardRequest, turn_input
from trigon.rewards.pool import RewardPool
from trigon.rewards.scoring import Scoring
from trigon.rollout.protocol import RolloutEngine, Until
from trigon.types import Completion, EncodedMedia, Phase, Prompt, Rollout, RolloutGroup, SamplingParams, Score, Vision

if TYPE_CHECKING:  # it imports torch, and dummy_requests is used before a run has imported torch
    from trigon.data.stream import Prompts


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
    on_scored: Callable[[RolloutGroup], None] | None = None,
    min_counted: int = 0,
) -> Collected:
    """Do what collect does until enough groups are complete; both parts are in order of prompts.

    until: None: all are. min_counted: see RewardPool.scoring.
    on_scored: called in this thread with each group as soon as it is scored, in place of returning
    it. Groups are then scored in the order in which they end, so that functions of the batch
    contract, which get several completions at a time, wait for few others; and no error is raised
    if all of them failed.
    """
    waiting: dict[int, _ScoredRow] = {}  # by the index of the prompt
    groups: dict[int, RolloutGroup] = {}
    with rewards.scoring(
        num_completions=len(prompts) * sampling.n,
        num_separate=len(prompts) * (sampling.num_completions - sampling.n),
        min_counted=min_counted,
    ) as pool:
        scoring = _Scoring(pool, sampling.n, len(prompts))

        def add(index: int, completions: Sequence[Completion]) -> None:
            if completions:  # of a group that did not fail
                waiting[index] = scoring.add(prompts[index], completions, index if on_scored is None else None)

        def find_scored() -> None:
            for index, row in [*waiting.items()]:
                group = scoring.find_group(row)
                if group is None:
                    continue
                del waiting[index]
                if on_scored is None:
                    groups[index] = group
                else:
                    on_scored(group)

        with phase("gen", total=_count_pending(prompts, sampling, until)) as advance:

            def on_progress(num_finished: int | None) -> None:
                if on_scored is not None:
                    find_scored()
                advance(num_finished)

            rows = rollout.generate(prompts, sampling, until=until, on_progress=on_progress, on_group=add)
        if on_scored is None and rows and not any(rows):
            raise nothing_sampled(len(rows))
        with phase("reward") as advance:
            scoring.finish(on_progress=advance)
        find_scored()
        assert not waiting, "all that was added is scored"
    unfinished = [(prompt, tuple(row)) for prompt, row in zip(prompts, rows, strict=True) if _is_unfinished(row)]
    return Collected([groups[index] for index in sorted(groups)], unfinished)


def nothing_sampled(num_prompts: int) -> EngineError:
    """Return the error of a call in which the engine failed for every prompt."""
    return EngineError(
        f"The rollout engine failed to sample any of {num_prompts} prompts, twice each. See the engine's log."
    )


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """Samples and scores the validation prompts.

    prompts_per_call: prompts that are built, sampled and scored together.
    num_workers: threads that build prompts.
    warn: called with a message for each prompt that can no longer be built; it is skipped.
    """

    prompts: Prompts
    sampling: SamplingParams
    prompts_per_call: int
    num_workers: int
    warn: Callable[[str], None]

    def sample(self, rollout: RolloutEngine, rewards: RewardPool, *, phase: Phase) -> list[RolloutGroup]:
        """Return a scored group for each prompt, in order. The engine must be awake.

        Prompts that cannot be built, or that the engine fails to sample, have no group. The prompts
        of the groups have no pixels, which may be more than memory holds.
        """
        total = len(self.prompts)
        groups: list[RolloutGroup] = []
        with (
            ThreadPoolExecutor(self.num_workers, thread_name_prefix="validation") as threads,
            phase("validation", total=total) as advance,
        ):
            for start in range(0, total, self.prompts_per_call):
                indices = range(start, min(start + self.prompts_per_call, total))
                batch = [prompt for prompt in threads.map(self._build, indices) if prompt is not None]
                for group in collect(batch, rollout, rewards, self.sampling, phase=phase):
                    groups.append(replace(group, prompt=replace(group.prompt, vision=None)))
                advance(len(indices))
        return groups

    def image_files(self, prompt_id: str) -> list[bytes]:
        """Return the images of a prompt as encoded files; none with videos.

        May be called from any thread. Raises: as Prompts.image_files.
        """
        index = self.prompts.index_of(prompt_id)
        assert index is not None, f"{prompt_id} is no validation prompt"
        return self.prompts.image_files(index)

    def _build(self, index: int) -> Prompt | None:
        try:
            return self.prompts[index]
        except BadRow as error:
            self.warn(f"skipped in this validation: {error}")
            return None


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
        self._num_rows = 0

    def add(self, prompt: Prompt, completions: Sequence[Completion], number: int | None) -> _ScoredRow:
        """Begin to score a row.

        number: of the row, on which alone it then depends which requests are sent together; None:
        its requests follow those of the last call without a gap.
        """
        index = self._next_index if number is None else number * self._n
        indices: list[int | None] = []
        for completion in completions[: self._n]:
            indices.append(None if completion.error else index)
            index += number is not None or not completion.error
        self._next_index = index
        requests = {
            index: _request(prompt, completion)
            for index, completion in zip(indices, completions, strict=False)
            if index is not None
        }
        first = min(requests, default=0)
        self._scoring.add(first, [requests.get(index) for index in range(first, max(requests, default=-1) + 1)])
        separate = self._first_baseline + (self._num_rows if number is None else number)
        for baseline in completions[self._n :]:
            indices.append(None if baseline.error else separate)
            if not baseline.error:
                self._scoring.add(separate, [_request(prompt, baseline)])
        self._num_rows += 1
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


def _count_pending(prompts: Sequence[Prompt], sampling: SamplingParams, until: Until | None) -> int:
    """Return the number of completions that have not ended before a call."""
    begun = () if until is None else until.begun
    return len(prompts) * sampling.num_completions - sum(not each.is_unfinished for row in begun for each in row)


def _is_unfinished(completions: Sequence[Completion]) -> bool:
    return any(completion.is_unfinished for completion in completions)


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
