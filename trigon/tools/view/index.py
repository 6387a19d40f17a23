"""An index of the rollouts of a run, and the filters and orders by which a page asks for them.

The index is an SQLite file with what one searches and sorts by.

The rollouts files stay the only place with everything: the index has the byte range of each line,
and `IndexedRun.read_group` reads it from there. A file that was replaced, added or removed since is
indexed again or forgotten. The index file can be removed at any time. Several processes may use it.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trigon.errors import DataError
from trigon.report.rollouts import RolloutFile, RolloutRow, parse_row
from trigon.report.run import RunRecord
from trigon.system.terminal import did_you_mean

_Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]
_Number = Annotated[float, Field(ge=-(2**53), le=2**53, allow_inf_nan=False)]
_Text = Annotated[str, Field(max_length=1000)]

VERSION = 3
"""Version of the tables, part of the name of the index file."""

# Texts have tables of their own, so that other queries do not read them. The database's
# user_version counts its changes.
_TABLES = """
CREATE TABLE IF NOT EXISTS files (id INTEGER PRIMARY KEY, name TEXT UNIQUE, stamp TEXT, problem TEXT);
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, file INTEGER REFERENCES files ON DELETE CASCADE,
    step INTEGER, split TEXT, number INTEGER, prompt_id TEXT, original_id TEXT, filtered TEXT, num_with_tokens INTEGER,
    num INTEGER, num_solved INTEGER, reward_mean REAL, reward_spread REAL, max_tokens INTEGER, mismatch REAL,
    rewards TEXT, image TEXT, excerpt TEXT
);
CREATE TABLE IF NOT EXISTS prompt_texts (id INTEGER PRIMARY KEY REFERENCES groups ON DELETE CASCADE, text TEXT);
CREATE TABLE IF NOT EXISTS rollouts (
    id INTEGER PRIMARY KEY, group_id INTEGER REFERENCES groups ON DELETE CASCADE,
    first_byte INTEGER, num_bytes INTEGER, reward REAL, num_tokens INTEGER, outcome TEXT, finish_reason TEXT
);
CREATE TABLE IF NOT EXISTS completion_texts (id INTEGER PRIMARY KEY REFERENCES rollouts ON DELETE CASCADE, text TEXT);
CREATE INDEX IF NOT EXISTS groups_by_place ON groups (split, step, number);
CREATE INDEX IF NOT EXISTS groups_by_prompt ON groups (original_id);
CREATE INDEX IF NOT EXISTS groups_by_file ON groups (file);
CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id);
"""
_ORDER = {
    "newest": "g.step DESC",
    "oldest": "g.step",
    "worst": "g.reward_mean IS NULL, g.reward_mean, g.step DESC",
    "best": "g.reward_mean DESC, g.step DESC",
    "spread": "g.reward_spread DESC, g.step DESC",
    "longest": "g.max_tokens DESC, g.step DESC",
    "mismatch": "g.mismatch DESC, g.step DESC",
}
_SUMMARY = (
    "step, split, number, prompt_id, filtered, num_with_tokens, num, num_solved, reward_mean, max_tokens, mismatch, "
    "rewards, image, excerpt"
)
_PROMPT = "substr(p.text, instr(p.text, char(10)))"
"""A prompt's text and ground truth, without the first line, which has its id."""
_OCCURRENCE = re.compile(r"#\d+$")
_EXCERPT = 160
"""Characters of the end of a prompt that a list shows."""

_Line = tuple[RolloutRow, int, int]
"""A completion, the first byte of its line, and the number of bytes."""

_SOLVED = {"none": "g.num_solved = 0", "some": "g.num_solved BETWEEN 1 AND g.num - 1", "all": "g.num_solved = g.num"}


class RolloutFilter(BaseModel):
    """Conditions on rollouts, all of which must hold, and the order of the groups found.

    A group is found if one of its completions matches. None is no condition; bounds are inclusive.
    min_tokens, max_tokens: tokens of the completion. solved: how many completions of the group are
    solved. filtered: why no step learns from the group; no: one does, or it is a validation.
    outcome: result of the reward function; not_ok: failed or timeout. tokens: groups with per-token
    values. prompt_id: the id without the number of an occurrence, train:17 for train:17#2 too.
    text: part of the prompt, its id, the ground truth or the completion, in any case.
    sort: the order: by step (newest, oldest), by mean reward of the group (worst, best), by the
    difference between its rewards (spread), by its longest completion, or by its largest
    train-inference mismatch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: Literal["train", "filtered", "validation"] | None = None
    min_step: _Integer | None = None
    max_step: _Integer | None = None
    min_reward: _Number | None = None
    max_reward: _Number | None = None
    min_tokens: _Integer | None = None
    max_tokens: _Integer | None = None
    solved: Literal["none", "some", "all"] | None = None
    filtered: Literal["no", "low", "high", "unscored", "surplus"] | None = None
    outcome: Literal["ok", "not_ok", "failed", "timeout"] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    tokens: Literal["recorded"] | None = None
    prompt_id: _Text | None = None
    text: _Text | None = None
    sort: Literal["newest", "oldest", "worst", "best", "spread", "longest", "mismatch"] = "newest"


def parse_filter(values: Mapping[str, str]) -> RolloutFilter:
    """Return the filter in the parameters of an address. Empty values are no condition.

    Raises: DataError for an unknown name or a value that the name cannot have.
    """
    for name in values:
        if name not in RolloutFilter.model_fields:
            raise DataError(f"there is no filter {name!r}{did_you_mean(name, RolloutFilter.model_fields)}")
    try:
        return RolloutFilter.model_validate({name: value for name, value in values.items() if value != ""})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise DataError(f"the filter {name} cannot be {values[name][:100]!r}: {first['msg']}") from error


@dataclass(frozen=True, slots=True)
class Found:
    """The groups that match a filter, by their ids, in its order.

    num_rollouts: rollouts that match.
    """

    ids: tuple[int, ...]
    num_rollouts: int


@dataclass(frozen=True, slots=True)
class IndexedPrompt:
    """A prompt of a run.

    original_id: the id without the number of an occurrence. is_validation: whether a validation
    has sampled it; a training dataset may give the same id to another prompt.
    text: prompt and ground truth. image: the file of its first image; None if it has none, or if
    the run does not store images.
    """

    original_id: str
    is_validation: bool
    text: str
    image: str | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How many of the rollouts files are indexed. version: changes with the index's content."""

    num_files: int
    num_indexed: int
    version: int


def index_path(cache: Path, run: Path) -> Path:
    """Return the index file of a run folder within a cache folder."""
    digest = sha256(bytes(run.resolve())).hexdigest()[:16]
    return cache / f"{run.resolve().name[:40]}-{digest}.v{VERSION}.sqlite3"


class IndexedRun:
    """The rollouts of a run with their index.

    path: the index file, made if needed. Its folder must exist.
    """

    def __init__(self, record: RunRecord, path: Path) -> None:
        self.record = record
        self._path = path
        self._found = lru_cache(maxsize=32)(self._find)
        self._num_files = 0
        try:
            self._make_tables()
        except sqlite3.OperationalError as error:
            raise DataError(f"the index {path} cannot be written ({error}): choose another --cache") from error
        except sqlite3.DatabaseError:
            path.unlink()  # it is damaged, and can be made again
            self._make_tables()

    def update(self, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Index new rollouts files, the newest first, and forget those that no longer exist."""
        files = {file.path.name: file for file in self.record.rollout_files()}
        with self._connection() as connection:
            known = dict(connection.execute("SELECT name, stamp FROM files"))
        self._num_files = len(files)
        for name in known.keys() - files.keys():
            self._replace(name, None)
        stamps = {name: stamp for name, file in files.items() if (stamp := _file_stamp(file.path)) is not None}
        new = [files[name] for name, stamp in stamps.items() if known.get(name) != stamp]
        for file in sorted(new, key=lambda file: -file.step):
            if should_stop():
                return
            self._replace(file.path.name, file)

    def progress(self) -> Progress:
        """Return how many of the rollouts files are indexed."""
        with self._connection() as connection:
            [[num]] = connection.execute("SELECT count(*) FROM files")
            [[version]] = connection.execute("PRAGMA user_version")
        return Progress(max(self._num_files, num), num, version)

    def overview(self) -> dict[str, Any]:
        """Return counts of what there is: groups and rollouts, by split, and steps."""
        with self._connection() as connection:
            rows = connection.execute("SELECT split, count(*), sum(num), min(step), max(step) FROM groups GROUP BY 1")
            splits = {
                split: {"num_groups": groups, "num_rollouts": rollouts, "min_step": first, "max_step": last}
                for split, groups, rollouts, first, last in rows
            }
            [[num_not_ok]] = connection.execute("SELECT count(*) FROM rollouts WHERE outcome != 'ok'")
        return {"splits": splits, "num_not_ok": num_not_ok}

    def problems(self) -> list[str]:
        """Return what could not be read, one line per file."""
        with self._connection() as connection:
            return [text for (text,) in connection.execute("SELECT problem FROM files WHERE problem != '' LIMIT 20")]

    def find(self, filters: RolloutFilter) -> Found:
        """Return the groups that match. Repeated calls are answered from memory."""
        return self._found(filters, self.progress().version)

    def summaries(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return what a list shows of each group, in the given order."""
        chosen = "SELECT value FROM json_each(?)"  # SQLite limits the number of marks
        with self._connection() as connection:
            rows = connection.execute(f"SELECT id, {_SUMMARY} FROM groups WHERE id IN ({chosen})", (json.dumps(ids),))
            by_id = {row[0]: _summary(row[1:]) for row in rows}
        return [by_id[id] for id in ids if id in by_id]

    def prompt_of(self, split: str, step: int, number: int) -> IndexedPrompt | None:
        """Return the prompt of a group, or None if there is no such group."""
        with self._connection() as connection:
            row = connection.execute(
                f"SELECT g.original_id, g.split = 'validation', {_PROMPT}, g.image FROM groups g "
                "JOIN prompt_texts p ON p.id = g.id WHERE g.split = ? AND g.step = ? AND g.number = ?",
                (split, step, number),
            ).fetchone()
        return None if row is None else IndexedPrompt(row[0], bool(row[1]), *row[2:])

    def history(self, prompt: IndexedPrompt) -> list[dict[str, Any]]:
        """Return the groups of a prompt over the run, by step.

        Its other occurrences count, whose ids end in their number: train:17#2. A prompt with
        another image does not count; nor does one of the validation for a training prompt, or the
        other way round, with another text. Other runs may give a prompt another format.
        """
        with self._connection() as connection:
            rows = connection.execute(
                f"SELECT {_SUMMARY} FROM groups g JOIN prompt_texts p ON p.id = g.id WHERE g.original_id = ? "
                f"AND ((g.split = 'validation') = ? OR {_PROMPT} = ?) "
                "AND coalesce(substr(g.image, 1, 71) = substr(?, 1, 71), TRUE) "  # images/<SHA-256>
                "ORDER BY step, split, number LIMIT 2000",
                (prompt.original_id, prompt.is_validation, prompt.text, prompt.image),
            )
            return [_summary(row) for row in rows]

    def read_group(self, split: str, step: int, number: int) -> list[RolloutRow] | None:
        """Return the completions of a group from its rollouts file, or None if there is none."""
        with self._connection() as connection:
            places = connection.execute(
                "SELECT f.name, f.stamp, r.first_byte, r.num_bytes FROM groups g JOIN files f ON f.id = g.file "
                "JOIN rollouts r ON r.group_id = g.id WHERE g.split = ? AND g.step = ? AND g.number = ? ORDER BY r.id",
                (split, step, number),
            ).fetchall()
        if not places:
            return None
        path = self.record.path / "rollouts" / places[0][0]
        try:
            with path.open("rb") as file:
                rows = []
                for _, _, first, num in places:
                    file.seek(first)
                    rows.append(parse_row(file.read(num), str(path)))
        except FileNotFoundError:
            return None
        if _file_stamp(path) != places[0][1]:  # replaced while it was read; the next update indexes it
            return None
        return rows

    def _make_tables(self) -> None:
        with self._connection() as connection:
            connection.executescript(_TABLES)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=30, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")  # after a crash of the machine it is made again
            connection.execute("PRAGMA mmap_size = 4000000000")
            connection.execute("PRAGMA foreign_keys = ON")
            yield connection

    def _replace(self, name: str, file: RolloutFile | None) -> None:
        """Index a file in place of what the index has of its name. None: only forget it."""
        stamp = None if file is None else _file_stamp(file.path)
        groups, problem = ([], "") if file is None or stamp is None else _read_groups(file)
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM files WHERE name = ?", (_utf8(name),))
            if file is not None and stamp is not None:
                row = (_utf8(name), stamp, _utf8(problem))
                number = connection.execute("INSERT INTO files (name, stamp, problem) VALUES (?, ?, ?)", row).lastrowid
                assert number is not None
                _insert(connection, file, number, groups)
            [[version]] = connection.execute("PRAGMA user_version")
            connection.execute(f"PRAGMA user_version = {(version + 1) % 2**31}")
            connection.execute("COMMIT")

    def _find(self, filters: RolloutFilter, version: int) -> Found:
        conditions, values = _conditions(filters)
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        with self._connection() as connection:
            rows = connection.execute(
                f"SELECT g.id, count(*) FROM groups g JOIN rollouts r ON r.group_id = g.id {where} GROUP BY g.id "
                f"ORDER BY {_ORDER[filters.sort]}, g.split = 'validation', g.split, g.number",
                values,
            ).fetchall()
        return Found(tuple(id for id, _ in rows), sum(num for _, num in rows))


def _file_stamp(path: Path) -> str | None:
    """Return what tells a file from one that replaced it; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _read_groups(file: RolloutFile) -> tuple[list[list[_Line]], str]:
    """Return the groups of a file, and what could not be read of it."""
    groups: list[list[_Line]] = []
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
                except DataError as error:
                    problems.append(str(error))
                    continue
                last = groups[-1][-1][0] if groups else None
                if last is None or last.prompt_id != row.prompt_id or last.sample >= row.sample:
                    groups.append([])
                groups[-1].append((row, first, len(line)))
    except OSError as error:
        problems.append(f"rollouts/{file.path.name} cannot be read: {error.strerror}")
    more = f" ({len(problems) - 1} more lines of the file)" if len(problems) > 1 else ""
    return groups, f"{problems[0]}{more}" if problems else ""


def _insert(connection: sqlite3.Connection, file: RolloutFile, file_id: int, groups: Sequence[Sequence[_Line]]) -> None:
    """Add the groups of a file to the tables."""
    tables: dict[str, list[tuple[Any, ...]]] = {
        name: [] for name in ("groups", "prompt_texts", "rollouts", "completion_texts")
    }
    [[group_id]] = connection.execute("SELECT coalesce(max(id), 0) FROM groups")
    [[rollout_id]] = connection.execute("SELECT coalesce(max(id), 0) FROM rollouts")
    for number, group in enumerate(groups):
        group_id += 1
        rows = [row for row, _, _ in group]
        first, prompt_id = rows[0], _utf8(rows[0].prompt_id)
        rewards = [row.reward if isfinite(row.reward) else None for row in rows]
        scored = [reward for reward in rewards if reward is not None]
        text = "\n".join([first.prompt_id, first.prompt, str(first.ground_truth)])
        tables["prompt_texts"].append((group_id, _utf8(text.casefold())))
        tables["groups"].append(
            (
                *(group_id, file_id, file.step, file.split, number, prompt_id, original_id(prompt_id), first.filtered),
                *(sum(row.tokens is not None for row in rows), len(rows), sum(map(is_solved, rows))),
                fmean(scored) if scored else None,
                max(scored) - min(scored) if scored else 0.0,
                max(row.num_tokens for row in rows),
                max((value for row in rows if (value := max_mismatch(row)) is not None), default=None),
                json.dumps(rewards),
                _utf8(first.image_files[0]) if first.image_files else None,
                _utf8(" ".join(first.prompt.split())[-_EXCERPT:]),
            )
        )
        for (row, place, num_bytes), reward in zip(group, rewards, strict=True):
            rollout_id += 1
            values = (reward, row.num_tokens, _utf8(row.outcome), _utf8(row.finish_reason))
            tables["rollouts"].append((rollout_id, group_id, place, num_bytes, *values))
            tables["completion_texts"].append((rollout_id, _utf8(row.response.casefold())))
    for table, content in tables.items():
        if content:
            connection.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(content[0]))})", content)


def original_id(prompt_id: str) -> str:
    """Return the id of a prompt without the number of an occurrence, "train:17" of "train:17#2"."""
    return _OCCURRENCE.sub("", prompt_id)


def is_solved(row: RolloutRow) -> bool:
    """Return whether the part `accuracy` is 1, or without that part the reward at least 1."""
    return row.parts.get("accuracy", row.reward) >= 1


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


def _conditions(filters: RolloutFilter) -> tuple[list[str], list[Any]]:
    """Return conditions in SQL on groups g and rollouts r, and the values of their marks."""
    conditions: list[str] = []
    values: list[Any] = []

    def add(condition: str, *arguments: Any) -> None:
        conditions.append(condition)
        values.extend(arguments)

    for name, column in (("step", "g.step"), ("reward", "r.reward"), ("tokens", "r.num_tokens")):
        if (lower := getattr(filters, f"min_{name}")) is not None:
            add(f"{column} >= ?", lower)
        if (upper := getattr(filters, f"max_{name}")) is not None:
            add(f"{column} <= ?", upper)
    for name, column in (("split", "g.split"), ("prompt_id", "g.original_id"), ("finish_reason", "r.finish_reason")):
        if value := getattr(filters, name):
            add(f"{column} = ?", value)
    if filters.tokens:
        add("g.num_with_tokens > 0")
    if filters.filtered:
        add("g.filtered = ?", "" if filters.filtered == "no" else filters.filtered)
    if filters.outcome == "not_ok":
        add("r.outcome != 'ok'")
    elif filters.outcome:
        add("r.outcome = ?", filters.outcome)
    if filters.solved:
        add(_SOLVED[filters.solved])
    if filters.text:
        folded = _utf8(filters.text.casefold())
        for character in "\\%_":
            folded = folded.replace(character, f"\\{character}")
        like = r"SELECT id FROM {} WHERE text LIKE ? ESCAPE '\'"
        texts = f"r.id IN ({like.format('completion_texts')}) OR g.id IN ({like.format('prompt_texts')})"
        add(f"({texts})", f"%{folded}%", f"%{folded}%")
    return conditions, values


def _summary(row: Sequence[Any]) -> dict[str, Any]:
    content = dict(zip(_SUMMARY.split(", "), row, strict=True))
    return {**content, "rewards": json.loads(content["rewards"])}


def _utf8(text: str) -> str:
    """Return text without unpaired surrogates and zeros, which SQLite cannot store or search."""
    return text.encode("utf-8", "replace").decode().replace("\0", " ")
