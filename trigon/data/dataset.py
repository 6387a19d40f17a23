"""Opens a dataset: scans each row, numbers the usable ones, and counts the skipped ones by reason.

Decides how many rows may be bad. File formats, image decoding, tokenization and the order of
prompts are in other modules.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from trigon.data.images import OpenedFile, image_content
from trigon.data.prompts import PromptBuilder
from trigon.data.rows import Reason, UnusableRow, require_columns
from trigon.data.sources import Source, open_source
from trigon.errors import DataError
from trigon.system.files import text_digest
from trigon.system.terminal import listed
from trigon.types import EncodedMedia, Prompt

_ROWS_PER_TASK = 16
_NUM_EXAMPLES = 3
_DIGITS = 8
_UNKNOWN = "-" * _DIGITS


class SkippedRow(NamedTuple):
    """A row that cannot be used. row: its index. message: begins with its name, "train:17"."""

    row: int
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class DatasetContent:
    """What a checkpoint keeps of a dataset, so that a resumed run can name what has changed.

    spec: as in data.train_files. num_prompts: usable rows. fingerprint: equal for the same rows,
    usable or not, wherever they are. weight: as in data.train_weights. skipped: the rows that
    cannot be used, by index: "3 17". files: for each row _DIGITS hexadecimal digits of the digest
    of the files that it names, or _UNKNOWN if it names none or cannot be used; "" if no row has
    any.
    """

    spec: str
    num_prompts: int
    fingerprint: str
    weight: float = 1.0
    skipped: str = ""
    files: str = ""

    @property
    def skipped_rows(self) -> list[int]:
        """The rows that cannot be used, by index."""
        return [int(row) for row in self.skipped.split()]

    def has_rows_of(self, other: DatasetContent) -> bool:
        """Return whether the rows of both are the same, with those files that both could read."""
        return self.fingerprint == other.fingerprint and not self._has_other_files(other)

    def change_since(self, saved: DatasetContent) -> str:
        """Return what differs from the same dataset when it was saved, for a message."""
        if self.fingerprint == saved.fingerprint:
            return f"{self.spec} has other images or videos in the files that its rows name"
        return f"{self.spec} has other rows ({saved.num_prompts} usable ones then, {self.num_prompts} now)"

    def _has_other_files(self, other: DatasetContent) -> bool:
        if self.files == other.files:
            return False
        starts = range(0, min(len(self.files), len(other.files)), _DIGITS)
        pairs = ((self.files[start : start + _DIGITS], other.files[start : start + _DIGITS]) for start in starts)
        return any(first != second and _UNKNOWN not in (first, second) for first, second in pairs)


def find_changed_rows(
    saved: Sequence[DatasetContent], present: Sequence[DatasetContent], option: str = "data.train_files"
) -> dict[str, str]:
    """Return how the rows of datasets differ from a saved run's, by option; {} if they do not.

    Rows that can be used in one of the runs only are no difference. option: the one that names the
    datasets.
    """
    if len(saved) == len(present):
        changed = [(old, new) for old, new in zip(saved, present, strict=True) if not new.has_rows_of(old)]
        if not changed:
            return {}
        if all(old.spec == new.spec for old, new in changed):
            return {option: "; ".join(new.change_since(old) for old, new in changed)}
    then, now = (", ".join(content.spec for content in contents) for contents in (saved, present))
    return {option: f"was {then}, and is now {now}"}


@dataclass(frozen=True, slots=True, eq=False)
class PromptSet:
    """The prompts of one dataset, numbered from 0 in its order.

    They are the usable rows, or the rows that a saved run could use (numbered_as).
    name: begins the ids of its prompts. num_rows: rows in the dataset, usable or not.
    row_indices: the row of each prompt. unusable: why a row cannot be used, by its index.
    examples: the messages of the first few unusable rows of each reason.
    """

    name: str
    num_rows: int
    row_indices: tuple[int, ...]
    unusable: Mapping[int, Reason]
    examples: Mapping[Reason, tuple[str, ...]]
    content: DatasetContent
    builder: PromptBuilder
    _source: Source

    def __len__(self) -> int:
        return len(self.row_indices)

    def __getitem__(self, index: int) -> Prompt:
        """Build a prompt, with its images.

        Raises: UnusableRow if its row has become unusable since the dataset was opened; IndexError
        beyond the last prompt.
        """
        row_index = self.row_indices[index]
        prompt = self.builder.build(self._source.rows[row_index], f"{self.name}:{row_index}")
        # By its index, so that a prompt holds no row with its images.
        return replace(prompt, read_media=partial(self._encoded_media, row_index, with_videos=True))

    def image_files(self, index: int) -> list[bytes]:
        """Return the images of a prompt as encoded files, see Prompts.image_files."""
        media = self._encoded_media(self.row_indices[index], with_videos=False)
        return [] if media is None else list(media.encoded)

    def index_of(self, prompt_id: str) -> int | None:
        """Return the index of the prompt with this id, or None if no usable prompt has it."""
        name, _, row = prompt_id.rpartition(":")
        if name != self.name or not row.isdigit():
            return None
        index = bisect_left(self.row_indices, int(row))  # they ascend
        return index if index < len(self) and self.row_indices[index] == int(row) else None

    @property
    def shows_videos(self) -> bool:
        """Whether any prompt may have videos."""
        return self.builder.data.video_key in self._source.columns

    @property
    def num_skipped(self) -> Counter[Reason]:
        """How many rows are no prompts, since they cannot be used, by reason."""
        prompts = set(self.row_indices)
        return Counter(reason for row, reason in self.unusable.items() if row not in prompts)

    @property
    def lost(self) -> dict[int, Reason]:
        """Why prompts cannot be used that a saved run could use, by index."""
        return {index: self.unusable[row] for index, row in enumerate(self.row_indices) if row in self.unusable}

    def numbered_as(self, saved: DatasetContent, name: str) -> PromptSet:
        """Return the prompts with the numbers and ids that they have in a saved run of these rows.

        Rows that it could use stay prompts if they cannot be used now, and others do not become
        prompts. Otherwise the order of all prompts would change.
        """
        skipped = set(saved.skipped_rows)
        rows = tuple(row for row in range(self.num_rows) if row not in skipped)
        return replace(self, name=name, row_indices=rows, content=replace(saved, spec=self.content.spec))

    def changed_usability(self, saved: DatasetContent) -> list[str]:
        """Return sentences with the rows that can be used only now, or no longer, by their ids."""
        then = set(saved.skipped_rows)
        lost = [f"{self.name}:{row} ({reason})" for row, reason in self.unusable.items() if row not in then]
        gained = [f"{self.name}:{row}" for row in sorted(then - set(self.unusable))]
        return [
            f"{self.content.spec}: {len(rows)} rows {change}: {listed(rows)}"
            for rows, change in ((lost, "can no longer be used"), (gained, "could not be used before, and can now"))
            if rows
        ]

    def _encoded_media(self, row_index: int, *, with_videos: bool) -> EncodedMedia | None:
        row = self._source.rows[row_index]
        return self.builder.encoded_media(row, f"{self.name}:{row_index}", with_videos=with_videos)


@dataclass(frozen=True, slots=True)
class ScannedRow:
    """The result of scanning a row.

    num_tokens: number of tokens of its prompt; 0 if there is a problem. digest: hash of the row's
    content.
    files: digests of the images or videos that it names by path.
    """

    num_tokens: int
    problem: UnusableRow | None
    digest: bytes
    files: str


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """A dataset of which every row was scanned.

    spec: the text in the options that names it. builder: builds prompts, and has the folder of the
    dataset. rows: the rows in its order.
    """

    spec: str
    source: Source
    builder: PromptBuilder
    rows: Sequence[ScannedRow]

    @property
    def skipped(self) -> list[SkippedRow]:
        """The rows that cannot be used."""
        problems = ((index, row.problem) for index, row in enumerate(self.rows))
        return [SkippedRow(index, each.reason, str(each)) for index, each in problems if each is not None]


CheckRow = Callable[[PromptBuilder, Mapping[str, Any], str], int]
"""Returns the number of prompt tokens of a row, given its id, or raises UnusableRow."""


def count_tokens(builder: PromptBuilder, row: Mapping[str, Any], prompt_id: str) -> int:
    """Return the number of prompt tokens of a row, after decoding its images and videos."""
    return len(builder.inspect(row, prompt_id).token_ids)


def open_prompts(
    spec: str,
    builder: PromptBuilder,
    *,
    num_workers: int,
    source: Source | None = None,
    max_rows: int | None = None,
) -> PromptSet:
    """Open a dataset, scan its rows, and return the prompts of those that can be used.

    Args: see scan. Raises: as scan and select_prompts.
    """
    return select_prompts(scan(spec, builder, num_workers=num_workers, source=source, max_rows=max_rows))


def scan(
    spec: str,
    builder: PromptBuilder,
    *,
    num_workers: int,
    on_progress: Callable[[int, int], None] | None = None,
    check_row: CheckRow = count_tokens,
    source: Source | None = None,
    max_rows: int | None = None,
) -> Scan:
    """Open a dataset and scan every row: text, markers, token count, and each image, decoded.

    Args:
        spec: `path_or_hub_id[@split]`, see sources.open_source.
        num_workers: threads.
        on_progress: called with (rows scanned since the last call, rows in total), in this thread.
        check_row: called for each row, in several threads.
        source: the opened dataset, if it has no path. max_rows: use the first rows only; None: all.
    Raises: DataError if the dataset cannot be read, or lacks a column.
    """
    source = open_source(spec) if source is None else source
    if max_rows is not None:
        source = source.first(max_rows)
    builder = builder.with_default_image_dir(source.folder)
    require_columns(source.columns, spec, builder.data)
    _check_media_columns(spec, source, builder)
    rows: list[ScannedRow] = []
    num_rows = len(source.rows)
    tasks = [range(start, min(start + _ROWS_PER_TASK, num_rows)) for start in range(0, num_rows, _ROWS_PER_TASK)]
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="rows")
    try:
        for part in pool.map(lambda task: [_scan_row(source, builder, check_row, index) for index in task], tasks):
            rows += part
            if on_progress is not None:
                on_progress(len(part), num_rows)
    finally:
        pool.shutdown(cancel_futures=True)
    return Scan(spec, source, builder, rows)


def select_prompts(scanned: Scan) -> PromptSet:
    """Return the prompts of the rows of a scanned dataset that can be used.

    Raises: DataError if more than data.max_bad_row_fraction of the rows are bad, if none is usable,
    and for overlong prompts unless data.filter_overlong_prompts skips them.
    """
    results, skipped = scanned.rows, scanned.skipped
    usable = [index for index, result in enumerate(results) if result.problem is None]
    messages: dict[Reason, list[str]] = {}
    for row in skipped:
        messages.setdefault(row.reason, []).append(row.message)
    _check_skipped(scanned, messages)
    digest = hashlib.sha256()
    for index, result in enumerate(results):
        digest.update(b"%d:%s" % (index, result.digest))
    files = [text_digest(result.files)[:_DIGITS] if result.files else _UNKNOWN for result in results]
    return PromptSet(
        name=scanned.source.name,
        num_rows=len(results),
        row_indices=tuple(usable),
        unusable={row.row: row.reason for row in skipped},
        examples={reason: tuple(each[:_NUM_EXAMPLES]) for reason, each in messages.items()},
        content=DatasetContent(
            scanned.spec,
            len(usable),
            digest.hexdigest()[:32],
            skipped=" ".join(str(row.row) for row in skipped),
            files="" if set(files) == {_UNKNOWN} else "".join(files),
        ),
        builder=scanned.builder,
        _source=scanned.source,
    )


def check_bad_fraction(num_bad: int, num_rows: int, allowed: float, messages: Sequence[str]) -> None:
    """Raise DataError with these messages if more than the allowed fraction of rows is bad."""
    if num_bad > allowed * num_rows:
        summary = f"{num_bad} of {num_rows} rows cannot be used, more than data.max_bad_row_fraction={allowed:g} allows"
        raise DataError("\n  ".join([f"{summary}; correct the rows, or raise it:", *messages]))


def update_digest(digest: Any, value: Any) -> None:
    """Hash a row's content: every key, number and text, and the bytes of encoded images."""
    match value:
        case bytes():
            digest.update(b"bytes %d " % len(value))
            digest.update(value)
        case Image.Image() | OpenedFile():
            update_digest(digest, image_content(value))
        case dict():
            for key in sorted(value):
                update_digest(digest, key)
                update_digest(digest, value[key])
        case list():
            digest.update(b"list %d " % len(value))
            for part in value:
                update_digest(digest, part)
        case _:
            digest.update(repr(value).encode("utf-8", "backslashreplace") + b" ")


def _scan_row(source: Source, builder: PromptBuilder, check_row: CheckRow, index: int) -> ScannedRow:
    digest = hashlib.sha256()
    name = f"{source.name}:{index}"
    try:
        row = source.row(index)
        update_digest(digest, row)
        return ScannedRow(check_row(builder, row, name), None, digest.digest(), builder.file_digests(row, name))
    except UnusableRow as problem:
        return ScannedRow(0, problem, digest.digest(), "")


def _check_media_columns(spec: str, source: Source, builder: PromptBuilder) -> None:
    """Raise DataError for images or videos in a column that the configuration does not name."""
    for kind, key, columns, is_supported in (
        ("image", builder.data.image_key, source.image_columns, builder.image_processor is not None),
        ("video", builder.data.video_key, source.video_columns, builder.video_processor is not None),
    ):
        if is_supported and columns and key not in source.columns:
            found = " and ".join(repr(column) for column in columns)
            raise DataError(
                f"{spec} has no column {key!r}, but {kind}s in {found}; "
                f"set data.{kind}_key={columns[0]}, or drop them to train on text"
            )


def _check_skipped(scanned: Scan, messages: Mapping[Reason, Sequence[str]]) -> None:
    """Raise DataError if too many rows were skipped, or all of them.

    messages: messages by reason.
    """
    spec, num_rows, data = scanned.spec, len(scanned.rows), scanned.builder.data
    problems = [row.problem for row in scanned.rows if row.problem is not None]
    folders = {problem.folder for problem in problems if problem.folder is not None}
    hints = [_image_dir_hint(folders)] if len(folders) > 1 else []
    overlong = messages.get("overlong", ())
    if overlong:
        counted = (problem.num_tokens for problem in problems if problem.num_tokens)
        hints.append(_length_hint(sorted([*counted, *(row.num_tokens for row in scanned.rows if row.problem is None)])))
    if overlong and not data.filter_overlong_prompts:
        raise DataError(
            f"{spec}: {len(overlong)} of {num_rows} prompts are too long ({overlong[0]}); "
            "raise data.max_prompt_length, lower data.max_pixels, or set data.filter_overlong_prompts=true; "
            f"{hints[-1]}"
        )
    lines = [f"{len(each)} x {reason}: {each[0]}{' ...' if len(each) > 1 else ''}" for reason, each in messages.items()]
    lines += hints
    check_bad_fraction(len(problems) - len(overlong), num_rows, data.max_bad_row_fraction, [spec, *lines])
    if len(problems) == num_rows:
        raise DataError("\n  ".join([f"{spec}: none of its {num_rows} rows can be used:", *lines]))


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
