"""The runs that a page shows, each read while it may still be written to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from trigon.errors import CheckpointError, DataError
from trigon.report.run import METRICS, RunRecord, StepMetrics, distinct_names, find_runs, flatten, parse_step
from trigon.system.secrets import mask
from trigon.tools.view.index import IndexedRun, index_path

UPDATE_SECONDS = 2.0
"""Interval at which a run folder is looked at for new files."""


class MetricsFile:
    """The lines of metrics.jsonl, of which only new ones are read again.

    version: changes when the file was replaced, so that lines may be others than before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._inode = -1
        self._place = 0
        self.version = 0
        self.problem = ""
        self.steps: list[StepMetrics] = []

    def update(self) -> None:
        """Read the lines that are new. A line that cannot be parsed is skipped, and in problem."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    if status.st_ino != self._inode or status.st_size < self._place:
                        self._inode, self._place = status.st_ino, 0
                        self.steps, self.problem = [], ""
                        self.version += 1
                    file.seek(self._place)
                    complete, newline, _incomplete = file.read().rpartition(b"\n")
            except FileNotFoundError:
                return
            except OSError as error:
                self.problem = f"{METRICS} cannot be read: {error.strerror}"
                return
            for line in complete.split(b"\n"):
                if line.strip():
                    try:
                        self.steps.append(parse_step(line, Path(METRICS)))  # a page has no paths of its machine
                    except CheckpointError as error:
                        self.problem = str(error)
            self._place += len(complete) + len(newline)

    def columns(self, since: int) -> dict[str, Any]:
        """Return the lines from number `since` on: their steps, and each metric as a list.

        None: a line without the metric.
        """
        steps = self.steps[since:]
        names = {name: None for step in steps for name in step.metrics}
        return {
            "version": self.version,
            "num_lines": since + len(steps),
            "steps": [step.step for step in steps],
            "metrics": {name: [step.metrics.get(name) for step in steps] for name in names},
        }


class ViewedRun:
    """A run with its index, its metrics and its configuration.

    name: shown, and different for each run of a page. cache: folder of the index.
    """

    def __init__(self, record: RunRecord, name: str, cache: Path) -> None:
        self.record = record
        self.name = name
        self.rollouts = IndexedRun(record, index_path(cache, record.path))
        self.metrics = MetricsFile(record.path / METRICS)
        self._problem = ""
        self._stop = Event()
        self._thread = Thread(target=self._keep_updated, name=f"index of {name}", daemon=True)

    def start(self) -> None:
        """Keep metrics and index up to date, in a thread, until close()."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def update(self) -> None:
        """Bring metrics and index up to date."""
        self.metrics.update()
        self.rollouts.update(should_stop=self._stop.is_set)

    def state(self) -> dict[str, Any]:
        """Return what tells a page whether it is up to date, and what cannot be read."""
        progress = self.rollouts.progress()
        problems = [problem for problem in (self._problem, self.metrics.problem) if problem]
        return {
            "name": self.name,
            "path": str(self.record.path),
            "metrics_version": self.metrics.version,
            "num_lines": len(self.metrics.steps),
            "is_running": self.record.is_running(),
            "last_step": max((line.step for line in self.metrics.steps), default=None),
            "rollouts_version": progress.version,
            "num_files": progress.num_files,
            "num_indexed": progress.num_indexed,
            "problems": [*problems, *self.rollouts.problems()],
            **self.rollouts.overview(),
        }

    def _keep_updated(self) -> None:
        while not self._stop.is_set():
            try:
                self.update()
                self._problem = ""
            except Exception as error:  # noqa: BLE001 - shown on the page; a dead thread would show nowhere
                self._problem = f"the page is not up to date: {type(error).__name__}: {error}"
            self._stop.wait(UPDATE_SECONDS)


def open_runs(paths: Sequence[Path], *, cache: Path) -> list[ViewedRun]:
    """Return the runs in folders, each once, with names that differ.

    paths: folders of a run each, or folders that contain runs, all of which are returned.
    cache: folder of the indices, made if needed.
    Raises: DataError if a folder has no run, or the cache cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DataError(f"the folder {cache} cannot be made ({error.strerror}): choose another --cache") from error
    records: dict[Path, RunRecord] = {}
    for record in (record for path in paths for record in find_runs(path)):
        records.setdefault(record.path.resolve(), record)
    distinct = list(records.values())
    return [ViewedRun(run, name, cache) for run, name in zip(distinct, distinct_names(distinct), strict=True)]


def configurations(runs: Sequence[ViewedRun]) -> dict[str, Any]:
    """Return every key of the runs' configurations, with its value in each.

    None: a run without the key.
    """
    flats = []
    problems = []
    for run in runs:
        try:
            flats.append(flatten(mask("", run.record.config())))  # older runs wrote secrets
        except (DataError, OSError) as error:
            problems.append(f"{run.name}: {str(error).replace(f'{run.record.path}/', '')}")
            flats.append({})
    keys = {key: None for values in flats for key in values}
    return {
        "keys": [{"key": key, "values": [_as_text(values, key) for values in flats]} for key in keys],
        "problems": problems,
    }


def _as_text(values: Mapping[str, Any], key: str) -> str | None:
    if key not in values:
        return None
    value = values[key]
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
