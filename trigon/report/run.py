"""Reads the folder of a run, which may still be written to: metrics, rollouts, configuration.

Tables are of pandas and Arrow, dependencies of `datasets` that are imported when one is made.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trigon.config.options import options
from trigon.errors import CheckpointError, DataError
from trigon.report.rollouts import (
    SPLITS,
    RolloutFile,
    RolloutRow,
    Split,
    TokenRecord,
    find_rollouts,
    read_rollouts,
    row_to_line,
)
from trigon.system.files import parse_json, read_json_object
from trigon.system.terminal import did_you_mean

if TYPE_CHECKING:
    import pandas
    import pyarrow

METRICS = "metrics.jsonl"
CONFIG = "config.yaml"
SOURCES = "local_sources.json"
LOCK = "run.lock"


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


def merge_steps(lines: Sequence[StepMetrics]) -> list[StepMetrics]:
    """Return the metrics of each step once, by step.

    Of several lines of a step, a later one adds its metrics, and replaces metrics of the same
    names: trainer.val_only adds a validation of any step at the end of the file.
    """
    merged: dict[int, dict[str, float]] = {}
    for line in lines:
        merged.setdefault(line.step, {}).update(line.metrics)
    return [StepMetrics(step, merged[step]) for step in sorted(merged)]


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


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as its folder describes it. Everything is read when it is asked for.

    path: the run folder.
    """

    path: Path

    @property
    def name(self) -> str:
        """Return a short name: the names of the parent folder and of the folder."""
        return "/".join(self.path.resolve().parts[-2:])

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration, nested; empty if the run has not written it yet."""
        path = self.path / CONFIG
        if not path.exists():
            return {}
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError) as error:
            raise DataError(f"{path} is not valid YAML: {error}") from error
        except RecursionError:
            raise DataError(f"{path} is not the configuration of a run: it is nested too deeply") from None
        if not isinstance(content, dict):
            raise DataError(f"{path} contains no configuration")
        return content

    def options(self) -> dict[str, Any]:
        """Return the options that config.yaml has, by their names."""
        return flatten(self.config(), mappings={option.name for option in options().values()})

    def local_sources(self) -> dict[str, str] | None:
        """Return the absolute paths of the data, models, code and templates on the run's machine.

        Keys are the texts of config.yaml, whose relative paths are of the folder in which the run
        was started. None: the run did not write them. Raises: DataError for an invalid file.
        """
        path = self.path / SOURCES
        if not path.exists():
            return None
        try:
            content = read_json_object(path)
        except ValueError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        return {text: str(source) for text, source in content.items()}

    def is_running(self) -> bool:
        """Return whether a process writes to the folder now, on any machine that has it.

        True where that is unknown: the file system has no locks, or the lock cannot be opened.
        """
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            # Free locks are held for microseconds here, in which a run could not start.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def metrics(self) -> list[StepMetrics]:
        """Return the metrics of all steps so far. Raises: CheckpointError for an invalid line."""
        return read_metrics(self.path)

    def rollout_files(self) -> list[RolloutFile]:
        """Return the rollouts files so far, by step."""
        return find_rollouts(self.path)

    def rollouts(self, *, splits: Collection[Split] = SPLITS) -> Iterator[tuple[RolloutFile, RolloutRow]]:
        """Yield each rollout with the file that it is in. Raises: DataError for an invalid line."""
        for file in self.rollout_files():
            if file.split in splits:
                for row in read_rollouts(file.path):
                    yield file, row


def open_run(path: Path) -> RunRecord:
    """Return the run in a folder.

    path: the run folder, or a folder that contains one run, such as runs/quickstart, in which
    trigon quickstart writes run/.
    Raises: DataError if there is no run.
    """
    if is_run(path):
        return RunRecord(path)
    if not path.exists():
        raise DataError(f"there is no run at {path}: the folder does not exist")
    if not path.is_dir():
        run = next((each for each in path.absolute().parents[:2] if is_run(each)), None)
        raise DataError(f"{path} is a file; name the folder of the run" + (f", {run}" if run is not None else ""))
    inside = sorted(each for each in path.iterdir() if each.is_dir() and is_run(each))
    if len(inside) == 1:
        return RunRecord(inside[0])
    if inside:
        names = ", ".join(str(each) for each in inside[:5])
        raise DataError(f"{path} contains {len(inside)} runs; name one of them: {names}")
    raise DataError(f"{path} is not the folder of a run: it has no {METRICS}, {CONFIG} or rollouts/")


def find_runs(path: Path) -> list[RunRecord]:
    """Return the run in a folder, or all runs in it and in the folders that it contains, by path.

    Folders in it that may not be read are skipped, such as lost+found. Raises: DataError if there
    is no run.
    """
    if is_run(path) or not path.is_dir():
        return [open_run(path)]
    inside = sorted(each for each in path.iterdir() if each.is_dir() and os.access(each, os.R_OK | os.X_OK))
    runs = [
        RunRecord(run)
        for each in inside
        for run in ([each] if is_run(each) else sorted(part for part in each.iterdir() if is_run(part)))
    ]
    return runs or [open_run(path)]


def distinct_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return a name for each run: the parts of its path in which the runs differ.

    Two quickstarts, a/run and b/run, are a and b.
    """
    paths = [run.path.resolve().parts for run in runs]
    if len(paths) == 1:
        return [runs[0].name]
    start = end = 0
    while all(len(path) > start + 1 and path[start] == paths[0][start] for path in paths):
        start += 1
    while all(len(path) - end > start + 1 and path[-1 - end] == paths[0][-1 - end] for path in paths):
        end += 1
    return ["/".join(path[start : len(path) - end]) for path in paths]


def is_run(path: Path) -> bool:
    """Return whether a folder is a run folder that may be read."""
    return (
        path.is_dir()
        and os.access(path, os.X_OK)
        and ((path / METRICS).is_file() or (path / CONFIG).is_file() or (path / "rollouts").is_dir())
    )


def flatten(config: Mapping[str, Any], *, mappings: Collection[str] | None = None) -> dict[str, Any]:
    """Return a nested configuration with dotted keys: {"trainer.max_steps": 3}.

    mappings: names whose value is a mapping; every other mapping is a section. None: not known, so
    that only empty mappings are values.
    """

    def entries(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping) and (value if mappings is None else name not in mappings):
                yield from entries(value, f"{name}.")
            else:
                yield name, value

    return dict(entries(config, ""))


PARTS = "parts."
"""Begins the names of the columns of the parts of the reward: `parts.accuracy`."""


@dataclass(frozen=True, slots=True)
class RunTables:
    """A run as its folder describes it. Tables are read when they are asked for.

    folder: the run folder.
    """

    folder: Path

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration, nested; empty if the run has not written it yet."""
        return RunRecord(self.folder).config()

    def metrics(self) -> pandas.DataFrame:
        """Return the metrics as a table with a row for each step, by which it is indexed.

        A validation that was added to a finished run (trainer.val_only) is in the row of its step,
        and replaces the metrics of the same names.
        nan: a metric that the step does not have, or that was not finite.
        """
        return self.metrics_arrow().to_pandas().set_index("step")

    def metrics_arrow(self) -> pyarrow.Table:
        """Return the metrics as an Arrow table: the column `step`, and one for each metric.

        It has a row for each step, see merge_steps; null where a step does not have a metric.
        """
        import pyarrow

        rows = merge_steps(read_metrics(self.folder))
        names = sorted({name for row in rows for name in row.metrics})
        columns: dict[str, Any] = {"step": pyarrow.array([row.step for row in rows], pyarrow.int64())}
        for name in names:
            columns[name] = pyarrow.array([row.metrics.get(name) for row in rows], pyarrow.float64())
        return pyarrow.table(columns)

    def rollouts(
        self, *, splits: Split | Collection[Split] = SPLITS, steps: Container[int] | None = None, tokens: bool = False
    ) -> pandas.DataFrame:
        """Return the rollouts as a table. Args: as for rollouts_arrow."""
        return self.rollouts_arrow(splits=splits, steps=steps, tokens=tokens).to_pandas()

    def rollouts_arrow(
        self, *, splits: Split | Collection[Split] = SPLITS, steps: Container[int] | None = None, tokens: bool = False
    ) -> pyarrow.Table:
        """Return the rollouts as an Arrow table with a row for each completion.

        The columns are `step`, `split`, and the fields of docs/view.md, except that each part
        of the reward is a column of its own, `parts.accuracy`. `row`, and a `ground_truth` that is
        no text, are JSON.

        Args: splits: "train", "filtered", "validation", or one of them as text. steps: such as
        range(10, 20); None: all. tokens: add the column `tokens`, which takes more memory than all
        others.
        Raises: ValueError for an unknown split; DataError for an invalid file.
        """
        import pyarrow

        chosen = [splits] if isinstance(splits, str) else splits
        for name in chosen:
            if name not in SPLITS:
                hint = did_you_mean(str(name), SPLITS, cutoff=0.4)
                raise ValueError(f"splits has {name!r}; choose of {', '.join(SPLITS)}{hint}")
        rows = [
            {"step": file.step, "split": file.split, **_flat(row)}
            for file in find_rollouts(self.folder)
            if file.split in chosen and (steps is None or file.step in steps)
            for row in read_rollouts(file.path)
        ]
        types = _column_types()
        if not tokens:
            del types["tokens"]
        parts = sorted({name for row in rows for name in row if name.startswith(PARTS)})
        types |= dict.fromkeys(parts, pyarrow.float64())
        return pyarrow.table(
            {name: pyarrow.array([row.get(name) for row in rows], kind) for name, kind in types.items()}
        )


def load_run(path: str | Path) -> RunTables:
    """Return the metrics, rollouts and configuration of a run, which may still be in progress.

    path: the run folder, or a folder that contains one run. Raises: DataError if there is none.
    """
    return RunTables(open_run(Path(path)).path)


def _column_types() -> dict[str, Any]:
    """Return the Arrow type of each column but the parts, in order."""
    import pyarrow

    text, integer, number = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    texts, pairs = pyarrow.list_(text), pyarrow.list_(pyarrow.list_(integer))
    per_token = {each.name: pyarrow.list_(number) for each in fields(TokenRecord)}
    turn = {"observation": text, "text": text, "num_tokens": integer, "reward": number}
    kinds = {
        **dict.fromkeys(("step", "sample", "num_tokens", "policy_version", "num_prompt_tokens", "version"), integer),
        **dict.fromkeys(("reward", "advantage"), number),
        **dict.fromkeys(("images", "image_files"), texts),
        **dict.fromkeys(("policy_versions", "image_sizes"), pairs),
        "tokens": pyarrow.struct({**per_token, "ids": pyarrow.list_(integer), "texts": texts}),
        "turns": pyarrow.list_(pyarrow.struct({**turn, "image_files": texts, "image_sizes": pairs})),
    }
    names = ["step", "split", *(each.name for each in fields(RolloutRow) if each.name != "parts")]
    return {name: kinds.get(name, text) for name in names}


def _flat(row: RolloutRow) -> dict[str, Any]:
    """Return the columns of a rollout: the columns of _column_types, and its parts."""
    content = json.loads(row_to_line(row))
    parts = {f"{PARTS}{name}": number for name, number in content.pop("parts").items()}
    for name in ("ground_truth", "row"):
        if not isinstance(content[name], str):
            content[name] = json.dumps(content[name], ensure_ascii=False)
    flat: dict[str, Any] = _with_utf8(content | parts)
    return flat


def _with_utf8(value: Any) -> Any:
    """Return a value whose texts have a UTF-8: models can write half of a surrogate pair."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        case dict():
            return {key: _with_utf8(item) for key, item in value.items()}
        case list():
            return [_with_utf8(item) for item in value]
        case _:
            return value
