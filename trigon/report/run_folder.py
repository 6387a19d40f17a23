"""The folder of a run, as far as it is read by people and by the next run: configuration, metrics, rollouts.

    root/
      config.yaml                          the resolved configuration
      auto_micro_batch.json                token budgets that were measured, with trainer.auto_micro_batch
      metrics.jsonl                        {"step": 12, "metrics": {"reward/overall": 0.8, ...}}, one line for each step
      rollouts/step_000012.jsonl           every rollout of step 12, one line each
      rollouts/validation_000012.jsonl     every validation answer given after step 12
      run.lock                             held while a run writes here
      set_aside/report/ ...                what an earlier run left here, when a new one starts from the beginning
      global_step_12/ ...                  checkpoints: not this module's business

A number that is not finite is null, since JSON has no other word for it. Knows files and JSON; refuses to know what a
metric means and how a run is shown.
"""

from __future__ import annotations

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
from trigon.types import RolloutGroup

Split = Literal["train", "validation"]

METRICS = "metrics.jsonl"
BUDGETS = "auto_micro_batch.json"
LOCK = "run.lock"

_ROLLOUTS = re.compile(r"(step|validation)_(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The plain numbers of one step; one that was not finite is nan."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One answer as it is written down for people. Text is raw: whoever shows it must make it harmless.

    sample: its number within its group. reward: the score's overall; parts, outcome, error as in Score. num_tokens: of
    the response. images: where each image came from. ground_truth: as the dataset holds it.
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


def rollout_rows(groups: Iterable[RolloutGroup]) -> list[RolloutRow]:
    """Return one row for each rollout, in order."""
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
        )
        for group in groups
        for sample, rollout in enumerate(group.rollouts)
    ]


class RunFolder:
    """The folder of a run, held against other runs until close().

    Raises: ConfigError if another run is writing into it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(path / LOCK)
        _drop_torn_tail(path / METRICS)

    def write_config(self, text: str) -> None:
        """Write config.yaml: text is the resolved configuration as YAML."""
        _replace(self.path / "config.yaml", text.encode())

    def write_budgets(self, content: Mapping[str, Any]) -> None:
        """Write auto_micro_batch.json, for people and for the run that goes on from here."""
        write_json(self.path / BUDGETS, content, sync=True)

    def read_budgets(self) -> dict[str, Any] | None:
        """Return what write_budgets wrote; None if nothing was. Raises: CheckpointError if it cannot be read."""
        path = self.path / BUDGETS
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{path} is no JSON ({error}); remove it, to have budgets measured again") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds no budgets; remove it, to have them measured again")
        return content

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line of a step. It is on the disk when this returns."""
        line = _json({"step": step, "metrics": {key: metrics[key] for key in sorted(metrics)}})
        with (self.path / METRICS).open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[StepMetrics]:
        """Return all steps so far, as read_metrics does."""
        return read_metrics(self.path)

    def write_rollouts(self, step: int, split: Split, rows: Sequence[RolloutRow]) -> Path:
        """Write all rollouts of a step and return the file, which is whole or absent whenever the process is killed."""
        folder = self.path / "rollouts"
        folder.mkdir(exist_ok=True)
        path = folder / f"{'step' if split == 'train' else 'validation'}_{step:06d}.jsonl"
        _replace(path, b"".join(_json({name: getattr(row, name) for name in RolloutRow.__slots__}) for row in rows))
        return path

    def rewind(self, step: int) -> Path | None:
        """Forget what was reported after this step, so that a resumed run leaves the files of one that never stopped.

        step: where the run goes on. At 0 another run begins, and its predecessor's files are moved, not forgotten.
        Returns: where they were moved, None if nothing was.
        """
        if step == 0:
            return self._set_aside()
        path = self.path / METRICS
        if path.exists():
            lines = [line for line in path.read_bytes().split(b"\n") if line]
            _replace(path, b"".join(line + b"\n" for line in lines if _parsed(line, path).step <= step))
        for file in (self.path / "rollouts").glob("*.jsonl"):
            match = _ROLLOUTS.fullmatch(file.name)
            if match and int(match.group(2)) > step:
                file.unlink()
        return None

    def _set_aside(self) -> Path | None:
        old = [self.path / name for name in (METRICS, "rollouts") if (self.path / name).exists()]
        if not old:
            return None
        names = itertools.chain(["report"], (f"report.{again}" for again in itertools.count(2)))
        target = next(t for t in (self.path / "set_aside" / name for name in names) if not t.exists())
        target.mkdir(parents=True)
        for entry in old:
            os.rename(entry, target / entry.name)
        return target

    def close(self) -> None:
        """Let other runs in. The folder stays."""
        os.close(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """Return the steps in a run folder's metrics.jsonl, which may be being written: a torn last line is left out.

    Raises: CheckpointError if another line cannot be read.
    """
    file = path / METRICS
    if not file.exists():
        return []
    whole, _, _torn = file.read_bytes().rpartition(b"\n")
    return [_parsed(line, file) for line in whole.split(b"\n") if line]


def _parsed(line: bytes, path: Path) -> StepMetrics:
    try:
        content = json.loads(line)
        numbers = {key: nan if value is None else value for key, value in content["metrics"].items()}
        return StepMetrics(int(content["step"]), numbers)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} has a line that is no step's metrics ({error}): {line[:80]!r}. Remove it, or move the file away"
        ) from error


def _locked(path: Path) -> int:
    """Return a descriptor that holds the lock at path for as long as it is open; a dead process holds nothing."""
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
    except OSError as error:  # some network file systems cannot lock
        warnings.warn(f"{path} cannot be locked ({error}): make sure that no other run uses this folder", stacklevel=3)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _drop_torn_tail(path: Path) -> None:
    """Cut a last line that a crash left without its end: what is appended next must not be glued to it."""
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)


def _json(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(_speakable(content), ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair, which a model can emit, has no UTF-8; as \udcxx it is a valid JSON escape.
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def _speakable(value: Any) -> Any:
    """Return value as JSON can say it: a number that is not finite as None, an unknown kind of thing as its text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {str(key): _speakable(item) for key, item in value.items()}
        case list() | tuple():
            return [_speakable(item) for item in value]
        case _:
            return str(value)


def _replace(path: Path, content: bytes) -> None:
    """Put content at path: after a crash it holds the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
