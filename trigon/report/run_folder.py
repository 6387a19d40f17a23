"""Reads and writes the folder of a run, except its checkpoints: configuration, metrics, rollouts.

    root/
      config.yaml                       the resolved configuration of the last start
      earlier_configs/001.yaml ...      configurations of earlier starts, where they differ
      starts.jsonl                      one line per start: where it resumed, and what had changed
      local_sources.json                paths of the model, data, code and templates on the machine
      auto_micro_batch.json             measured token budgets, with trainer.auto_micro_batch
      hang_stacks.txt                   stacks of all processes, if the run hung
      skipped_rows.jsonl                rows of the datasets that are not used, if there are any
      metrics.jsonl                     one line per step: {"step": 12, "metrics": {...}}
      rollouts/step_000012.jsonl        the rollouts that step 12 learned from, one per line
      rollouts/filtered_000012.jsonl    those sampled for it that no step learns from, if any
      rollouts/validation_000012.jsonl  the validation rollouts after step 12
      images/<SHA-256>.png              images of the prompts, with trainer.save_images
      mlflow.json, wandb.json           the id of the run in MLflow and W&B, with these loggers
      mlflow/                           MLflow's files, with this logger and no tracking server
      run.lock                          locked while a run writes to the folder
      set_aside/report/ ...             reports of an earlier run that began at step 0 too
      global_step_12/ ...               checkpoints; see trigon/checkpoint/store.py

A number that is not finite is written as null, since JSON has no nan.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from trigon.errors import CheckpointError, ConfigError
from trigon.report.rollouts import IMAGES, RolloutRow, Split, file_name, find_rollouts, row_to_line, to_json_line
from trigon.report.run import CONFIG, LOCK, METRICS, SOURCES, StepMetrics, parse_step, read_metrics
from trigon.system.files import read_json_object, sync_to_disk, write_json
from trigon.system.terminal import sanitize

EARLIER_CONFIGS = "earlier_configs"
STARTS = "starts.jsonl"
BUDGETS = "auto_micro_batch.json"
SKIPPED_ROWS = "skipped_rows.jsonl"


class RunFolder:
    """The folder of a run, locked until close().

    Raises: ConfigError if another run has locked it, if it cannot be written, or if the locale has
    no encoding for its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_encoding(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it is not writable")
            self._lock = _lock(path / LOCK)
        except OSError as error:
            raise ConfigError(
                f"the run folder {path} cannot be written: {error.strerror or error}. Set "
                "trainer.save_checkpoint_path to a folder that can, or change its permissions"
            ) from error
        self._skipped_rows: list[bytes] = []
        self._described: dict[str, bytes] = {}  # files to be written again if the folder is
        for name in (METRICS, STARTS):
            _remove_incomplete_line(path / name)

    def write_config(self, text: str) -> None:
        """Write config.yaml: text is the resolved configuration as YAML."""
        self._described[CONFIG] = text.encode()
        _replace(self.path / CONFIG, self._described[CONFIG])

    def record_start(self, config: str, content: Mapping[str, Any]) -> None:
        """Write config.yaml, and add a line to starts.jsonl: the time, and content.

        Another config.yaml that is there is copied into earlier_configs first.
        """
        path, earlier = self.path / CONFIG, self.path / EARLIER_CONFIGS
        if path.exists() and (before := path.read_bytes()) != config.encode():
            earlier.mkdir(exist_ok=True)
            copies = sorted(earlier.glob("*.yaml"))
            # A start that died between the copy and the replacement has made the copy already.
            if not copies or copies[-1].read_bytes() != before:
                _replace(earlier / f"{len(copies) + 1:03d}.yaml", before)
        self.write_config(config)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _append(self.path / STARTS, to_json_line({"time": now, **content}))

    def write_local_sources(self, paths: Mapping[str, str]) -> None:
        """Write local_sources.json: see RunRecord.local_sources."""
        write_json(self.path / SOURCES, paths, ensure_ascii=False, sync=True)
        self._described[SOURCES] = (self.path / SOURCES).read_bytes()

    def write_budgets(self, content: Mapping[str, Any]) -> None:
        """Write auto_micro_batch.json."""
        write_json(self.path / BUDGETS, content, sync=True)

    def read_budgets(self) -> dict[str, Any] | None:
        """Return the content of auto_micro_batch.json, or None if there is no such file.

        Raises: CheckpointError if it is not a JSON object.
        """
        path = self.path / BUDGETS
        if not path.exists():
            return None
        try:
            return read_json_object(path)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is not valid JSON ({error}); remove it to measure the budgets again"
            ) from error

    def write_skipped_rows(self, dataset: str, rows: Sequence[tuple[int, str, str]]) -> Path:
        """Add rows of a dataset to skipped_rows.jsonl, and return the file.

        The first call replaces the file of an earlier start; where no row is skipped there is none.
        dataset: as in data.train_files. rows: (index, reason, message) of each.
        """
        self._skipped_rows += [
            to_json_line({"dataset": dataset, "row": row, "reason": reason, "message": message})
            for row, reason, message in rows
        ]
        path = self.path / SKIPPED_ROWS
        if self._skipped_rows:
            _replace(path, b"".join(self._skipped_rows))
        else:
            path.unlink(missing_ok=True)
        return path

    def restore(self) -> str | None:
        """Make the folder again if it was moved or deleted since the run has written to it.

        Returns: a warning, or None if it is where it was. Raises: ConfigError if another run writes
        to it by now; OSError.
        """
        try:
            # By the file's identity: its text may have changed, and so may the name of this host.
            if os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK)):
                return None
        except FileNotFoundError:
            pass
        # A save in the background may have made the folder, without these files.
        is_new = not all((self.path / name).exists() for name in (*self._described, "."))
        self.path.mkdir(parents=True, exist_ok=True)
        lock = _lock(self.path / LOCK)
        os.close(self._lock)
        self._lock = lock
        for name, content in self._described.items():
            _replace(self.path / name, content)
        if is_new:
            return (
                f"THE RUN FOLDER {self.path} WAS MOVED OR DELETED. It was made again, and the run goes on in it, "
                "without its earlier checkpoints, metrics and rollouts"
            )
        return f"{self.path / LOCK} was removed or replaced while the run writes to this folder; it is locked again"

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step, and flush it to the disk.

        Raises: OSError; then no part of the line is in the file.
        """
        line = to_json_line({"step": step, "metrics": {key: metrics[key] for key in sorted(metrics)}})
        _append(self.path / METRICS, line)

    def read_metrics(self) -> list[StepMetrics]:
        """Return the metrics of all steps so far; see read_metrics."""
        return read_metrics(self.path)

    def write_rollouts(self, step: int, split: Split, rows: Sequence[RolloutRow]) -> Path:
        """Write the rollouts of a step and return the file. It is replaced atomically."""
        folder = self.path / "rollouts"
        folder.mkdir(exist_ok=True)
        path = folder / file_name(step, split)
        _replace(path, b"".join(map(row_to_line, rows)))
        return path

    def rewind(self, step: int) -> Path | None:
        """Remove metrics and rollouts after this step, from which a run resumes.

        A resumed run thereby leaves the same files as one that was not interrupted. At step 0 the
        run starts from the beginning, and an earlier run's files are moved instead.
        Returns: the folder to which files were moved, or None.
        """
        if step == 0:
            return self._move_reports()
        path = self.path / METRICS
        if path.exists():
            lines = [line for line in path.read_bytes().split(b"\n") if line]
            _replace(path, b"".join(line + b"\n" for line in lines if parse_step(line, path).step <= step))
        for file in find_rollouts(self.path):
            if file.step > step:
                file.path.unlink()
        return None

    def _move_reports(self) -> Path | None:
        reports = [self.path / name for name in (METRICS, "rollouts", IMAGES) if (self.path / name).exists()]
        if not reports:
            return None
        names = itertools.chain(["report"], (f"report.{again}" for again in itertools.count(2)))
        target = next(t for t in (self.path / "set_aside" / name for name in names) if not t.exists())
        target.mkdir(parents=True)
        for entry in reports:
            os.rename(entry, target / entry.name)
        return target

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_encoding(path: Path) -> None:
    """Raise ConfigError for a name that is not ASCII in a locale that is not UTF-8.

    Python cannot encode such a name, or has read its bytes as lone surrogates, which no file of a
    run can hold.
    """
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8" or str(path).isascii():
        return
    try:
        os.fsencode(path)
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the run folder {str(path)!a} has characters that file names in this locale cannot have, whose "
            f"encoding is {encoding}; set PYTHONUTF8=1 (or LC_ALL=C.UTF-8) before the start, or choose an ASCII name"
        ) from error


def _lock(path: Path) -> int:
    """Lock the file at path, and return its descriptor.

    The lock is held until the descriptor is closed or the process ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # without the bits of the umask
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"{path.parent} is being written by another run ({holder}). Wait for it, stop it, or choose another "
            "trainer.experiment_name or trainer.save_checkpoint_path"
        ) from error
    except OSError as error:  # some network file systems have no locks
        text = f"{path} cannot be locked ({error}): make sure that no other run uses this folder"
        warnings.warn(sanitize(text, max_characters=5000), stacklevel=3)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _remove_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line, left by a crash, so that no line is appended to it."""
    if path.exists():
        content = path.read_bytes()
        num_bytes = content.rfind(b"\n") + 1
        if num_bytes < len(content):
            os.truncate(path, num_bytes)


def _append(path: Path, line: bytes) -> None:
    """Append a line to a file, and flush it to the disk; if that fails, none of it is there."""
    with path.open("ab", buffering=0) as file:
        num_bytes = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(line):  # a disk that is nearly full takes a part
                written += file.write(line[written:])
            os.fsync(file.fileno())
        except OSError:
            file.truncate(num_bytes)
            raise
    if num_bytes == 0:
        sync_to_disk(path.parent)


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it has either the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # it may hold the last bytes of a full disk
        raise
