"""Scores stored rollouts again with one reward function, or with two, and compares the scores.

Reward functions run in reward workers with time limits, as in training. Does not depend on torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from trigon.config.paths import nearest_path
from trigon.config.schema import RewardConfig
from trigon.data.chat_template import IMAGE_MARKER
from trigon.data.media_files import encoded_files
from trigon.errors import ConfigError, DataError, raises_at_caller
from trigon.report.console import Console
from trigon.report.rollouts import SPLITS, RolloutRow, Split, TurnRecord, find_rollouts, read_rollouts
from trigon.report.run import RunRecord, is_run, open_run
from trigon.rewards.contract import RewardRequest, turn_input
from trigon.rewards.pool import RewardPool
from trigon.system.confinement.options import Confinement, ConfinementLevel
from trigon.system.cpus import count_usable_cpus
from trigon.system.secrets import ARGUMENTS, mask
from trigon.tools.eval.score_results import ScoredCompletion, ScoreResult, compare_scores, summarize_reward
from trigon.types import EncodedMedia, FinishReason, Score

if TYPE_CHECKING:
    from trigon.rewards.callables import RewardFunction

WINDOW = 4096
"""Rollouts that are read, scored and forgotten at a time, but for their scores."""

ENDING_CHARACTERS = 300
"""Characters of a completion's end that are kept, where the answer usually is."""

_DEFAULTS = RewardConfig()

_FINISH_REASONS: Mapping[str, FinishReason] = {name: name for name in get_args(FinishReason)}

# Their JSON is read back as an equal object.
_PLAIN_TYPES = ("str", "int", "float", "bool", "NoneType", "list", "dict", "tuple")


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
        kwargs: keyword arguments of each reward function. None: those of the run's configuration,
            where it has the same reward function.
        splits, steps: of a run folder, which of its rollouts; None: of all steps.
        limit: score the first rollouts only, so many.
        part: the score that is compared, "overall" or another that the functions return.
        tolerance: difference up to which two scores agree.
        num_workers: reward workers of each function; None: as many as usable CPUs.
        timeout_seconds: time limit of each completion.
        max_memory_gb: memory limit of a reward worker with all processes that it starts, in GiB.
        env: environment variables that reward workers get besides those of docs/rewards.md.
        confinement: as worker.reward.confinement.
        console: for progress and warnings; None: standard output.
    Raises: DataError if there are no rollouts; RewardError if a function cannot be loaded, or times
    out for many completions in a row.
    """
    from trigon.rewards.callables import describe_reward, reward_source  # imports cloudpickle

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
    each_kwargs = choose_kwargs(kwargs, rewards, record)
    completions: list[ScoredCompletion] = []
    with ExitStack() as stack:
        pools = []
        for function, arguments in zip(given, each_kwargs, strict=True):
            pool = RewardPool(
                reward_source(function, kwargs=arguments) if callable(function) else function,
                kwargs=arguments,
                num_workers=num_workers or count_usable_cpus(),
                timeout_seconds=timeout_seconds,
                max_failed_fraction=1.0,  # failures are a result here
                passed_variables=env,
                confinement=Confinement(level=confinement, max_memory_bytes=int(max_memory_gb * 2**30)),
            )
            stack.callback(pool.close)
            pools.append(pool)
        for pool in pools:
            pool.ready()
        advance = stack.enter_context(console.progress("score", limit))
        is_lossy = False
        remaining = stored if limit is None else islice(stored, limit)
        for window in _windows(remaining):
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
    given: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, rewards: Sequence[str], record: RunRecord | None
) -> list[dict[str, Any]]:
    """Return the keyword arguments of each reward function. See score."""
    own = [given] if isinstance(given, Mapping) else list(given or ())
    if len(own) > len(rewards):
        raise ConfigError(f"keyword arguments are given {len(own)} times for {len(rewards)} reward functions")
    return [*map(dict, own), *(run_kwargs(record, spec) for spec in rewards[len(own) :])]


def run_kwargs(record: RunRecord | None, spec: str) -> dict[str, Any]:
    """Return the keyword arguments of a run's reward function, if it is this one; otherwise {}."""
    reward: Any = {} if record is None else record.config()
    for key in ("worker", "reward"):
        reward = reward.get(key) if isinstance(reward, dict) else None
    if not isinstance(reward, dict):
        return {}
    functions = reward.get("reward_function")
    if isinstance(functions, list):  # of entries with arguments of their own, see WeightedReward
        own = [each.get("kwargs") for each in functions if isinstance(each, dict) and each.get("function") == spec]
        return dict(own[0] or {}) if own else {}
    return dict(reward.get("reward_function_kwargs") or {}) if functions == spec else {}


def name_rewards(rewards: Sequence[str]) -> list[str]:
    """Return short names of reward functions: file and function, and the folder if it differs."""
    short = [re.sub(r"^.*/", "", spec) for spec in rewards]
    return short if len(set(short)) == len(short) else list(rewards)
