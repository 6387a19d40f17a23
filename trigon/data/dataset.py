"""A dataset whose every row has been looked at: rows in, prompts out, and a report of those that were set aside.

Knows how many rows may be bad and what to say then. Refuses to know file formats, images, tokens, and in which order
prompts are drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from trigon.data.bad_rows import Reason, UnusableRow
from trigon.data.prompts import PromptBuilder
from trigon.data.sources import Source, open_source
from trigon.errors import DataError
from trigon.types import Prompt

_ROWS_PER_TASK = 16
_NUM_EXAMPLES = 3


class Draw(NamedTuple):
    """One prompt of an epoch. number: of the prompt. time: how often the epoch has drawn it by then, from 1."""

    number: int
    time: int


class Prompts(Protocol):
    """Usable prompts, numbered from 0, of one dataset (PromptSet) or several (mixture.MixedPrompts)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt:
        """Build a prompt. Raises: UnusableRow if its row has become so since the start."""
        ...

    def index_of(self, prompt_id: str) -> int | None:
        """Return the number of the prompt with this id, None if there is no such usable prompt."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows, usable or not."""
        ...

    @property
    def report(self) -> Mapping[Reason, int]:
        """How many rows were set aside at the start, by reason."""
        ...

    @property
    def max_bad_row_fraction(self) -> float:
        """The share of rows, overlong ones not counted, that may be bad."""
        ...

    @property
    def shows_videos(self) -> bool:
        """Whether there may be videos among them."""
        ...

    @property
    def fingerprint(self) -> str:
        """The same for the same prompts drawn as often, wherever they lie."""
        ...

    @property
    def prompts_per_epoch(self) -> int:
        """How many prompts an epoch draws, before it is cut into whole batches."""
        ...

    def of_epoch(self, epoch: int, *, seed: int, shuffle: bool) -> list[Draw]:
        """Return what an epoch draws, not shuffled yet. shuffle: whether it is chance which, where it is not all."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PromptSet:
    """The usable prompts of a dataset, numbered from 0 in its order: `prompts[i]` builds one, images and all. Satisfies
    Prompts.

    num_rows: rows in the dataset, usable or not. row_indices: the row of each prompt.
    prompt_lengths: the tokens of each prompt, image tokens included.
    report: how many rows were set aside at the start, by reason. examples: what was said of the first few of each.
    max_bad_row_fraction: the share of rows, overlong ones not counted, that may be bad.
    fingerprint: the same for the same usable rows with the same content, wherever they lie.
    """

    name: str
    num_rows: int
    row_indices: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    report: Mapping[Reason, int]
    examples: Mapping[Reason, tuple[str, ...]]
    max_bad_row_fraction: float
    fingerprint: str
    builder: PromptBuilder
    _rows: Any

    def __len__(self) -> int:
        return len(self.row_indices)

    @property
    def shows_videos(self) -> bool:
        """See Prompts."""
        return self.builder.video_key in self._rows.column_names

    def index_of(self, prompt_id: str) -> int | None:
        """See Prompts."""
        name, _, row = prompt_id.rpartition(":")
        if name != self.name or not row.isdigit() or int(row) not in self.row_indices:
            return None
        return self.row_indices.index(int(row))

    def __getitem__(self, index: int) -> Prompt:
        """Build a prompt. Raises: UnusableRow if its row has become so since the start; IndexError beyond the end."""
        row_index = self.row_indices[index]
        return self.builder.build(self._rows[row_index], f"{self.name}:{row_index}")

    @property
    def prompts_per_epoch(self) -> int:
        """How many prompts an epoch draws: all of them, once."""
        return len(self)

    def of_epoch(self, epoch: int, *, seed: int, shuffle: bool) -> list[Draw]:
        """Return what every epoch draws: all of them, once."""
        return [Draw(index, 1) for index in range(len(self))]


def open_prompts(
    spec: str,
    builder: PromptBuilder,
    *,
    filter_overlong_prompts: bool,
    max_bad_row_fraction: float,
    num_workers: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> PromptSet:
    """Open a dataset and look at every row: its text, its markers, its token count, and each image, decoded.

    Args:
        spec: `path_or_hub_id[@split]`, see sources.open_source.
        filter_overlong_prompts: set rows above max_prompt_length aside; False: refuse the dataset for one.
        max_bad_row_fraction: refuse the dataset if more than this share of its rows is bad for other reasons.
        num_workers: threads.
        on_progress: hears (rows done, rows in all), in the calling thread.
    Raises: DataError.
    """
    source = open_source(spec)
    builder = builder.rooted(source.folder)
    builder.check_columns(source.rows.column_names)
    _check_media_columns(source, builder)
    findings = _scan_rows(source, builder, num_workers=num_workers, on_progress=on_progress)
    usable = [(index, finding) for index, finding in enumerate(findings) if finding.problem is None]
    report: dict[Reason, int] = {}
    examples: dict[Reason, tuple[str, ...]] = {}
    for finding in findings:
        if finding.problem is not None:
            reason = finding.problem.reason
            report[reason] = report.get(reason, 0) + 1
            examples[reason] = (*examples.get(reason, ()), str(finding.problem))[:_NUM_EXAMPLES]
    _check_report(spec, report, examples, len(findings), filter_overlong_prompts, max_bad_row_fraction)
    digest = hashlib.sha256()
    for index, finding in usable:
        digest.update(b"%d:%s" % (index, finding.digest))
    return PromptSet(
        name=source.name,
        num_rows=len(findings),
        row_indices=tuple(index for index, _ in usable),
        prompt_lengths=tuple(finding.num_tokens for _, finding in usable),
        report=report,
        examples=examples,
        max_bad_row_fraction=max_bad_row_fraction,
        fingerprint=digest.hexdigest()[:32],
        builder=builder,
        _rows=source.rows,
    )


def check_bad_fraction(num_bad: int, num_rows: int, allowed: float, complaints: Sequence[str]) -> None:
    """Raise DataError if more than the allowed share of rows is bad, with what was said of them."""
    if num_bad > allowed * num_rows:
        share = f"{num_bad} of {num_rows} rows cannot be used, more than data.max_bad_row_fraction={allowed:g} allows"
        raise DataError("\n  ".join([f"{share}; mend them, or raise it:", *complaints]))


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one look at a row showed. num_tokens: 0 where there is a problem. digest: of the row's content."""

    num_tokens: int
    problem: UnusableRow | None
    digest: bytes


def _scan_rows(
    source: Source, builder: PromptBuilder, *, num_workers: int, on_progress: Callable[[int, int], None] | None
) -> list[_Finding]:
    total = len(source.rows)
    findings: list[_Finding] = []
    tasks = [range(start, min(start + _ROWS_PER_TASK, total)) for start in range(0, total, _ROWS_PER_TASK)]
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="rows")
    try:
        for part in pool.map(lambda indices: [_scan_row(source, builder, index) for index in indices], tasks):
            findings += part
            if on_progress is not None:
                on_progress(len(findings), total)
    finally:
        pool.shutdown(cancel_futures=True)
    return findings


def _scan_row(source: Source, builder: PromptBuilder, index: int) -> _Finding:
    row = source.rows[index]
    digest = hashlib.sha256()
    _feed(digest, row)
    try:
        return _Finding(builder.check(row, f"{source.name}:{index}"), None, digest.digest())
    except UnusableRow as problem:
        return _Finding(0, problem, digest.digest())


def _feed(digest: Any, value: Any) -> None:
    """Feed a row's content to a hash: every key, number and text, and encoded images byte by byte."""
    match value:
        case bytes():
            digest.update(b"bytes %d " % len(value))
            digest.update(value)
        case dict():
            for key in sorted(value):
                _feed(digest, key)
                _feed(digest, value[key])
        case list():
            digest.update(b"list %d " % len(value))
            for part in value:
                _feed(digest, part)
        case _:
            digest.update(repr(value).encode("utf-8", "backslashreplace") + b" ")


def _check_media_columns(source: Source, builder: PromptBuilder) -> None:
    """Refuse a dataset whose images or videos would be overlooked."""
    for kind, key, columns, is_seen in (
        ("image", builder.image_key, source.image_columns, builder.image_processor is not None),
        ("video", builder.video_key, source.video_columns, builder.video_processor is not None),
    ):
        if is_seen and columns and key not in source.rows.column_names:
            found = " and ".join(repr(column) for column in columns)
            raise DataError(
                f"the dataset has no column {key!r}, but {kind}s in {found}; "
                f"set data.{kind}_key={columns[0]}, or drop them to train on text"
            )


def _check_report(
    spec: str,
    report: Mapping[Reason, int],
    examples: Mapping[Reason, tuple[str, ...]],
    num_rows: int,
    filter_overlong_prompts: bool,
    max_bad_row_fraction: float,
) -> None:
    num_overlong = report.get("overlong", 0)
    if num_overlong and not filter_overlong_prompts:
        raise DataError(
            f"{spec}: {num_overlong} of {num_rows} prompts are too long ({examples['overlong'][0]}); "
            "raise data.max_prompt_length, lower data.max_pixels, or set data.filter_overlong_prompts=true"
        )
    complaints = [
        f"{count} x {reason}: {example}{' ...' if count > 1 else ''}"
        for reason, count in report.items()
        for example in examples[reason][:1]
    ]
    num_bad = sum(report.values()) - num_overlong
    check_bad_fraction(num_bad, num_rows, max_bad_row_fraction, [spec, *complaints])
    if num_bad + num_overlong == num_rows:
        raise DataError("\n  ".join([f"{spec}: none of its {num_rows} rows can be used:", *complaints]))
