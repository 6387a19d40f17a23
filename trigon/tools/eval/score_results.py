"""What score() returns, as data types, and how it is computed from the scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trigon.tools.eval.results import to_plain
from trigon.tools.eval.statistics import Estimate, estimate_mean
from trigon.types import Score

STORED = "stored"
"""The name of the scores in the rollouts file."""

MAX_VALUES = 12
"""Scores with at most so many different values are counted by value, others in bins."""

NUM_BINS = 10
NUM_SLOWEST = 10
MAX_LISTED = 1000
"""Disagreements and failures in the JSON; ScoreResult.completions has all."""


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """A stored rollout with its new scores.

    file, line: where it is; "" for rows that were given. step: None if unknown. stored: its score
    in the file. scores, seconds: of each reward function; seconds is the time that it took.
    ending: the end of the completion.
    """

    file: str
    line: int
    step: int | None
    split: str
    prompt_id: str
    sample: int
    stored: Score
    scores: tuple[Score, ...]
    seconds: tuple[float, ...]
    ground_truth: str
    ending: str

    @property
    def place(self) -> str:
        """The completion's name: step, prompt and sample."""
        step = "" if self.step is None else f"step {self.step} "
        return f"{step}{self.prompt_id}/{self.sample}"


@dataclass(frozen=True, slots=True)
class Bin:
    """A bar of a distribution: how many scores are in [low, high]; of one value if both are equal.

    The upper end belongs to the next bin, except that of the last one.
    """

    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A kind of failure. error: the message of the first. example: where that was."""

    error: str
    outcome: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Slow:
    """A completion that took long."""

    place: str
    seconds: float
    outcome: str


@dataclass(frozen=True, slots=True)
class RewardSummary:
    """The scores of one reward function.

    parts: the mean of each score, with an interval that is clustered by prompt. distribution: of
    "overall". failures: by kind, the most frequent first. total_seconds, median_seconds,
    max_seconds: time in the function.
    """

    reward: str
    kwargs: Mapping[str, Any]
    num_scored: int
    num_failed: int
    num_timeouts: int
    parts: Mapping[str, Estimate]
    distribution: tuple[Bin, ...]
    failures: tuple[Failure, ...]
    slowest: tuple[Slow, ...]
    total_seconds: float
    median_seconds: float
    max_seconds: float


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A completion with two different scores. difference: first minus second."""

    file: str
    line: int
    place: str
    first: float
    second: float
    difference: float
    ground_truth: str
    ending: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two sets of scores agree on the completions that both have.

    part: the score that is compared. agreement: the fraction of equal ones, nan where there is no
    pair. num_only_one: completions that only one of them scored. num_higher, num_lower: where the
    first is above, and below, the second. mean_difference: first minus second.
    disagreements: all, the largest difference first.
    """

    first: str
    second: str
    part: str
    num_compared: int
    num_only_one: int
    agreement: Estimate
    num_higher: int
    num_lower: int
    mean_difference: float
    disagreements: tuple[Disagreement, ...]


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """The result of score().

    rollouts: the path, "" for rows. with_stored: each reward function against the stored scores.
    between: the first against the second; None for one. completions: every rollout, in order.
    """

    rollouts: str
    rewards: tuple[RewardSummary, ...]
    with_stored: tuple[Agreement, ...]
    between: Agreement | None
    completions: tuple[ScoredCompletion, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result without the completions, with the first MAX_LISTED disagreements."""
        return {
            "rollouts": self.rollouts,
            "num_rollouts": len(self.completions),
            "rewards": to_plain(self.rewards),
            "with_stored": [_agreement_to_json(each) for each in self.with_stored],
            "between": None if self.between is None else _agreement_to_json(self.between),
        }


def _agreement_to_json(agreement: Agreement) -> dict[str, Any]:
    content: dict[str, Any] = to_plain(agreement)
    content["num_disagreements"] = len(agreement.disagreements)
    content["disagreements"] = content["disagreements"][:MAX_LISTED]
    return content


def summarize_reward(
    completions: Sequence[ScoredCompletion], number: int, *, spec: str, kwargs: Mapping[str, Any]
) -> RewardSummary:
    """Return the summary of one reward function. number: its index in ScoredCompletion.scores."""
    scores = [each.scores[number] for each in completions]
    seconds = [each.seconds[number] for each in completions]
    outcomes = Counter(score.outcome for score in scores)
    slowest = sorted(range(len(scores)), key=lambda index: -seconds[index])[:NUM_SLOWEST]
    return RewardSummary(
        reward=spec,
        kwargs=kwargs,
        num_scored=outcomes["ok"],
        num_failed=outcomes["failed"],
        num_timeouts=outcomes["timeout"],
        parts=_part_means(completions, scores),
        distribution=distribution([score.overall for score in scores if score.outcome == "ok"]),
        failures=_failures(completions, scores),
        slowest=tuple(Slow(completions[index].place, seconds[index], scores[index].outcome) for index in slowest),
        total_seconds=math.fsum(seconds),
        median_seconds=sorted(seconds)[len(seconds) // 2],
        max_seconds=max(seconds),
    )


def _part_means(completions: Sequence[ScoredCompletion], scores: Sequence[Score]) -> dict[str, Estimate]:
    clusters: dict[str, dict[tuple[int | None, str], list[float]]] = {}
    for completion, score in zip(completions, scores, strict=True):
        for name, value in score.parts.items():
            clusters.setdefault(name, {}).setdefault((completion.step, completion.prompt_id), []).append(value)
    return {name: estimate_mean(list(groups.values())) for name, groups in sorted(clusters.items())}


def _failures(completions: Sequence[ScoredCompletion], scores: Sequence[Score]) -> tuple[Failure, ...]:
    """Return the failures by exception and place in the code, or by message if it has no place."""
    failed = [(each, score) for each, score in zip(completions, scores, strict=True) if score.outcome != "ok"]
    counts = Counter(_failure_kind(score) for _, score in failed)
    first = {_failure_kind(score): (each, score) for each, score in reversed(failed)}
    return tuple(
        Failure(first[kind][1].error, first[kind][1].outcome, count, first[kind][0].place)
        for kind, count in counts.most_common()
    )


def _failure_kind(score: Score) -> str:
    """Return what failures of one cause have in common: "ValueError (reward.py:12)"."""
    error = score.error
    if error.endswith(")") and " (" in error:
        return f"{error.partition(':')[0]} {error[error.rindex(' (') :]}"
    return f"{score.outcome} {error[:60]}"


def distribution(values: Sequence[float]) -> tuple[Bin, ...]:
    """Return the distribution of scores: by value if these are few, otherwise in equal bins."""
    counts = Counter(values)
    if len(counts) <= MAX_VALUES:
        return tuple(Bin(value, value, counts[value]) for value in sorted(counts))
    low, high = min(values), max(values)
    width = (high - low) / NUM_BINS
    in_bins = Counter(min(NUM_BINS - 1, int((value - low) / width)) for value in values)
    return tuple(Bin(low + width * i, low + width * (i + 1), in_bins[i]) for i in range(NUM_BINS))


def compare_scores(
    completions: Sequence[ScoredCompletion],
    first: int,
    second: int | None,
    *,
    names: Sequence[str],
    part: str,
    tolerance: float,
) -> Agreement:
    """Return how two scores of the completions agree.

    first, second: indices of reward functions; None: the stored scores. names: of the functions.
    part, tolerance: see score.
    """
    clusters: dict[tuple[int | None, str], list[float]] = {}
    disagreements: list[Disagreement] = []
    num_only_one = num_higher = 0
    differences = 0.0
    for each in completions:
        one = each.scores[first].parts.get(part)
        other = (each.stored if second is None else each.scores[second]).parts.get(part)
        if one is None or other is None:
            num_only_one += (one is None) != (other is None)
            continue
        difference = one - other
        differences += difference
        agrees = abs(difference) <= tolerance
        clusters.setdefault((each.step, each.prompt_id), []).append(float(agrees))
        if not agrees:
            num_higher += difference > 0
            disagreements.append(
                Disagreement(each.file, each.line, each.place, one, other, difference, each.ground_truth, each.ending)
            )
    agreement = estimate_mean(list(clusters.values()))
    disagreements.sort(key=lambda each: -abs(each.difference))
    return Agreement(
        first=names[first],
        second=STORED if second is None else names[second],
        part=part,
        num_compared=agreement.num_values,
        num_only_one=num_only_one,
        agreement=agreement,
        num_higher=num_higher,
        num_lower=len(disagreements) - num_higher,
        mean_difference=differences / agreement.num_values if agreement.num_values else math.nan,
        disagreements=tuple(disagreements),
    )
