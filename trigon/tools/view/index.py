"""An index of the rollouts of a run: what one searches and sorts by, in an SQLite file.

The rollouts files stay the only place with everything: the index has the byte range of each line,
and `IndexedRun.read_group` reads it from there. A file that was replaced, added or removed since is
indexed again or forgotten. The index file can be removed at any time. Several processes may use it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from trigon.errors import DataError
from trigon.report.rollouts import RolloutFile, RolloutRow, parse_row
from trigon.report.run import RunRecord
from trigon.tools.view.filters import RolloutFilter
from trigon.tools.view.index_rows import TABLES, VERSION, file_stamp, insert, original_id, read_file

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


@dataclass(frozen=True, slots=True)
class Found:
    """The groups that match a filter, in its order. ids: of groups. num_rollouts: that match."""

    ids: tuple[int, ...]
    num_rollouts: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an index is. version: changes with its content."""

    num_files: int
    num_indexed: int
    version: int


def index_path(cache: Path, run: Path) -> Path:
    """Return the index file of a run folder within a cache folder."""
    return cache / f"{run.resolve().name[:40]}-{sha256(bytes(run.resolve())).hexdigest()[:16]}.sqlite3"


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
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise DataError(f"the index {path} cannot be written ({error}): choose another --cache") from error
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
        stamps = {name: stamp for name, file in files.items() if (stamp := file_stamp(file.path)) is not None}
        new = [files[name] for name, stamp in stamps.items() if known.get(name) != stamp]
        for file in sorted(new, key=lambda file: -file.step):
            if should_stop():
                return
            self._replace(file.path.name, file)

    def progress(self) -> Progress:
        """Return how many of the rollouts files are indexed."""
        with self._connection() as connection:
            [[num]] = connection.execute("SELECT count(*) FROM files")
            [[version]] = connection.execute("SELECT num FROM changes")
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
        marks = ",".join("?" * len(ids))
        with self._connection() as connection:
            rows = connection.execute(f"SELECT id, {_SUMMARY} FROM groups WHERE id IN ({marks})", tuple(ids))
            by_id = {row[0]: _summary(row[1:]) for row in rows}
        return [by_id[id] for id in ids if id in by_id]

    def history(self, prompt_id: str) -> list[dict[str, Any]]:
        """Return the groups of a prompt over the run, by step.

        Its other occurrences count, whose ids end in their number: train:17#2.
        """
        with self._connection() as connection:
            rows = connection.execute(
                f"SELECT {_SUMMARY} FROM groups WHERE original_id = ? ORDER BY step, split, number LIMIT 2000",
                (original_id(prompt_id),),
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
        if file_stamp(path) != places[0][1]:  # replaced while it was read; the next update indexes it
            return None
        return rows

    def _make_tables(self) -> None:
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            [[version]] = connection.execute("PRAGMA user_version")
            if version != VERSION:
                names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
                for (name,) in names:
                    connection.execute(f'DROP TABLE "{name}"')
                for statement in TABLES.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("COMMIT")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=30, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")  # after a crash of the machine it is made again
            connection.execute("PRAGMA mmap_size = 4000000000")
            yield connection

    def _replace(self, name: str, file: RolloutFile | None) -> None:
        """Index a file in place of what the index has of its name. None: only forget it."""
        content = None if file is None else read_file(file)
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for (old,) in connection.execute("SELECT id FROM files WHERE name = ?", (name,)).fetchall():
                groups = "(SELECT id FROM groups WHERE file = ?)"
                rollouts = f"(SELECT id FROM rollouts WHERE group_id IN {groups})"
                connection.execute(f"DELETE FROM completion_texts WHERE id IN {rollouts}", (old,))
                connection.execute(f"DELETE FROM rollouts WHERE group_id IN {groups}", (old,))
                connection.execute(f"DELETE FROM prompt_texts WHERE id IN {groups}", (old,))
                connection.execute("DELETE FROM groups WHERE file = ?", (old,))
                connection.execute("DELETE FROM files WHERE id = ?", (old,))
            if file is not None and content is not None:
                insert(connection, file, content)
            connection.execute("UPDATE changes SET num = num + 1")
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
    if filters.outcome:
        add(*(("r.outcome != 'ok'",) if filters.outcome == "not_ok" else ("r.outcome = ?", filters.outcome)))
    if filters.solved:
        add(
            {
                "none": "g.num_solved = 0",
                "some": "g.num_solved > 0 AND g.num_solved < g.num",
                "all": "g.num_solved = g.num",
            }[filters.solved]
        )
    if filters.text:
        folded = filters.text.casefold().encode("utf-8", "replace").decode().replace("\\", "\\\\")
        pattern = f"%{folded.replace('%', chr(92) + '%').replace('_', chr(92) + '_')}%"
        like = r"SELECT id FROM {} WHERE text LIKE ? ESCAPE '\'"
        add(
            f"(r.id IN ({like.format('completion_texts')}) OR g.id IN ({like.format('prompt_texts')}))",
            pattern,
            pattern,
        )
    return conditions, values


def _summary(row: Sequence[Any]) -> dict[str, Any]:
    content = dict(zip(_SUMMARY.split(", "), row, strict=True))
    content["rewards"] = json.loads(content["rewards"])
    return content
