"""Scores stored rollouts again with one reward function, or with two, and compares the scores.

Reward functions run in reward workers with time limits, as in training. Does not depend on torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from trigon.config.files import is_same_code
from trigon.config.paths import nearest_path
from trigon.config.schema import RewardConfig
from trigon.data.chat_template import IMAGE_MARKER
from trigon.data.media_files import encoded_files
from trigon.errors import ConfigError, DataError, raises_at_caller
from trigon.report.console import Console
from trigon.report.rollouts import SPLITS, RolloutRow, Split, TurnRecord, find_rollouts, read_rollouts, to_json
from trigon.report.run import RunRecord, is_run, open_run
from trigon.rewards.callables import describe_reward, reward_terms
from trigon.rewards.contract import RewardRequest, turn_input
from trigon.rewards.pool import RewardPool
from trigon.system.confinement.options import Confinement, ConfinementLevel
from trigon.system.machine import count_usable_cpus
from trigon.system.secrets import ARGUMENTS, mask
from trigon.tools.eval.statistics import Estimate, estimate_mean
from trigon.types import EncodedMedia, FinishReason, Score

if TYPE_CHECKING:
    from trigon.rewards.callables import RewardFunction

STORED = "stored"
"""The name of the scores in the rollouts file."""

MAX_VALUES = 12
"""Scores with at most this many different values are counted by value, others in bins."""

NUM_BINS = 10
NUM_SLOWEST = 10
MAX_LISTED = 1000
"""Disagreements and failures in the JSON; ScoreResult.completions has all."""

WINDOW = 4096
"""Rollouts that are read, scored and forgotten at a time, but for their scores."""

ENDING_CHARACTERS = 300
"""Characters of a completion's end that are kept, where the answer usually is."""

_DEFAULTS = RewardConfig()
_REWARD, _KWARGS = "worker.reward.reward_function", "worker.reward.reward_function_kwargs"
_VAL_REWARD = "worker.reward.val_reward_function"
_FINISH_REASONS: Mapping[str, FinishReason] = {name: name for name in get_args(FinishReason)}
# Their JSON is read back as an equal object.
_PLAIN_TYPES = ("str", "int", "float", "bool", "NoneType", "list", "dict", "tuple")


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """A stored rollout with its new scores.

    file, line: where it is; "" for rows that were given. step: None if unknown. stored: its score
    in the file. scores, seconds: of each reward function, its scores and the seconds that it took.
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

    The upper end belongs to the next bin, except in the last one.
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

    parts: the mean of each score, with an interval that is clustered by prompt. distribution: the
    distribution of "overall". failures: failures by kind, the most frequent first. total_seconds,
    median_seconds,
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
            "rewards": to_json([asdict(each) for each in self.rewards]),
            "with_stored": [_agreement_to_json(each) for each in self.with_stored],
            "between": None if self.between is None else _agreement_to_json(self.between),
        }


def _agreement_to_json(agreement: Agreement) -> dict[str, Any]:
    content: dict[str, Any] = to_json(asdict(agreement))
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

    first, second: indices of reward functions; None: the stored scores. names: the names of the
    functions.
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


@dataclass(frozen=True, slots=True)
class _Stored:
    """A stored rollout and where it is. step: None if the file's name says none."""

    file: str
    line: int
    step: int | None
    split: str
    row: RolloutRow


@raises_at_caller
def score(
    rollouts: str | Path | Iterable[RolloutRow],
    reward: str | RewardFunction | Sequence[str | RewardFunction],
    *,
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    splits: Collection[Split] = SPLITS,
    steps: Container[int] | None = None,
    limit: int | None = None,
    part: str = "overall",
    tolerance: float = 1e-6,
    num_workers: int | None = None,
    timeout_seconds: float = _DEFAULTS.timeout_seconds,
    max_memory_gb: float = _DEFAULTS.max_memory_gb,
    env: Sequence[str] = (),
    confinement: ConfinementLevel = "default",
    console: Console | None = None,
) -> ScoreResult:
    """Score rollouts with one or two reward functions, and return the scores and how they differ.

    Args:
        rollouts: a run folder, a rollouts file, or rows that were read or made.
        reward: `file.py:function`, a shipped name or a function; or two of them, which are
            compared. One is compared with the stored scores.
        kwargs: keyword arguments of each reward function. None: the arguments in the run's
            configuration, where it has the same reward function.
        splits, steps: which rollouts of a run folder; None: the rollouts of all steps.
        limit: score only the first `limit` rollouts; for a function that scores groups, also the
            others of the last group.
        part: the score that is compared, "overall" or another that the functions return.
        tolerance: difference up to which two scores agree.
        num_workers: reward workers of each function; None: as many as usable CPUs.
        timeout_seconds: time limit of each completion.
        max_memory_gb: memory limit of a reward worker with all processes that it starts, in GiB.
        env: environment variables that reward workers get besides the ones in docs/rewards.md.
        confinement: as worker.reward.confinement.
        console: for progress and warnings; None: standard output.
    Raises: DataError if there are no rollouts; RewardError if a function cannot be loaded, or times
    out for many completions in a row.
    """
    console = console or Console()
    given = [reward] if isinstance(reward, str) or callable(reward) else list(reward)
    if not 1 <= len(given) <= 2:
        raise ConfigError(f"{len(given)} reward functions are given; score takes one or two")
    rewards = [describe_reward(each) if callable(each) else each for each in given]
    record = None
    if isinstance(rollouts, str | Path):
        record, stored = open_rollouts(Path(rollouts), splits=splits, steps=steps)
    else:
        stored = (_Stored("", number, None, "", row) for number, row in enumerate(rollouts, start=1))
    each_kwargs = choose_kwargs(kwargs, rewards, record, splits)
    completions: list[ScoredCompletion] = []
    with ExitStack() as stack:
        pools = []
        for function, arguments in zip(given, each_kwargs, strict=True):
            pool = RewardPool(
                reward_terms(function, kwargs=arguments),
                num_workers=num_workers or count_usable_cpus(),
                timeout_seconds=timeout_seconds,
                max_failed_fraction=1.0,  # failures are a result here
                passed_variables=env,
                confinement=Confinement(level=confinement, max_memory_bytes=int(max_memory_gb * 2**30)),
            )
            stack.callback(pool.close)
            pools.append(pool)
        styles = [pool.ready() for pool in pools]
        advance = stack.enter_context(console.progress("score", limit))
        is_lossy = False
        if limit is not None:
            stored = _first(stored, limit, whole=any(style.unit == "group" for style in styles))
        for window in _windows(stored):
            types = [each.row.ground_truth_type for group in window for each in group]
            is_lossy = is_lossy or any(each not in _PLAIN_TYPES for each in types)
            completions += score_window(window, pools)
            advance(len(types))
    if not completions:
        raise DataError(f"there are no rollouts to score in {rollouts}")
    if is_lossy:
        console.warn(
            "some ground truths had a type that JSON does not keep (ground_truth_type): the reward function got them "
            "as text"
        )
    compare = partial(compare_scores, completions, names=name_rewards(rewards), part=part, tolerance=tolerance)
    return ScoreResult(
        rollouts=str(rollouts) if isinstance(rollouts, str | Path) else "",
        rewards=tuple(
            summarize_reward(completions, number, spec=spec, kwargs=mask(ARGUMENTS, arguments))
            for number, (spec, arguments) in enumerate(zip(rewards, each_kwargs, strict=True))
        ),
        with_stored=tuple(compare(number, None) for number in range(len(rewards))),
        between=compare(0, 1) if len(rewards) > 1 else None,
        completions=tuple(completions),
    )


def open_rollouts(
    path: Path, *, splits: Collection[Split], steps: Container[int] | None
) -> tuple[RunRecord | None, Iterator[_Stored]]:
    """Return the run of a path, if it has one, and its rollouts.

    path: a rollouts file, of which splits and steps choose nothing, a run folder, or a folder that
    contains one run.
    Raises: DataError.
    """
    if path.is_file():
        folder = path.absolute().parent.parent
        record = RunRecord(folder) if path.absolute().parent.name == "rollouts" and is_run(folder) else None
        known = {file.path.name: (file.step, file.split) for file in find_rollouts(folder)} if record else {}
        step, split = known.get(path.name, (None, ""))
        return record, _read(path, step, split)
    if not path.exists():
        raise DataError(f"there is no file or run {path}{nearest_path(str(path))}")
    record = open_run(path)
    files = record.rollout_files()
    chosen = [file for file in files if file.split in splits and (steps is None or file.step in steps)]
    if not chosen:
        there = ", ".join(sorted({f"{file.split} of step {file.step}" for file in files})[:5])
        raise DataError(
            f"{record.path} has no rollouts of the chosen splits and steps; "
            + (f"there are {len(files)} files: {there} ..." if files else "it has none at all")
        )
    return record, (row for file in chosen for row in _read(file.path, file.step, file.split))


def _read(path: Path, step: int | None, split: str) -> Iterator[_Stored]:
    for line, row in enumerate(read_rollouts(path), start=1):
        yield _Stored(str(path), line, step, split, row)


def _first(stored: Iterable[_Stored], limit: int, *, whole: bool) -> Iterator[_Stored]:
    """Yield the first rollouts. whole: with all of the last group, on which a score depends."""
    last: tuple[str, str] | None = None
    for number, each in enumerate(stored, start=1):
        group = (each.file, each.row.prompt_id)
        if number > limit and not (whole and group == last):
            return
        last = group
        yield each


def _windows(stored: Iterable[_Stored]) -> Iterator[list[list[_Stored]]]:
    """Yield windows of about WINDOW rollouts, as groups: consecutive rollouts of one prompt."""
    window: list[list[_Stored]] = []
    for _, group in groupby(stored, key=lambda each: (each.file, each.row.prompt_id)):
        window.append(list(group))
        if sum(map(len, window)) >= WINDOW:
            yield window
            window = []
    if window:
        yield window


def score_window(window: Sequence[Sequence[_Stored]], pools: Sequence[RewardPool]) -> list[ScoredCompletion]:
    """Return these rollouts with the scores of each pool, which work at the same time."""
    rollouts = [stored for group in window for stored in group]
    with ExitStack() as stack:
        scorings = [stack.enter_context(pool.scoring(num_completions=len(rollouts))) for pool in pools]
        start = 0
        for group in window:
            requests = _requests(group)
            for scoring in scorings:
                scoring.add(start, requests)
            start += len(group)
        results = [(scoring.result(), scoring.seconds()) for scoring in scorings]
    return [
        ScoredCompletion(
            file=stored.file,
            line=stored.line,
            step=stored.step,
            split=stored.split,
            prompt_id=stored.row.prompt_id,
            sample=stored.row.sample,
            stored=Score(stored.row.reward, stored.row.parts, _outcome(stored), stored.row.error),
            scores=tuple(scores[index] for scores, _ in results),
            seconds=tuple(seconds[index] for _, seconds in results),
            ground_truth=str(stored.row.ground_truth)[:ENDING_CHARACTERS],
            ending=stored.row.response[-ENDING_CHARACTERS:],
        )
        for index, stored in enumerate(rollouts)
    ]


def _outcome(stored: _Stored) -> Any:
    if stored.row.outcome not in ("ok", "failed", "timeout"):
        raise DataError(f"{stored.file}, line {stored.line}: unknown outcome {stored.row.outcome!r}")
    return stored.row.outcome


def _requests(group: Sequence[_Stored]) -> list[RewardRequest]:
    """Return the completions of one prompt, as they were sampled."""
    media = partial(_stored_media, group[0])  # one for the group, so that its images are read once
    return [
        RewardRequest(
            response=row.response,
            response_length=row.num_tokens,
            ground_truth=row.ground_truth,
            prompt=row.prompt,
            finish_reason=_FINISH_REASONS.get(row.finish_reason, "stop"),
            row=row.row,
            turns=[turn_input(each.observation, each.text, each.reward, each.image_sizes) for each in row.turns],
            media=media,
            turn_media=[partial(_stored_observation, stored, each) for each in row.turns],
            image_sizes=row.image_sizes,
        )
        for stored in group
        for row in [stored.row]
    ]


def _stored_media(stored: _Stored) -> EncodedMedia | None:
    """Read the images of a stored rollout. Raises: OSError; DataError if there are none."""
    row = stored.row
    if not row.images:
        return None
    return _read_stored(stored, row.image_files, f"{row.prompt_id} has images")


def _stored_observation(stored: _Stored, turn: TurnRecord) -> EncodedMedia | None:
    """Read the images in the observation of a turn. Raises: as _stored_media."""
    if IMAGE_MARKER not in turn.observation:
        return None
    if turn.images:  # of a row that was not read from a file
        return encoded_files(turn.images, "image")
    return _read_stored(stored, turn.image_files, f"an observation for {stored.row.prompt_id} has images")


def _read_stored(stored: _Stored, names: Sequence[str], described: str) -> EncodedMedia | None:
    if not names or not stored.file:
        raise DataError(f"{described}, and the run stored none (trainer.save_images)")
    folder = Path(stored.file).absolute().parent.parent
    return encoded_files(((folder / name).read_bytes() for name in names), "image")


def choose_kwargs(
    given: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    rewards: Sequence[str],
    record: RunRecord | None,
    splits: Collection[Split],
) -> list[dict[str, Any]]:
    """Return the keyword arguments of each reward function. See score."""
    own = [given] if isinstance(given, Mapping) else list(given or ())
    if len(own) > len(rewards):
        raise ConfigError(f"keyword arguments are given {len(own)} times for {len(rewards)} reward functions")
    of_run = [] if record is None or len(own) == len(rewards) else run_functions(record, splits)
    sources = {} if record is None else record.local_sources() or {}
    return [
        *map(dict, own),
        *(
            next((kwargs for function, kwargs in of_run if is_same_code(spec, function, sources)), {})
            for spec in rewards[len(own) :]
        ),
    ]


def run_functions(record: RunRecord, splits: Collection[Split]) -> list[tuple[str, dict[str, Any]]]:
    """Return each reward function of a run with its keyword arguments.

    First those by which the rollouts of these splits were scored.
    """
    options = record.options()
    kwargs = {_REWARD: dict(options.get(_KWARGS) or {}), _VAL_REWARD: {}}
    names = (_VAL_REWARD, _REWARD) if set(splits) == {"validation"} else (_REWARD, _VAL_REWARD)
    found: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        match options.get(name):
            case str(function):
                found.append((function, kwargs[name]))
            case list(entries):  # each has arguments of its own, see WeightedReward
                found += [
                    (str(each["function"]), dict(each.get("kwargs") or {}))
                    for each in entries
                    if isinstance(each, dict) and "function" in each
                ]
    return found


def name_rewards(rewards: Sequence[str]) -> list[str]:
    """Return short names of reward functions: file and function, and the folder if it differs."""
    short = [re.sub(r"^.*/", "", spec) for spec in rewards]
    return short if len(set(short)) == len(short) else list(rewards)
