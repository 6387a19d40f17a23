"""Opens a dataset: numbers its usable rows as prompts, and counts the skipped ones by reason.

Decides how many rows may be bad. File formats, image decoding, tokenization and the order of
prompts are in other modules.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trigon.data.bad_rows import Reason, UnusableRow
from trigon.data.content import DatasetContent, update_digest
from trigon.data.prompts import PromptBuilder
from trigon.data.sources import Source, open_source
from trigon.errors import DataError
from trigon.system.content import text_digest
from trigon.types import EncodedMedia, Prompt

_ROWS_PER_TASK = 16
_NUM_EXAMPLES = 3


class DrawnPrompt(NamedTuple):
    """One entry of an epoch's order.

    prompt_index: of the prompt. occurrence: how often the epoch has drawn it so far, from 1.
    """

    prompt_index: int
    occurrence: int


class SkippedRow(NamedTuple):
    """A row that cannot be used. row: its index. message: begins with its name, "train:17"."""

    row: int
    reason: Reason
    message: str


class Prompts(Protocol):
    """The usable prompts, numbered from 0, of one dataset (PromptSet) or several (MixedPrompts)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt:
        """Build a prompt.

        Raises: UnusableRow if its row has become unusable since the dataset was opened.
        """
        ...

    def image_files(self, index: int) -> list[bytes]:
        """Return the images of a prompt as encoded files; none with videos.

        May be called from any thread. Raises: as building the prompt.
        """
        ...

    def index_of(self, prompt_id: str) -> int | None:
        """Return the index of the prompt with this id, or None if no usable prompt has it."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows, usable or not."""
        ...

    @property
    def num_skipped(self) -> Mapping[Reason, int]:
        """How many rows were skipped when the dataset was opened, by reason."""
        ...

    @property
    def max_bad_row_fraction(self) -> float:
        """The fraction of rows that may be bad, not counting overlong ones."""
        ...

    @property
    def shows_videos(self) -> bool:
        """Whether any prompt may have videos."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for the same prompts with the same weights, wherever their files are."""
        ...

    @property
    def contents(self) -> Sequence[DatasetContent]:
        """The datasets, in order, by their content."""
        ...

    @property
    def prompts_per_epoch(self) -> int:
        """How many prompts an epoch draws, before it is cut into complete batches."""
        ...

    def draw_epoch(self, epoch: int, *, seed: int, shuffle: bool) -> list[DrawnPrompt]:
        """Return the prompts of an epoch in the dataset's order.

        shuffle: where an epoch draws only some of the prompts, whether they are chosen at random.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PromptSet:
    """The usable prompts of one dataset, numbered from 0 in its order. Satisfies Prompts.

    `prompts[i]` builds a prompt, including its images.

    name: begins the ids of its prompts. spec: what it was opened by.
    num_rows: rows in the dataset, usable or not. row_indices: the row of each prompt.
    prompt_lengths: the tokens of each prompt, including image tokens.
    num_skipped: how many rows were skipped when the dataset was opened, by reason.
    examples: the messages of the first few skipped rows of each reason.
    max_bad_row_fraction: the fraction of rows that may be bad, not counting overlong ones.
    fingerprint: equal for the same usable rows with the same content, wherever their files are.
    files: a digest of the images and videos that the usable rows name by path; "": they name none.
    """

    name: str
    spec: str
    num_rows: int
    row_indices: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    num_skipped: Mapping[Reason, int]
    examples: Mapping[Reason, tuple[str, ...]]
    max_bad_row_fraction: float
    fingerprint: str
    files: str
    builder: PromptBuilder
    _source: Source

    def __len__(self) -> int:
        return len(self.row_indices)

    @property
    def shows_videos(self) -> bool:
        """See Prompts."""
        return self._source.has_column(self.builder.video_key)

    def index_of(self, prompt_id: str) -> int | None:
        """See Prompts."""
        name, _, row = prompt_id.rpartition(":")
        if name != self.name or not row.isdigit():
            return None
        index = bisect_left(self.row_indices, int(row))  # they ascend
        return index if index < len(self) and self.row_indices[index] == int(row) else None

    def __getitem__(self, index: int) -> Prompt:
        """See Prompts. Raises: also IndexError beyond the last prompt."""
        row_index = self.row_indices[index]
        prompt = self.builder.build(self._source.rows[row_index], f"{self.name}:{row_index}")
        # By its index, so that a prompt holds no row with its images.
        return replace(prompt, read_media=partial(self._encoded_media, row_index))

    def _encoded_media(self, row_index: int) -> EncodedMedia | None:
        return self.builder.encoded_media(self._source.rows[row_index], f"{self.name}:{row_index}", with_videos=True)

    @property
    def contents(self) -> Sequence[DatasetContent]:
        """See Prompts."""
        return (DatasetContent(self.spec, len(self), self.fingerprint, 1.0, self.files),)

    def image_files(self, index: int) -> list[bytes]:
        """See Prompts."""
        row_index = self.row_indices[index]
        media = self.builder.encoded_media(self._source.rows[row_index], f"{self.name}:{row_index}", with_videos=False)
        return [] if media is None else list(media.encoded)

    @property
    def prompts_per_epoch(self) -> int:
        """How many prompts an epoch draws: all of them, once."""
        return len(self)

    def draw_epoch(self, epoch: int, *, seed: int, shuffle: bool) -> list[DrawnPrompt]:
        """Return all prompts, once each."""
        return [DrawnPrompt(index, 1) for index in range(len(self))]


@dataclass(frozen=True, slots=True)
class ScannedRow:
    """The result of scanning a row.

    num_tokens: of its prompt; 0 if there is a problem. digest: hash of the row's content.
    files: digests of the images or videos that it names by path.
    """

    num_tokens: int
    problem: UnusableRow | None
    digest: bytes
    files: str


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """A dataset of which every row was scanned.

    spec: what it was opened by. builder: with the folder of the dataset. rows: in its order.
    """

    spec: str
    source: Source
    builder: PromptBuilder
    rows: Sequence[ScannedRow]


CheckRow = Callable[[PromptBuilder, Mapping[str, Any], str], int]
"""Returns the number of prompt tokens of a row, given its id, or raises UnusableRow."""


def open_prompts(
    spec: str,
    builder: PromptBuilder,
    *,
    filter_overlong_prompts: bool,
    max_bad_row_fraction: float,
    num_workers: int,
    on_progress: Callable[[int, int], None] | None = None,
    on_skipped: Callable[[Sequence[SkippedRow]], None] | None = None,
    source: Source | None = None,
    max_rows: int | None = None,
) -> PromptSet:
    """Open a dataset, scan its rows, and return the prompts of those that can be used.

    Args: see scan and select_prompts. Raises: DataError.
    """
    return select_prompts(
        scan(spec, builder, num_workers=num_workers, on_progress=on_progress, source=source, max_rows=max_rows),
        filter_overlong_prompts=filter_overlong_prompts,
        max_bad_row_fraction=max_bad_row_fraction,
        on_skipped=on_skipped,
    )


def scan(
    spec: str,
    builder: PromptBuilder,
    *,
    num_workers: int,
    on_progress: Callable[[int, int], None] | None = None,
    check_row: CheckRow = PromptBuilder.check,
    source: Source | None = None,
    max_rows: int | None = None,
) -> Scan:
    """Open a dataset and scan every row: text, markers, token count, and each image, decoded.

    Args:
        spec: `path_or_hub_id[@split]`, see sources.open_source.
        num_workers: threads.
        on_progress: called with (rows scanned, rows in total), in the calling thread.
        check_row: called for each row, in several threads.
        source: the opened dataset, if it has no path. max_rows: use the first rows only; None: all.
    Raises: DataError if the dataset cannot be read, or lacks a column.
    """
    source = open_source(spec) if source is None else source
    if max_rows is not None:
        source = source.first(max_rows)
    builder = builder.with_default_image_dir(source.folder)
    builder.check_columns(source.columns, spec)
    _check_media_columns(spec, source, builder)
    rows = _scan_rows(source, builder, check_row, num_workers=num_workers, on_progress=on_progress)
    return Scan(spec, source, builder, rows)


def select_prompts(
    scanned: Scan,
    *,
    filter_overlong_prompts: bool,
    max_bad_row_fraction: float,
    on_skipped: Callable[[Sequence[SkippedRow]], None] | None = None,
) -> PromptSet:
    """Return the prompts of the rows of a scanned dataset that can be used.

    Args:
        filter_overlong_prompts: skip rows above max_prompt_length; False: raise DataError for one.
        max_bad_row_fraction: raise DataError if more than this fraction of rows is bad for other
            reasons.
        on_skipped: called once with all rows that cannot be used, before an error about them.
    Raises: DataError.
    """
    spec, source, results = scanned.spec, scanned.source, scanned.rows
    usable = [(index, result) for index, result in enumerate(results) if result.problem is None]
    problems = [(index, result.problem) for index, result in enumerate(results) if result.problem is not None]
    if on_skipped is not None:
        on_skipped([SkippedRow(index, problem.reason, str(problem)) for index, problem in problems])
    num_skipped: dict[Reason, int] = {}
    examples: dict[Reason, tuple[str, ...]] = {}
    for _, problem in problems:
        reason = problem.reason
        num_skipped[reason] = num_skipped.get(reason, 0) + 1
        examples[reason] = (*examples.get(reason, ()), str(problem))[:_NUM_EXAMPLES]
    folders = {problem.folder for _, problem in problems if problem.folder is not None}
    hints = [_image_dir_hint(folders)] if len(folders) > 1 else []
    lengths = sorted(
        [problem.num_tokens for _, problem in problems if problem.num_tokens]
        + [result.num_tokens for _, result in usable]
    )
    if "overlong" in num_skipped:
        hints.append(_length_hint(lengths))
    _check_skipped(spec, num_skipped, examples, len(results), filter_overlong_prompts, max_bad_row_fraction, hints)
    digest = hashlib.sha256()
    for index, result in usable:
        digest.update(b"%d:%s" % (index, result.digest))
    files = "".join(f"{index}:{result.files} " for index, result in usable if result.files)
    return PromptSet(
        name=source.name,
        spec=spec,
        num_rows=len(results),
        row_indices=tuple(index for index, _ in usable),
        prompt_lengths=tuple(result.num_tokens for _, result in usable),
        num_skipped=num_skipped,
        examples=examples,
        max_bad_row_fraction=max_bad_row_fraction,
        fingerprint=digest.hexdigest()[:32],
        files=text_digest(files) if files else "",
        builder=scanned.builder,
        _source=source,
    )


def check_bad_fraction(num_bad: int, num_rows: int, allowed: float, messages: Sequence[str]) -> None:
    """Raise DataError with these messages if more than the allowed fraction of rows is bad."""
    if num_bad > allowed * num_rows:
        summary = f"{num_bad} of {num_rows} rows cannot be used, more than data.max_bad_row_fraction={allowed:g} allows"
        raise DataError("\n  ".join([f"{summary}; correct the rows, or raise it:", *messages]))


def _scan_rows(
    source: Source,
    builder: PromptBuilder,
    check_row: CheckRow,
    *,
    num_workers: int,
    on_progress: Callable[[int, int], None] | None,
) -> list[ScannedRow]:
    num_rows = len(source.rows)
    results: list[ScannedRow] = []
    tasks = [range(start, min(start + _ROWS_PER_TASK, num_rows)) for start in range(0, num_rows, _ROWS_PER_TASK)]
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="rows")
    try:
        for part in pool.map(
            lambda indices: [_scan_row(source, builder, check_row, index) for index in indices], tasks
        ):
            results += part
            if on_progress is not None:
                on_progress(len(results), num_rows)
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _scan_row(source: Source, builder: PromptBuilder, check_row: CheckRow, index: int) -> ScannedRow:
    digest = hashlib.sha256()
    try:
        row = source.row(index)
        update_digest(digest, row)
        num_tokens = check_row(builder, row, f"{source.name}:{index}")
        return ScannedRow(num_tokens, None, digest.digest(), builder.file_digests(row, f"{source.name}:{index}"))
    except UnusableRow as problem:
        return ScannedRow(0, problem, digest.digest(), "")


def _check_media_columns(spec: str, source: Source, builder: PromptBuilder) -> None:
    """Raise DataError for images or videos in a column that the configuration does not name."""
    for kind, key, columns, is_supported in (
        ("image", builder.image_key, source.image_columns, builder.image_processor is not None),
        ("video", builder.video_key, source.video_columns, builder.video_processor is not None),
    ):
        if is_supported and columns and not source.has_column(key):
            found = " and ".join(repr(column) for column in columns)
            raise DataError(
                f"{spec} has no column {key!r}, but {kind}s in {found}; "
                f"set data.{kind}_key={columns[0]}, or drop them to train on text"
            )


def _check_skipped(
    spec: str,
    num_skipped: Mapping[Reason, int],
    examples: Mapping[Reason, tuple[str, ...]],
    num_rows: int,
    filter_overlong_prompts: bool,
    max_bad_row_fraction: float,
    hints: Sequence[str],
) -> None:
    """Raise DataError if too many rows were skipped, or all of them. hints: its last lines."""
    num_overlong = num_skipped.get("overlong", 0)
    if num_overlong and not filter_overlong_prompts:
        raise DataError(
            f"{spec}: {num_overlong} of {num_rows} prompts are too long ({examples['overlong'][0]}); "
            "raise data.max_prompt_length, lower data.max_pixels, or set data.filter_overlong_prompts=true; "
            f"{hints[-1]}"
        )
    messages = [
        f"{count} x {reason}: {example}{' ...' if count > 1 else ''}"
        for reason, count in num_skipped.items()
        for example in examples[reason][:1]
    ]
    messages += hints
    num_bad = sum(num_skipped.values()) - num_overlong
    check_bad_fraction(num_bad, num_rows, max_bad_row_fraction, [spec, *messages])
    if num_bad + num_overlong == num_rows:
        raise DataError("\n  ".join([f"{spec}: none of its {num_rows} rows can be used:", *messages]))


def _image_dir_hint(folders: Collection[Path]) -> str:
    """Return the value of data.image_dir under which all of these folders are."""
    common = os.path.commonpath(folders)
    if common == os.sep:
        return "the absolute paths have no folder in common: move the files into one, and set data.image_dir to it"
    return f"all absolute paths are below data.image_dir={common}"


def _length_hint(lengths: Sequence[int]) -> str:
    """Return values of data.max_prompt_length. lengths: tokens of all counted prompts, sorted."""
    most = lengths[-(-9 * len(lengths) // 10) - 1]
    some = f", data.max_prompt_length={most} for nine of ten" if most < lengths[-1] else ""
    return f"data.max_prompt_length={lengths[-1]} is enough for all prompts{some}"
