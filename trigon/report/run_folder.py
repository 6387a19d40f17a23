"""Reads and writes the folder of a run, except its checkpoints: configuration, metrics, rollouts.

    root/
      config.yaml                       the resolved configuration
      auto_micro_batch.json             measured token budgets, with trainer.auto_micro_batch
      skipped_rows.jsonl                rows of the datasets that are not used, if there are any
      metrics.jsonl                     one line per step: {"step": 12, "metrics": {...}}
      rollouts/step_000012.jsonl        the rollouts that step 12 learned from, one per line
      rollouts/filtered_000012.jsonl    those sampled for it that no step learns from, if any
      rollouts/validation_000012.jsonl  the validation rollouts after step 12
      mlflow.json                       the id of the MLflow run, with that tracker
      run.lock                          locked while a run writes to the folder
      set_aside/report/ ...             reports of an earlier run, moved by one that starts anew
      global_step_12/ ...               checkpoints; see trigon/checkpoint/store.py

A number that is not finite is written as null, since JSON has no nan.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import socket
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from trigon.errors import CheckpointError, ConfigError
from trigon.json_files import write_json
from trigon.terminal import sanitize
from trigon.types import RolloutGroup

Split = Literal["train", "filtered", "validation"]
Filtered = Literal["", "low", "high", "unscored", "surplus"]

_FILE_PREFIX: dict[Split, str] = {"train": "step", "filtered": "filtered", "validation": "validation"}

METRICS = "metrics.jsonl"
BUDGETS = "auto_micro_batch.json"
SKIPPED_ROWS = "skipped_rows.jsonl"
LOCK = "run.lock"

_ROLLOUTS = re.compile(r"(step|filtered|validation)_(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of a step. nan: a number that was not finite."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A line of a rollouts file: one completion with its prompt and score.

    Texts are raw: pass them through terminal.sanitize before printing them.
    sample: index within the group. reward: Score.overall; parts, outcome and error are those of
    Score. num_tokens: of the completion. images: the source of each image. ground_truth: as in the
    dataset; ground_truth_type: its Python type, which JSON may not keep.
    row: the columns of the dataset's row without images and videos, as passed to the reward
    function.
    filtered: why no step learns from its group; empty if one does, and for validations. low, high,
    unscored: by online filtering. surplus: it passed, but there were more groups than needed.
    """

    prompt_id: str
    sample: int
    prompt: str
    response: str
    reward: float
    parts: Mapping[str, float]
    outcome: str
    error: str
    finish_reason: str
    num_tokens: int
    policy_version: int
    images: tuple[str, ...]
    ground_truth: Any
    ground_truth_type: str
    row: Mapping[str, Any]
    filtered: Filtered


def rollout_rows(groups: Iterable[RolloutGroup], *, filtered: Filtered = "") -> list[RolloutRow]:
    """Return one row per rollout, in order. filtered: of all groups."""
    return [
        RolloutRow(
            prompt_id=group.prompt.prompt_id,
            sample=sample,
            prompt=group.prompt.text,
            response=rollout.completion.text,
            reward=rollout.score.overall,
            parts=dict(rollout.score.parts),
            outcome=rollout.score.outcome,
            error=rollout.score.error,
            finish_reason=rollout.completion.finish_reason,
            num_tokens=len(rollout.completion.token_ids),
            policy_version=rollout.completion.policy_version,
            images=group.prompt.image_refs,
            ground_truth=group.prompt.ground_truth,
            ground_truth_type=type(group.prompt.ground_truth).__name__,
            row=group.prompt.row,
            filtered=filtered,
        )
        for group in groups
        for sample, rollout in enumerate(group.rollouts)
    ]


class RunFolder:
    """The folder of a run, locked until close().

    Raises: ConfigError if another run has locked it, or if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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
        _remove_incomplete_line(path / METRICS)

    def write_config(self, text: str) -> None:
        """Write config.yaml: text is the resolved configuration as YAML."""
        _replace(self.path / "config.yaml", text.encode())

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
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise CheckpointError(
                f"{path} is not valid JSON ({error}); remove it to measure the budgets again"
            ) from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} contains no budgets; remove it to measure them again")
        return content

    def write_skipped_rows(self, dataset: str, rows: Sequence[tuple[int, str, str]]) -> Path:
        """Add rows of a dataset to skipped_rows.jsonl, and return the file.

        The first call replaces the file of an earlier start; where no row is skipped there is none.
        dataset: as in data.train_files. rows: (index, reason, message) of each.
        """
        self._skipped_rows += [
            _json({"dataset": dataset, "row": row, "reason": reason, "message": message})
            for row, reason, message in rows
        ]
        path = self.path / SKIPPED_ROWS
        if self._skipped_rows:
            _replace(path, b"".join(self._skipped_rows))
        else:
            path.unlink(missing_ok=True)
        return path

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step, and flush it to the disk."""
        line = _json({"step": step, "metrics": {key: metrics[key] for key in sorted(metrics)}})
        with (self.path / METRICS).open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[StepMetrics]:
        """Return the metrics of all steps so far; see read_metrics."""
        return read_metrics(self.path)

    def write_rollouts(self, step: int, split: Split, rows: Sequence[RolloutRow]) -> Path:
        """Write the rollouts of a step and return the file. It is replaced atomically."""
        folder = self.path / "rollouts"
        folder.mkdir(exist_ok=True)
        path = folder / f"{_FILE_PREFIX[split]}_{step:06d}.jsonl"
        _replace(path, b"".join(_json({name: getattr(row, name) for name in RolloutRow.__slots__}) for row in rows))
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
            _replace(path, b"".join(line + b"\n" for line in lines if _parse_line(line, path).step <= step))
        for file in (self.path / "rollouts").glob("*.jsonl"):
            match = _ROLLOUTS.fullmatch(file.name)
            if match and int(match.group(2)) > step:
                file.unlink()
        return None

    def _move_reports(self) -> Path | None:
        reports = [self.path / name for name in (METRICS, "rollouts") if (self.path / name).exists()]
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


def read_metrics(path: Path) -> list[StepMetrics]:
    """Return the steps in metrics.jsonl of a run folder, without an incomplete last line.

    The file may be in use by a run. Raises: CheckpointError if another line cannot be parsed.
    """
    file = path / METRICS
    if not file.exists():
        return []
    complete, _, _incomplete = file.read_bytes().rpartition(b"\n")
    return [_parse_line(line, file) for line in complete.split(b"\n") if line]


def _parse_line(line: bytes, path: Path) -> StepMetrics:
    try:
        content = json.loads(line)
        numbers = {key: nan if value is None else value for key, value in content["metrics"].items()}
        return StepMetrics(int(content["step"]), numbers)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} has a line without the metrics of a step ({error}): {line[:80]!r}. Remove the line, or move the "
            "file away"
        ) from error


def _lock(path: Path) -> int:
    """Lock the file at path, and return its descriptor.

    The lock is held until the descriptor is closed or the process ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
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


def _json(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(_to_json(content), ensure_ascii=False, allow_nan=False)
    # An unpaired surrogate, which a model can emit, has no UTF-8; \udcxx is a valid JSON escape.
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def _to_json(value: Any) -> Any:
    """Return value in JSON types: numbers that are not finite as None, other objects as str.

    Bytes, such as a column of sounds, are replaced by their number.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {str(key): _to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [_to_json(item) for item in value]
        case bytes():
            return f"{len(value)} bytes"
        case _:
            return str(value)


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it has either the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
