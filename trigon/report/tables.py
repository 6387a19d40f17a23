"""The metrics and the rollouts of a run as tables of pandas and Arrow.

Both libraries are dependencies of `datasets`, and are imported when a table is made.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trigon.report.rollouts import SPLITS, RolloutRow, Split, TokenRecord, read_rollouts, row_to_line
from trigon.report.run import RunRecord, StepMetrics, open_run
from trigon.system.suggestions import did_you_mean

if TYPE_CHECKING:
    import pandas
    import pyarrow

PARTS = "parts."
"""Begins the names of the columns of the parts of the reward: `parts.accuracy`."""


@dataclass(frozen=True, slots=True)
class RunTables:
    """A run as its folder describes it. Tables are read when they are asked for.

    record: the run; record.path is its folder.
    """

    record: RunRecord

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.record.path

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration, nested; empty if the run has not written it yet."""
        return self.record.config()

    def metrics(self) -> pandas.DataFrame:
        """Return the metrics as a table with a row for each step, by which it is indexed.

        A validation that was added to a finished run (trainer.val_only) is in the row of its step,
        and replaces the metrics of the same names.
        nan: a metric that the step does not have, or that was not finite.
        """
        return self.metrics_arrow().to_pandas().set_index("step")

    def metrics_arrow(self) -> pyarrow.Table:
        """Return the metrics as an Arrow table: the column `step`, and one for each metric."""
        return metrics_table(self.record.metrics())

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
        range(10, 20); None: all. tokens: with the column `tokens`, which takes more memory than all
        others.
        Raises: ValueError for an unknown split; DataError for an invalid file.
        """
        import pyarrow

        chosen = _checked_splits(splits)
        rows = [
            {"step": file.step, "split": file.split, **_flat(row)}
            for file in self.record.rollout_files()
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
    return RunTables(open_run(Path(path)))


def metrics_table(steps: list[StepMetrics]) -> pyarrow.Table:
    """Return the metrics of steps as an Arrow table; null where a step does not have a metric.

    Of several lines of a step, a later one adds its metrics, and replaces those of the same names.
    """
    import pyarrow

    rows: dict[int, dict[str, float]] = {}
    for line in steps:
        rows.setdefault(line.step, {}).update(line.metrics)
    names = sorted({name for row in rows.values() for name in row})
    columns: dict[str, Any] = {"step": pyarrow.array(list(rows), pyarrow.int64())}
    for name in names:
        columns[name] = pyarrow.array([row.get(name) for row in rows.values()], pyarrow.float64())
    return pyarrow.table(columns)


def _checked_splits(splits: Collection[str]) -> Collection[str]:
    """Return the names of splits. Raises: ValueError if one is unknown."""
    names = [splits] if isinstance(splits, str) else splits
    for name in names:
        if name not in SPLITS:
            hint = did_you_mean(str(name), SPLITS, cutoff=0.4)
            raise ValueError(f"splits has {name!r}; choose of {', '.join(SPLITS)}{hint}")
    return names


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
    """Return the columns of a rollout; those of _column_types, and its parts."""
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
