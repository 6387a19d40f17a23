"""The lines of metrics.jsonl: the metrics of each step of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path

from trigon.errors import CheckpointError
from trigon.system.json_files import parse_json

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of a step. nan: a number that was not finite."""

    step: int
    metrics: Mapping[str, float]


def read_metrics(folder: Path) -> list[StepMetrics]:
    """Return the steps in metrics.jsonl of a run folder, without an incomplete last line.

    The file may be in use by a run. Raises: CheckpointError if another line cannot be parsed.
    """
    file = folder / METRICS
    if not file.exists():
        return []
    complete, _, _incomplete = file.read_bytes().rpartition(b"\n")
    return [parse_step(line, file) for line in complete.split(b"\n") if line]


def parse_step(line: bytes, path: Path) -> StepMetrics:
    """Return the metrics in a line of the file at path. Raises: CheckpointError."""
    try:
        content = parse_json(line)
        numbers = {key: nan if value is None else value for key, value in content["metrics"].items()}
        for key, value in numbers.items():
            if not isinstance(value, int | float):
                raise ValueError(f"{key!r} is no number")
        return StepMetrics(int(content["step"]), numbers)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{path} has a line without the metrics of a step ({error}): {line[:80]!r}. Remove the line, or move the "
            "file away"
        ) from error
