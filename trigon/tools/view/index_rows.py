"""The tables of an index, and how a rollouts file becomes their rows."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from trigon.errors import DataError
from trigon.report.rollouts import RolloutFile, RolloutRow, parse_row

VERSION = 2
"""Of the tables below; an index of another version is made anew."""

TABLES = """
CREATE TABLE changes (num INTEGER);
INSERT INTO changes VALUES (0);
CREATE TABLE files (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE, stamp TEXT, problem TEXT
);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, file INTEGER, step INTEGER, split TEXT, number INTEGER, prompt_id TEXT, original_id TEXT,
    filtered TEXT, num_with_tokens INTEGER,
    num INTEGER, num_solved INTEGER, reward_mean REAL, reward_spread REAL, max_tokens INTEGER, mismatch REAL,
    rewards TEXT, image TEXT, excerpt TEXT
);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY, group_id INTEGER, first_byte INTEGER, num_bytes INTEGER, reward REAL, num_tokens INTEGER,
    outcome TEXT, finish_reason TEXT
);
CREATE TABLE completion_texts (id INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE prompt_texts (id INTEGER PRIMARY KEY, text TEXT);
CREATE INDEX groups_by_place ON groups (split, step, number);
CREATE INDEX groups_by_prompt ON groups (original_id);
CREATE INDEX groups_by_file ON groups (file);
CREATE INDEX rollouts_by_group ON rollouts (group_id);
"""

_OCCURRENCE = re.compile(r"#\d+$")

_EXCERPT = 160
"""Characters of the end of a prompt that a list shows."""


def file_stamp(path: Path) -> str | None:
    """Return what tells a file from one that replaced it; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


@dataclass(frozen=True, slots=True)
class FileContent:
    """A rollouts file. groups: (row, first byte, number of bytes) of each completion."""

    stamp: str
    groups: Sequence[Sequence[tuple[RolloutRow, int, int]]]
    problem: str


def read_file(file: RolloutFile) -> FileContent | None:
    """Return the rollouts of a file, or None if it no longer exists."""
    stamp = file_stamp(file.path)
    if stamp is None:
        return None
    groups: list[list[tuple[RolloutRow, int, int]]] = []
    problems: list[str] = []
    place = 0
    try:
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                first, place = place, place + len(line)
                if not line.strip() or not line.endswith(b"\n"):
                    continue
                try:
                    row = parse_row(line, f"rollouts/{file.path.name}, line {number}")
                    _check_types(row, f"rollouts/{file.path.name}, line {number}")
                except DataError as error:
                    problems.append(str(error))
                    continue
                last = groups[-1][-1][0] if groups else None
                if last is None or last.prompt_id != row.prompt_id or last.sample >= row.sample:
                    groups.append([])
                groups[-1].append((row, first, len(line)))
    except OSError as error:
        problems.append(f"rollouts/{file.path.name} cannot be read: {error.strerror}")
    problem = ""
    if problems:
        problem = problems[0] + (f" ({len(problems) - 1} more lines of the file)" if len(problems) > 1 else "")
    return FileContent(stamp, groups, problem)


def _check_types(row: RolloutRow, place: str) -> None:
    """Raise DataError if a field that the index has is not of its type."""
    types: list[tuple[str, type | tuple[type, ...]]] = [
        *((name, str) for name in ("prompt_id", "prompt", "response", "outcome", "error", "finish_reason", "filtered")),
        *((name, int) for name in ("sample", "num_tokens")),
        ("reward", (int, float)),
        ("parts", dict),
    ]
    for name, kind in types:
        if not isinstance(getattr(row, name), kind):
            raise DataError(f"{place} is not a rollout: {name} is {type(getattr(row, name)).__name__}")
    if not all(
        isinstance(file, str) for files in (row.image_files, *(t.image_files for t in row.turns)) for file in files
    ):
        raise DataError(f"{place} is not a rollout: image_files has other values than text")


def insert(connection: sqlite3.Connection, file: RolloutFile, content: FileContent) -> None:
    file_id = connection.execute(
        "INSERT INTO files (name, stamp, problem) VALUES (?, ?, ?)",
        (_text(file.path.name), content.stamp, _text(content.problem)),
    ).lastrowid
    [[next_group]] = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM groups")
    [[next_rollout]] = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM rollouts")
    groups: list[tuple[Any, ...]] = []
    rollouts: list[tuple[Any, ...]] = []
    completions: list[tuple[int, str]] = []
    prompts: list[tuple[int, str]] = []
    for number, group in enumerate(content.groups):
        group_id = next_group + number
        rows = [row for row, _, _ in group]
        first = rows[0]
        rewards = [row.reward if isfinite(row.reward) else None for row in rows]
        scored = [reward for reward in rewards if reward is not None]
        mismatches = [value for row in rows if (value := max_mismatch(row)) is not None]
        groups.append(
            (
                group_id,
                file_id,
                file.step,
                file.split,
                number,
                _text(first.prompt_id),
                original_id(_text(first.prompt_id)),
                first.filtered,
                sum(row.tokens is not None for row in rows),
                len(rows),
                sum(map(is_solved, rows)),
                fmean(scored) if scored else None,
                max(scored) - min(scored) if scored else 0.0,
                max(row.num_tokens for row in rows),
                max(mismatches, default=None),
                json.dumps(rewards),
                _text(first.image_files[0]) if first.image_files else None,
                _text(" ".join(first.prompt.split())[-_EXCERPT:]),
            )
        )
        prompts.append(
            (group_id, _text("\n".join([first.prompt_id, first.prompt, str(first.ground_truth)]).casefold()))
        )
        for (row, first_byte, num_bytes), reward in zip(group, rewards, strict=True):
            rollout_id = next_rollout + len(rollouts)
            rollouts.append(
                (rollout_id, group_id, first_byte, num_bytes, reward, row.num_tokens, row.outcome, row.finish_reason)
            )
            completions.append((rollout_id, _text(row.response.casefold())))
    for table, rows_of_table in (
        ("groups", groups),
        ("rollouts", rollouts),
        ("completion_texts", completions),
        ("prompt_texts", prompts),
    ):
        if rows_of_table:
            marks = ",".join("?" * len(rows_of_table[0]))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows_of_table)


def original_id(prompt_id: str) -> str:
    """Return the id of a prompt without the number of an occurrence, "train:17" of "train:17#2"."""
    return _OCCURRENCE.sub("", prompt_id)


def is_solved(row: RolloutRow) -> bool:
    """Return whether the part `accuracy` is 1, or without that part the reward at least 1."""
    score = row.parts.get("accuracy", row.reward)
    return isinstance(score, int | float) and score >= 1


def max_mismatch(row: RolloutRow) -> float | None:
    """Return the largest train-inference mismatch of a token, in nats; None if not stored.

    It is |old_logprobs - sampling_logprobs|. A value that is not finite, null in the file, is
    skipped.
    """
    tokens = row.tokens
    if tokens is None or tokens.old_logprobs is None:
        return None
    pairs = zip(tokens.old_logprobs, tokens.sampling_logprobs, strict=False)
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def _text(text: str) -> str:
    """Return text without unpaired surrogates and zeros, which SQLite cannot store or search."""
    return text.encode("utf-8", "replace").decode().replace("\0", " ")
