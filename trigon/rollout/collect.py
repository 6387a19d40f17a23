"""Turns prompts into scored groups: the sampling half of a training step, and all of a validation.

Depends on the rollout protocol and the reward pool, not on trainers or a specific engine. A group
is scored as soon as it is sampled, while the engine samples other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

from trigon.errors import BadRow, EngineError
from trigon.rewards.contract import RewardRequest, turn_input
from trigon.rewards.pool import RewardPool
from trigon.rewards.scoring import Scoring
from trigon.rollout.protocol import Interruption, RolloutEngine, Until, Work
from trigon.rollout.statistics import count_new
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
    may_all_fail: bool = False,
) -> list[RolloutGroup]:
    """Sample the completions of each prompt, score them, and return the groups in order.

    A group has sampling.n completions, and a baseline with sampling.with_baseline. A prompt that
    the engine failed to sample has no group. The engine must be awake. Announces the phases "gen",
    whose progress counts completions, and "reward": the scoring that remains once all are sampled.
    may_all_fail: the prompts are the rest of others, of which some were sampled.
    Raises: EngineError and RewardError as engine and pool do; EngineError if the engine failed for
    every prompt, unless they may all fail.
    """
    work = [Work(prompt) for prompt in prompts]
    return collect_until(
        work, rollout, rewards, sampling, num_groups=len(work), phase=phase, may_all_fail=may_all_fail
    ).groups


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What a call has sampled; groups and work are in the order of the work that it began with.

    groups: complete and scored. unfinished: work that is left, with all completions so far.
    num_tokens: the number of sampled tokens, without those of prompts that failed.
    """

    groups: list[RolloutGroup]
    unfinished: list[Work]
    num_tokens: int


def collect_until(
    work: Sequence[Work],
    rollout: RolloutEngine,
    rewards: RewardPool,
    sampling: SamplingParams,
    *,
    num_groups: int,
    num_required: int = 0,
    phase: Phase,
    may_all_fail: bool = False,
) -> Collected:
    """Do what collect does until enough groups are complete.

    Which completions a reward function receives in one call depends on the prompts alone, and not
    on the time at which they ended. num_groups, num_required: see Until.
    """
    prompts, until = [each.prompt for each in work], None
    if num_groups < len(work) or any(each.completions for each in work):
        until = Until(num_groups, num_required, tuple(each.completions for each in work))
    with _scoring(prompts, rewards, sampling) as scoring:
        with phase("gen", total=_count_pending(work, sampling)) as advance:
            rows = rollout.generate(prompts, sampling, until=until, on_progress=advance, on_group=scoring.add)
        if rows and not any(rows) and not may_all_fail:
            raise nothing_sampled(len(rows))
        with phase("reward") as advance:
            groups = dict(scoring.finish(on_progress=advance))
    num_tokens = sum(count_new(row, each) for each, row in zip(work, rows, strict=True))
    return Collected([groups[index] for index in sorted(groups)], _unfinished(work, rows), num_tokens)


def collect_until_interrupted(
    work: Sequence[Work],
    rollout: RolloutEngine,
    rewards: RewardPool,
    sampling: SamplingParams,
    interruption: Interruption,
    *,
    phase: Phase,
    on_scored: Callable[[RolloutGroup], None],
    min_counted: int,
) -> list[Work]:
    """Sample and score until the call is interrupted, and return the work that is then left.

    Groups are scored in the order in which they end, so that functions of the batch contract, which
    receive several completions at a time, wait for few others. No error is raised if the engine
    failed for every prompt.
    on_scored: called in this thread with each group as soon as it is scored. min_counted: see
    RewardPool.scoring.
    """
    prompts = [each.prompt for each in work]
    until = Until(len(work), 0, tuple(each.completions for each in work), interruption)
    with _scoring(prompts, rewards, sampling, as_they_end=True, min_counted=min_counted) as scoring:
        with phase("gen", total=_count_pending(work, sampling)) as advance:

            def report(num_finished: int | None) -> None:
                for _, group in scoring.pop_scored():
                    on_scored(group)
                advance(num_finished)

            rows = rollout.generate(prompts, sampling, until=until, on_progress=report, on_group=scoring.add)
        with phase("reward") as advance:
            for _, group in scoring.finish(on_progress=advance):
                on_scored(group)
    return _unfinished(work, rows)


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
                # As any other prompt, the few of a last batch may fail; a whole batch may not.
                is_rest = bool(groups) and len(indices) < self.prompts_per_call
                for group in collect(batch, rollout, rewards, self.sampling, phase=phase, may_all_fail=is_rest):
                    groups.append(replace(group, prompt=replace(group.prompt, vision=None)))
                advance(len(indices))
        return groups

    def image_files(self, prompt_id: str) -> list[bytes]:
        """Return the images of a prompt, see Prompts.image_files."""
        return self.prompts.image_files(prompt_id)

    def _build(self, index: int) -> Prompt | None:
        try:
            return self.prompts[index]
        except BadRow as error:
            self.warn(f"skipped in this validation: {error}")
            return None


@contextmanager
def _scoring(
    prompts: Sequence[Prompt],
    rewards: RewardPool,
    sampling: SamplingParams,
    *,
    as_they_end: bool = False,
    min_counted: int = 0,
) -> Iterator[_Scoring]:
    with rewards.scoring(
        num_completions=len(prompts) * sampling.n,
        num_separate=len(prompts) * (sampling.num_completions - sampling.n),
        min_counted=min_counted,
    ) as scoring:
        yield _Scoring(scoring, prompts, sampling.n, as_they_end=as_they_end)


@dataclass(frozen=True, slots=True)
class _ScoredRow:
    """The completions of a prompt that are being scored.

    slots: the slot of each completion's request; None if its environment failed, so that it has no
    request.
    """

    completions: Sequence[Completion]
    slots: Sequence[int | None]


class _Scoring:
    """Scores rows of completions that arrive while others are sampled.

    Requests in neighbouring slots are scored in one call by a function of the batch contract:

        slot       0 ... n - 1 | n ... 2 n - 1 | ... | P n      | P n + 1  | ...
        request    of one row    of another            baseline   baseline

    Rows have slots in their own order, or without gaps in the order in which they end: as_they_end.
    The greedy completion of a row is scored by itself, so that a function that receives several
    completions at a time receives the n others alone.
    """

    def __init__(self, scoring: Scoring, prompts: Sequence[Prompt], n: int, *, as_they_end: bool) -> None:
        self._scoring, self._prompts, self._n = scoring, prompts, n
        self._next_slots = (count(), count(len(prompts) * n)) if as_they_end else None
        self._waiting: dict[int, _ScoredRow] = {}  # by the index of the prompt

    def add(self, index: int, completions: Sequence[Completion]) -> None:
        """Begin to score the completions of a prompt; none, if the engine failed to sample it."""
        if not completions:
            return
        own_slots = count(index * self._n), count(len(self._prompts) * self._n + index)
        slots, separate_slots = self._next_slots or own_slots
        prompt, sampled, baselines = self._prompts[index], completions[: self._n], completions[self._n :]
        taken = [None if each.error else next(slots) for each in sampled]
        separate = [None if each.error else next(separate_slots) for each in baselines]
        self._waiting[index] = _ScoredRow(completions, [*taken, *separate])
        together = [slot for slot in taken if slot is not None]
        if together:
            self._scoring.add(together[0], [_request(prompt, each) for each in sampled if not each.error])
        for slot, baseline in zip(separate, baselines, strict=True):
            if slot is not None:
                self._scoring.add(slot, [_request(prompt, baseline)])

    def pop_scored(self) -> Iterator[tuple[int, RolloutGroup]]:
        """Yield the groups that are scored, with the indices of their prompts.

        Raises: as Scoring.add.
        """
        for index, row in [*self._waiting.items()]:
            found = self._scoring.find_scores([slot for slot in row.slots if slot is not None])
            if found is None:
                continue
            del self._waiting[index]
            scores = iter(found)
            rollouts = [
                Rollout(completion, Score(0.0, {}, "failed", completion.error) if slot is None else next(scores))
                for completion, slot in zip(row.completions, row.slots, strict=True)
            ]
            yield index, RolloutGroup(self._prompts[index], tuple(rollouts[: self._n]), *rollouts[self._n :])

    def finish(self, *, on_progress: Callable[[int | None], object]) -> list[tuple[int, RolloutGroup]]:
        """Wait until everything that was added is scored, and return the remaining groups. See
        Scoring.result."""
        self._scoring.result(on_progress=on_progress)
        scored = list(self.pop_scored())
        assert not self._waiting, "all that was added is scored"
        return scored


def _count_pending(work: Sequence[Work], sampling: SamplingParams) -> int:
    """Return the number of completions that have not ended before a call."""
    num_ended = sum(not completion.is_unfinished for each in work for completion in each.completions)
    return len(work) * sampling.num_completions - num_ended


def _unfinished(work: Sequence[Work], rows: Sequence[Sequence[Completion]]) -> list[Work]:
    """Return what is left of work; from the start where no token is sampled yet."""
    return [
        replace(each, completions=tuple(row) if any(completion.token_ids for completion in row) else ())
        for each, row in zip(work, rows, strict=True)
        if any(completion.is_unfinished for completion in row)
    ]


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
