"""The numbers of learning curves: mean and band of each group of runs, for each metric.

A group has repetitions of one experiment: runs whose configurations differ in seeds only.

The figure (figure.py) draws these numbers; `as_csv` writes them. Needs no plotting library.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, nan, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, assert_never

from trigon.config.options import format_value, options
from trigon.errors import ConfigError, DataError
from trigon.report.run import RunRecord, StepMetrics, distinct_names, merge_steps
from trigon.system.terminal import did_you_mean, nearest_key, shorten
from trigon.tools.eval.statistics import student_quantile

XAxis = Literal["step", "tokens", "hours"]
Band = Literal["std", "minmax", "ci95"]

BAND_MEANING: Mapping[Band, str] = {
    "std": "± one standard deviation",
    "minmax": "minimum to maximum",
    "ci95": "95 % confidence interval of the mean",
}

VALIDATION = ("val/accuracy_reward", "val/reward_score")
"""The first of these that a run has is plotted by default."""
TRAINING = "reward/overall"

TOKENS, SECONDS = "perf/total_num_tokens", "timing_s/step"

SEED = "seed"
NONE = "none"
NOT_COMPARED = frozenset(
    {
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.logger",
        "trainer.val_only",
        "trainer.val_generations_to_log",
        "trainer.profile_steps",
        "trainer.check_memory",
        "trainer.worker_timeout_seconds",
        "trainer.grace_seconds",
        "trainer.save_freq",
        "trainer.save_limit",
        "trainer.save_model_only",
        "trainer.save_in_background",
        "trainer.save_checkpoint_path",
        "trainer.load_checkpoint_path",
        "trainer.find_last_checkpoint",
        "trainer.accept_changes",
        "worker.reward.num_cpus",
        "worker.reward.timeout_seconds",
    }
)
"""Options that name a run, or say what is written and how, not what is learned."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line with its band. All lists have one entry per point; nan: not finite in a run.

    label: the group's label. num_runs: number of its runs. low, high: ends of the band; equal to
    mean for one run.
    """

    metric: str
    label: str
    num_runs: int
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LearningCurves:
    """The curves of a figure, by metric and then by group.

    metrics: one panel for each. smooth: see learning_curves. notes: what a reader of the figure has
    to know.
    """

    metrics: tuple[str, ...]
    curves: tuple[Curve, ...]
    x: XAxis
    band: Band
    smooth: int
    notes: tuple[str, ...]


def learning_curves(
    runs: Sequence[RunRecord],
    *,
    metrics: Sequence[str] = (),
    x: XAxis = "step",
    smooth: int = 1,
    group_by: str = "seed",
    band: Band = "std",
) -> LearningCurves:
    """Return the curves of runs.

    Args:
        metrics: keys of metrics.jsonl; empty: validation accuracy (or reward) and training reward.
        x: training steps; tokens: sum of perf/total_num_tokens; hours: sum of timing_s/step. With
            several runs in a group, tokens and hours at a step are their mean over the runs.
        smooth: number of values of a centred moving mean over the metrics of training, fewer at
            the ends. Validations are not smoothed. 1: none.
        group_by: see group_runs.
        band: the band of a group of several runs. std: sample standard deviation. ci95: by
            Student's t.
    A group has points at the steps at which all of its runs have the metric. A run that is given
    twice, also by a link, counts once, with a note.
    Raises: ConfigError for an unknown way to group; DataError if a run has no metrics, or none of
    the runs has a metric.
    """
    if smooth < 1:
        raise ConfigError(f"the moving mean is over {smooth} values, but must be over at least 1")
    if not runs:
        raise DataError("there are no runs to plot")
    notes: list[str] = []
    runs = _distinct(runs, notes.append)
    steps = {run.path: run.metrics() for run in runs}
    for run in runs:
        if not steps[run.path]:
            raise DataError(f"{run.path} has no metrics yet: no step is complete")
    known = {key for lines in steps.values() for line in lines for key in line.metrics}
    chosen = tuple(metrics) or default_metrics(known)
    for metric in chosen:
        if metric not in known:
            raise DataError(
                f"no run has the metric {metric!r}{did_you_mean(metric, sorted(known)) or ';'} docs/metrics.md "
                "explains the metrics"
            )
    groups = group_runs(runs, group_by)
    curves: list[Curve] = []
    for metric in chosen:
        for group in groups:
            curve = _curve(metric, group, steps, x=x, smooth=smooth, band=band, note=notes.append)
            if curve is not None:
                curves.append(curve)
    return LearningCurves(chosen, tuple(curves), x, band, smooth, tuple(dict.fromkeys(notes)))


def _distinct(runs: Sequence[RunRecord], note: Callable[[str], None]) -> list[RunRecord]:
    """Return each run once; two paths of one folder are one run."""
    found: dict[Path, RunRecord] = {}
    for run in runs:
        first = found.setdefault(run.path.resolve(), run)
        if first is not run:
            note(f"{first.name} was given more than once, and counts once")
    return list(found.values())


def default_metrics(known: set[str]) -> tuple[str, ...]:
    """Return the metrics that are plotted by default. known: keys that the runs have."""
    validation = [key for key in VALIDATION if key in known][:1]
    found = (*validation, *([TRAINING] if TRAINING in known else []))
    if not found:
        raise DataError(f"the runs have neither {' nor '.join((*VALIDATION, TRAINING))}; name metrics with --metric")
    return found


def is_validation(metric: str) -> bool:
    """Return whether a metric is of validations, which most steps do not have."""
    return metric.startswith(("val/", "val_"))


def _curve(
    metric: str,
    group: RunGroup,
    steps: Mapping[Any, Sequence[StepMetrics]],
    *,
    x: XAxis,
    smooth: int,
    band: Band,
    note: Callable[[str], None],
) -> Curve | None:
    """Return the curve of a group, or None if a run of it does not have the metric."""
    values: list[dict[int, float]] = []
    positions: list[dict[int, float]] = []
    for run in group.runs:
        lines = steps[run.path]
        found = {line.step: float(line.metrics[metric]) for line in merge_steps(lines) if metric in line.metrics}
        if not found:
            note(f"{run.name} has no {metric}")
            continue
        if smooth > 1 and not is_validation(metric):
            found = dict(zip(found, moving_mean(list(found.values()), smooth), strict=True))
        values.append(found)
        positions.append(_positions(run, lines, x))
    if not values:
        return None
    common = sorted(set.intersection(*(set(each) for each in values)))
    last = [max(each) for each in values]
    if not common:
        raise DataError(f"the runs of {group.label!r} have no step with {metric} in common; use --group-by none")
    if min(last) < max(last):
        note(f"{group.label}: to step {min(last)} of {max(last)}, where the shortest run ends")
    points = [[each[step] for each in values] for step in common]
    bands = [interval(point, band) for point in points]
    return Curve(
        metric=metric,
        label=group.label,
        num_runs=len(values),
        x=tuple(fmean(each[step] for each in positions) for step in common),
        mean=tuple(_mean(point) for point in points),
        low=tuple(low for low, _ in bands),
        high=tuple(high for _, high in bands),
    )


def _positions(run: RunRecord, lines: Sequence[StepMetrics], x: XAxis) -> dict[int, float]:
    """Return where each step of a run is on the axis."""
    match x:
        case "step":
            return {line.step: float(line.step) for line in lines}
        case "tokens":
            key, scale = TOKENS, 1.0
        case "hours":
            key, scale = SECONDS, 1 / 3600
        case _:
            assert_never(x)
    if not any(key in line.metrics for line in lines):
        raise DataError(f"{run.path} cannot be plotted over {x}: it has no {key}")
    # Of the training only: a validation of an earlier step may have been added later.
    first_lines: dict[int, StepMetrics] = {}
    for line in lines:
        first_lines.setdefault(line.step, line)
    steps = sorted(first_lines)
    sums = accumulate(first_lines[step].metrics.get(key, 0.0) * scale for step in steps)
    return dict(zip(steps, sums, strict=True))


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Return the centred moving mean over width values; fewer at the ends, where it is narrower.

    Values that are not finite are left out; nan where there is no other.
    """
    before, after = (width - 1) // 2, width // 2
    means: list[float] = []
    for index in range(len(values)):
        window = [value for value in values[max(0, index - before) : index + after + 1] if isfinite(value)]
        means.append(fmean(window) if window else nan)
    return means


def interval(values: Sequence[float], band: Band) -> tuple[float, float]:
    """Return the ends of the band at a point. values: the values of the runs."""
    if not all(map(isfinite, values)):
        return nan, nan
    if band == "minmax" or len(values) == 1:
        return min(values), max(values)
    half = stdev(values)
    if band == "ci95":
        half *= student_quantile(0.975, len(values) - 1) / sqrt(len(values))
    mean = fmean(values)
    return mean - half, mean + half


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if all(map(isfinite, values)) else nan


def as_csv(curves: LearningCurves) -> str:
    """Return the numbers of the figure, one point per line; empty: not finite."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["metric", "group", "runs", curves.x, "mean", "low", "high"])
    for curve in curves.curves:
        for point in zip(curve.x, curve.mean, curve.low, curve.high, strict=True):
            numbers = [repr(number) if isfinite(number) else "" for number in point]
            writer.writerow([curve.metric, curve.label, curve.num_runs, *numbers])
    return text.getvalue()


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs that become one curve. label: what distinguishes it from the other groups."""

    label: str
    runs: tuple[RunRecord, ...]


def group_runs(runs: Sequence[RunRecord], by: str) -> list[RunGroup]:
    """Return the runs in groups, in the order of their first runs.

    by: "seed" groups runs whose configurations differ in seeds only; "none" makes a group of each
    run; the name of an option groups runs with the same value of it; others may differ.
    Raises: ConfigError if there is no such option.
    """
    configs = [comparable(run) for run in runs]
    if by == NONE:
        return _named([[run] for run in runs], [dict(config) for config in configs])
    name = None if by == SEED else _option_name(by)
    # A value that is nowhere in a configuration is the default, which `comparable` has added.
    compared = [_without_seeds(config) if name is None else {name: config.get(name)} for config in configs]
    members: dict[str, list[int]] = {}
    for index, config in enumerate(compared):
        members.setdefault(_text(config), []).append(index)
    groups = [[runs[index] for index in each] for each in members.values()]
    first = [compared[each[0]] for each in members.values()]
    if name is None:
        return _named(groups, first)
    values = [config[name] for config in first]
    labels = [f"{name.rpartition('.')[2]} {_shown(value)}" for value in values]
    if len(set(labels)) < len(labels):  # they differ in what is left out
        labels = [f"{name.rpartition('.')[2]} {_text(value)}" for value in values]
    return [RunGroup(label, tuple(each)) for label, each in zip(labels, groups, strict=True)]


def comparable(run: RunRecord) -> dict[str, Any]:
    """Return the options of a run by name, with what every run has of its own replaced.

    Options that it was started without have today's defaults. In texts, the folder that contains
    the run folder is *, and "seed3" is "seed*" in a run with seed 3: trigon quickstart makes the
    model and the data of a run next to it, from its seed.
    """
    given = run.options()
    if not given:
        return {}
    values = {option.name: option.default for option in options().values()} | given
    saved = values.get("trainer.save_checkpoint_path")
    parents = {str(run.path.parent), str(run.path.resolve().parent), *([str(Path(saved).parent)] if saved else [])}
    seeds = {str(value) for name, value in values.items() if _is_seed(name) and value is not None}
    return {
        name: _replace(value, parents - {".", "/"}, seeds) for name, value in values.items() if name not in NOT_COMPARED
    }


def _is_seed(name: str) -> bool:
    return name.rpartition(".")[2] == "seed"


def _without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not _is_seed(name)}


def _replace(value: Any, parents: set[str], seeds: set[str]) -> Any:
    """Return a value in whose texts the parents are * and the seeds are seed*."""
    match value:
        case str():
            for parent in sorted(parents, key=len, reverse=True):
                if value == parent or value.startswith(f"{parent}/"):
                    value = f"*{value[len(parent) :]}"
            for seed in seeds:
                value = re.sub(rf"(seed[_-]?){re.escape(seed)}(?!\d)", r"\1*", value)
            return value
        case Mapping():
            return {key: _replace(item, parents, seeds) for key, item in value.items()}
        case list() | tuple():
            return [_replace(item, parents, seeds) for item in value]
        case _:
            return value


def _option_name(by: str) -> str:
    names = [option.name for option in options().values()]
    matching = [name for name in names if name == by or name.endswith(f".{by}")]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ConfigError(f"runs cannot be grouped by {by!r}: it may be {' or '.join(matching)}; give the whole name")
    raise ConfigError(
        f"runs cannot be grouped by {by!r}: there is no such option; did you mean {nearest_key(by, names)}? "
        "Or give seed, or none"
    )


def _named(groups: Sequence[list[RunRecord]], configs: Sequence[Mapping[str, Any]]) -> list[RunGroup]:
    """Return the groups with labels: the options that differ between them, or the runs' names.

    configs: the configuration of each group, without seeds if its runs have several.
    """
    names = distinct_names([runs[0] for runs in groups])
    if len(groups) == 1:
        runs = groups[0]
        label = names[0] if len(runs) == 1 else f"{len(runs)} seeds"
        return [RunGroup(label, tuple(runs))]
    differing = sorted({name for config in configs for name in config} - _common(configs))
    # data.seed and worker.rollout.seed are usually equal, and then named once.
    parts = [
        list(dict.fromkeys(f"{name.rpartition('.')[2]} {_shown(config.get(name))}" for name in differing))
        for config in configs
    ]
    labels = [", ".join(each) for each in parts]
    is_short = all(0 < len(each) <= 2 for each in parts) and max(map(len, labels)) <= 40
    readable = is_short and len(set(labels)) == len(labels)
    return [RunGroup(label, tuple(runs)) for label, runs in zip(labels if readable else names, groups, strict=True)]


def _common(configs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of options with the same value in all configurations."""
    first = configs[0]
    return {name for name in first if all(_text(config.get(name)) == _text(first[name]) for config in configs[1:])}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _shown(value: Any) -> str:
    text = format_value(tuple(value) if isinstance(value, list) else value)
    return shorten(text, 40)
