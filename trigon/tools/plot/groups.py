"""Which runs are repetitions of one experiment: those whose configurations differ in seeds only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trigon.config.options import format_value, options
from trigon.errors import ConfigError
from trigon.report.run import RunRecord, distinct_names, flatten
from trigon.system.suggestions import nearest_key
from trigon.system.terminal import shorten

SEED = "seed"
NONE = "none"

NOT_COMPARED = frozenset(
    {
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.logger",
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
    if by == SEED:
        keys = [_text(_without_seeds(config)) for config in configs]
    else:
        name = _option_name(by)
        # A value that is nowhere in a configuration is the default, which `comparable` has added.
        keys = [f"{name.rpartition('.')[2]} {_shown(config.get(name))}" for config in configs]
    members: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    if by != SEED:
        return [RunGroup(key, tuple(runs[index] for index in each)) for key, each in members.items()]
    groups = [[runs[index] for index in each] for each in members.values()]
    return _named(groups, [_without_seeds(configs[each[0]]) for each in members.values()])


def comparable(run: RunRecord) -> dict[str, Any]:
    """Return the options of a run by name, with what every run has of its own replaced.

    Options that it was started without have today's defaults. In texts, the folder that contains
    the run folder is *, and "seed3" is "seed*" in a run with seed 3: trigon quickstart makes the
    model and the data of a run next to it, from its seed.
    """
    defaults = {option.name: option.default for option in options().values()}
    given = flatten(run.config(), mappings=defaults)
    if not given:
        return {}
    values = defaults | given
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

    configs: of each group, without seeds if its runs have several.
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
