"""The lines of the rollouts files of a run: one completion each, with its prompt and its score.

docs/view.md documents the schema. Lines of other versions are refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite, nan
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from trigon.errors import DataError
from trigon.system.files import encode_json, parse_json, to_plain
from trigon.types import Completion, EncodedMedia, ImageSizes, RolloutGroup, TokenLogprobs, TrainGroup, TrainSequence

SCHEMA_VERSION = 5
"""Version of the lines."""

IMAGES = "images"
"""The folder of the stored images, below the run folder."""

Split = Literal["train", "filtered", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
Filtered = Literal["", "low", "high", "unscored", "surplus"]

_FILE_PREFIX: dict[Split, str] = {"train": "step", "filtered": "filtered", "validation": "validation"}
_SPLIT: dict[str, Split] = {prefix: split for split, prefix in _FILE_PREFIX.items()}
_NAME = re.compile(r"(step|filtered|validation)_(\d+)\.jsonl")


Number = Annotated[float, BeforeValidator(lambda value: nan if value is None else value)]
"""A number that was not finite is null in a line, and nan here."""


Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that SQLite and Arrow can hold."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The sampled tokens of a completion. All lists have one entry per token.

    ids: token ids. texts: each token decoded; their concatenation is the completion with its
    special tokens, except that a character of several tokens is in the last of them.
    sampling_logprobs: log-probabilities by the rollout engine. advantages: as used by the update.
    old_logprobs: log-probabilities by the trainer, before the update. entropy: entropy of the
    trainer's next-token distribution, in nats. values, returns: the critic's values before the
    update, and what it learns them to be; not written without a critic.
    A list is None where nothing computed it; a number is None where it was not finite.
    """

    ids: list[int]
    texts: list[str]
    sampling_logprobs: list[float | None]
    advantages: list[float | None] | None = None
    old_logprobs: list[float | None] | None = None
    entropy: list[float | None] | None = None
    values: list[float | None] | None = None
    returns: list[float | None] | None = None


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A turn of a completion that has several, or that observed something.

    observation: what the model observed before it, with one marker for each image; "" for nothing.
    text: what the model sampled, in num_tokens tokens. reward: what the environment gave; None
    without one. image_files: the images of the observation, as files below the run folder; empty
    where images are not stored. images: the same as encoded files, until they are stored; not
    written. image_sizes: (width, height) of each as the model sees it.
    """

    observation: str
    text: str
    num_tokens: int
    reward: Number | None = None
    image_files: tuple[str, ...] = ()
    images: tuple[bytes, ...] = ()
    image_sizes: ImageSizes = ()


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A line of a rollouts file: one completion with its prompt and score.

    Texts are raw: pass them through terminal.sanitize before printing them.
    sample: index within the group. reward: Score.overall; parts, outcome and error: as in
    Score. num_tokens: number of sampled tokens. images: the source of each image. ground_truth: as
    in the dataset; ground_truth_type: its Python type, which JSON may not keep.
    row: the columns of the dataset's row without images and videos, as passed to the reward
    function. filtered: why no step learns from its group; empty if one does, and for validations:
    low, high and unscored by online filtering, surplus if there were more groups than needed.
    image_files: each image as a file below the run folder; empty where images are not stored.
    advantage: mean over the completion's tokens; None where no step learns from it.
    tokens: None where per-token values are not stored. num_prompt_tokens: includes the tokens
    of the images.
    turns: the turns of an episode; empty for a completion of one turn without observation and
    reward.
    policy_versions: as in Completion. image_sizes: as in Prompt.
    """

    prompt_id: str
    sample: Integer
    prompt: str
    response: str
    reward: Number
    parts: dict[str, Number]
    outcome: str
    error: str
    finish_reason: str
    num_tokens: Integer
    policy_version: Integer
    images: tuple[str, ...]
    ground_truth: Any
    ground_truth_type: str
    row: dict[str, Any]
    filtered: Filtered
    image_files: tuple[str, ...] = ()
    advantage: Number | None = None
    tokens: TokenRecord | None = None
    num_prompt_tokens: Integer = 0
    turns: tuple[TurnRecord, ...] = ()
    policy_versions: tuple[tuple[int, int], ...] = ()
    image_sizes: ImageSizes = ()
    version: int = SCHEMA_VERSION


_ROW = TypeAdapter(RolloutRow)


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A rollouts file of a run. step: the step that it belongs to."""

    path: Path
    step: int
    split: Split


def rollout_rows(
    groups: Sequence[RolloutGroup],
    *,
    filtered: Filtered = "",
    learned: Sequence[TrainGroup] | None = None,
    recorded: Mapping[int, Sequence[TokenLogprobs] | None] | None = None,
) -> list[RolloutRow]:
    """Return one row per rollout, in order, without image files and with empty texts of tokens.

    learned: what the update learns from, for each group; None if nothing is learned from them.
    recorded: the outputs of the update for each rollout, by the index of a group whose tokens are
    added; None: not computed.
    """
    recorded = {} if recorded is None else recorded
    rows = []
    for number, group in enumerate(groups):
        outputs = recorded.get(number)
        for sample, rollout in enumerate(group.rollouts):
            completion, prompt, score = rollout.completion, group.prompt, rollout.score
            sequence = None if learned is None else learned[number].sequences[sample]
            output = None if outputs is None else outputs[sample]
            rows.append(
                RolloutRow(
                    prompt_id=prompt.prompt_id,
                    sample=sample,
                    prompt=prompt.text,
                    response=completion.text,
                    reward=score.overall,
                    parts=dict(score.parts),
                    outcome=score.outcome,
                    error=score.error,
                    finish_reason=completion.finish_reason,
                    num_tokens=completion.num_sampled,
                    policy_version=completion.policy_version,
                    images=prompt.image_refs,
                    ground_truth=prompt.ground_truth,
                    ground_truth_type=type(prompt.ground_truth).__name__,
                    row=dict(prompt.row),
                    filtered=filtered,
                    advantage=_mean_advantage(sequence),
                    tokens=_token_record(completion, sequence, output) if number in recorded else None,
                    num_prompt_tokens=len(prompt.token_ids),
                    turns=_turns(completion),
                    policy_versions=completion.policy_versions,
                    image_sizes=prompt.image_sizes,
                )
            )
    return rows


def _token_record(completion: Completion, sequence: TrainSequence | None, output: TokenLogprobs | None) -> TokenRecord:
    # With several updates in a step, the loss uses the log-probabilities of the sequence.
    old = None if output is None else output.logprobs
    if sequence is not None and sequence.old_logprobs is not None:
        old = sequence.old_logprobs
    return TokenRecord(
        ids=list(completion.sampled_ids),
        texts=[],
        sampling_logprobs=_rounded(completion.sampling_logprobs),
        advantages=_rounded(sequence.advantages.tolist()) if _trains(sequence) else None,
        old_logprobs=None if old is None else _rounded(old.tolist()),
        entropy=None if output is None else _rounded(output.entropy.tolist()),
        values=None if sequence is None or sequence.values is None else _rounded(sequence.values.tolist()),
        returns=None if sequence is None or sequence.returns is None else _rounded(sequence.returns.tolist()),
    )


def _turns(completion: Completion) -> tuple[TurnRecord, ...]:
    """Return the turns of an episode, with their images as encoded files; () without any."""
    if not completion.has_turns:
        return ()
    files = iter(completion.vision.encoded if isinstance(completion.vision, EncodedMedia) else ())
    return tuple(
        TurnRecord(
            turn.observation,
            turn.text,
            turn.end - turn.start,
            turn.reward,
            images=tuple(itertools.islice(files, turn.num_images)),
            image_sizes=turn.image_sizes,
        )
        for turn in completion.turns
    )


def _trains(sequence: TrainSequence | None) -> TypeGuard[TrainSequence]:
    """Return whether the loss uses any token of the sequence."""
    return sequence is not None and bool(sequence.loss_mask.any())


def _mean_advantage(sequence: TrainSequence | None) -> float | None:
    return float(sequence.advantages.mean()) if _trains(sequence) else None


def _rounded(values: Iterable[float]) -> list[float | None]:
    """Return values with 6 significant digits: float32 has 7, and JSON would take 17."""
    return [float(f"{value:.6g}") for value in values]


def file_name(step: int, split: Split) -> str:
    """Return the name of a rollouts file within the folder `rollouts`."""
    return f"{_FILE_PREFIX[split]}_{step:06d}.jsonl"


def find_rollouts(folder: Path) -> list[RolloutFile]:
    """Return the rollouts files of a run folder, by step, then training before validation."""
    matches = [(path, _NAME.fullmatch(path.name)) for path in (folder / "rollouts").glob("*.jsonl")]
    files = [RolloutFile(path, int(match[2]), _SPLIT[match[1]]) for path, match in matches if match]
    order = list(_FILE_PREFIX)
    return sorted(files, key=lambda file: (file.step, order.index(file.split)))


def read_rollouts(path: Path) -> Iterator[RolloutRow]:
    """Yield the rows of a rollouts file.

    Raises: DataError if a line is no rollout of this version.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield parse_row(line, f"{path}, line {number}")


def parse_row(line: bytes, place: str) -> RolloutRow:
    """Return the rollout in a line. place: where the line is, for errors. Raises: DataError."""
    try:
        content = parse_json(line)
        version = content.get("version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise DataError(
                f"{place} has schema version {version}, and this version of trigon reads version {SCHEMA_VERSION}: "
                "use the version of trigon that wrote it"
            )
        return _ROW.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise DataError(f"{place} is not a rollout ({field}: {first['msg']}): {line[:80]!r}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{place} is not a rollout ({type(error).__name__}: {error}): {line[:80]!r}") from error


def to_json_line(content: Mapping[str, Any]) -> bytes:
    """Return content as a line of JSON: numbers that are not finite as null, other objects as str.

    Dates and arrays are what reward functions get of them.
    Bytes, such as a column of sounds, are replaced by their number.
    """
    return encode_json(json.dumps(to_json(content), ensure_ascii=False, allow_nan=False) + "\n")


def row_to_line(row: RolloutRow) -> bytes:
    """Return a rollout as a line of a rollouts file."""
    return to_json_line(_fields(row))


def _fields(value: RolloutRow | TokenRecord | TurnRecord) -> dict[str, Any]:
    names = [each.name for each in fields(value)]
    if isinstance(value, TurnRecord):
        names.remove("images")
    if isinstance(value, TokenRecord) and value.values is None:
        names = [name for name in names if name not in ("values", "returns")]
    return {name: getattr(value, name) for name in names}


def to_json(value: Any) -> Any:
    """Return a value as JSON can represent it: see to_json_line."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if isfinite(value) else None
        case TokenRecord() | TurnRecord():
            return to_json(_fields(value))
        case Mapping():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
        case bytes():
            return f"{len(value)} bytes"
        case _:
            try:
                return to_json(to_plain(value))
            except TypeError:  # a type that reward functions do not get
                return str(value)
