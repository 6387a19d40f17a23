"""Checks a run: makes its parts by the functions that start a run, and reads all of its data.

A run stops at its first problem. Here each check reports what it finds, and the following ones run
with the parts that could be made. Heavy libraries are imported when the configuration was read.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trigon.config.load import LoadedConfig, inspect_config
from trigon.config.schema import Config
from trigon.errors import TrigonError
from trigon.report.console import Console
from trigon.system.terminal import sanitize

if TYPE_CHECKING:
    from trigon.tools.check.machine import Machine

_WORKERS = ("trainer.n_gpus_per_node", "trainer.nnodes", "worker.hybrid_engine")
_DATA = ("worker.actor.model.", "data.", "worker.rollout.limit_images")

Status = Literal["pass", "warning", "fail", "skipped"]

_SHOWN = {"pass": "pass", "warning": "warning", "fail": "FAIL", "skipped": "skipped"}
_MAX_CHARACTERS = 20_000
_WIDTH = 110
_NAME_WIDTH = 14


class Skipped(Exception):
    """Raised by a check that does not apply, or lacks what it needs. The message says why."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A part of the run that could not be made. reason: why a check that needs it is skipped."""

    reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    kind: a name for programs, which docs/check.md lists. message: what is wrong, with the value.
    advice: what to do. examples: a few of the rows or values with this problem. is_fatal: the run
    would fail, or be wasted.
    """

    kind: str
    message: str
    advice: str = ""
    examples: tuple[str, ...] = ()
    is_fatal: bool = True


@dataclass(slots=True)
class Result:
    """What one check found; the check fills it in.

    summary: one line, shown if there is no problem. text: tables, shown as they are. skipped: why
    the check was skipped; "": it was not.
    """

    name: str
    summary: str = ""
    text: str = ""
    skipped: str = ""
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0

    def fail(self, kind: str, message: str, advice: str = "", examples: Sequence[str] = ()) -> None:
        """Add a problem by which the run would fail, or be wasted."""
        self.problems.append(Problem(kind, message, advice, tuple(examples)))

    def warn(self, kind: str, message: str, advice: str = "", examples: Sequence[str] = ()) -> None:
        """Add a problem with which the run can start."""
        self.problems.append(Problem(kind, message, advice, tuple(examples), is_fatal=False))

    def add(self, is_fatal: bool, kind: str, message: str, advice: str = "", examples: Sequence[str] = ()) -> None:
        """Add a problem by which the run would fail if is_fatal, and can start otherwise."""
        (self.fail if is_fatal else self.warn)(kind, message, advice, examples)

    @property
    def status(self) -> Status:
        """How the check ended."""
        if self.skipped:
            return "skipped"
        if any(problem.is_fatal for problem in self.problems):
            return "fail"
        return "warning" if self.problems else "pass"


class Report:
    """Runs checks one after the other, and has their results by name, in this order."""

    def __init__(self, on_result: Callable[[Result], None] | None = None) -> None:
        """on_result: called with each result as soon as it is there."""
        self.results: dict[str, Result] = {}
        self.uncertain: Sequence[str] = ()
        """Options whose value is invalid, by name."""
        self._on_result = on_result

    @property
    def problems(self) -> list[Problem]:
        """All problems of all checks."""
        return [problem for result in self.results.values() for problem in result.problems]

    @property
    def would_fail(self) -> bool:
        """Whether the run would fail, or be wasted."""
        return any(problem.is_fatal for problem in self.problems)

    @property
    def seconds(self) -> float:
        """The seconds of all checks."""
        return sum(result.seconds for result in self.results.values())

    def run(
        self, name: str, kind: str, check: Callable[..., Any], *parts: Any, reads: Sequence[str] = (), **options: Any
    ) -> Any:
        """Run one check, and return the part of the run that it makes, or Missing.

        Args:
            kind: the kind of problem that a TrigonError of the check is.
            check: called with its Result, the parts and the options.
            parts: parts of the run; if one is Missing, the check is skipped.
            reads: names of options, or their beginnings; if the value of one is invalid, the check
                is skipped.
        """
        start = time.monotonic()
        result = Result(name)
        made: Any = None
        invalid = [option for option in self.uncertain if option.startswith(tuple(reads))]
        missing = [part.reason for part in parts if isinstance(part, Missing)]
        if invalid:
            result.skipped = f"{invalid[0]} is invalid or misspelt, see the check 'configuration'"
        elif missing:
            result.skipped = missing[0]
        else:
            try:
                made = check(result, *parts, **options)
            except Skipped as reason:
                result.skipped = str(reason)
            except TrigonError as error:
                made = Missing(f"see the check {name!r}")
                result.fail(kind, str(error))
        result.seconds = time.monotonic() - start
        self.results[name] = result
        if self._on_result is not None:
            self._on_result(result)
        return Missing(result.skipped) if result.skipped else made


def check_run(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    machine: Machine | None = None,
    has_cluster: bool = False,
    on_result: Callable[[Result], None] | None = None,
) -> Report:
    """Check the run of a YAML file and of `key=value` overrides, without loading weights.

    The progress of long checks is on standard error.

    Args:
        machine: the machine on which the run is to start; None: this one.
        has_cluster: see Machine; unused if there is one.
        on_result: called with each result as soon as it is there.
    Raises: nothing that the run would raise: each error is a problem of the report.
    """
    report = Report(on_result)
    inspected = report.run("configuration", "configuration.invalid", read_configuration, path, overrides)
    if not isinstance(inspected, Missing):
        report.uncertain = sorted(inspected.uncertain)
        with ExitStack() as stack:
            _check_parts(report, inspected.config, stack, machine, has_cluster)
    return report


def read_configuration(result: Result, path: Path | None, overrides: Sequence[str]) -> LoadedConfig:
    """Read the configuration, and report its problems and warnings, all at once."""
    inspected = inspect_config(path, overrides)
    for text in inspected.problems:
        result.fail("configuration.invalid", text)
    for text in inspected.warnings:
        result.warn("configuration.warning", text)
    result.summary = f"{len(inspected.sources)} options are set, all others have their defaults"
    return inspected


def _check_parts(
    report: Report, config: Config, stack: ExitStack, given_machine: Machine | None, has_cluster: bool
) -> None:
    """Make the parts of a run in the order of its start, and read its data.

    stack: ends the reward workers, and the processes of the environment or the tools.
    """
    from trigon.tools.check.environment import check_versions

    run, console = report.run, Console(stream=sys.stderr)
    run("versions", "versions.package", check_versions, config)
    # After the versions, since a package may be missing.
    from trigon.tools.check import dataset, machine, model, rewards

    here = machine.inspect_machine(config, has_cluster=has_cluster) if given_machine is None else given_machine
    devices = (*_WORKERS, "trainer.device", "worker.rollout.")
    run("devices", "devices.missing", machine.check_devices, config, here, reads=devices)
    run("network", "network.loopback", machine.check_network, config, reads=_WORKERS)
    run("loggers", "loggers.package", machine.check_loggers, config, reads=("trainer.logger",))
    given = run(
        "model", "model.unusable", model.check_model, config, on_gpus=bool(here.gpus), reads=("worker.actor.model.",)
    )
    run("memory", "memory.too_little", machine.check_memory, given, here, reads=("data.", "worker."))
    code = (*_DATA, "worker.rollout.", "worker.reward.")
    episodes = run("environment", "environment.unusable", model.check_code, given, stack, reads=code)
    # The descriptions of the tools are a part of the prompts.
    tools = episodes if config.worker.rollout.tools else None
    builder = run("template", "template.chat", model.check_templates, given, tools, reads=_DATA)
    if isinstance(given, Missing):
        builder = model.open_stand_in(config)
    datasets = run("rows", "dataset.unreadable", dataset.check_rows, config, builder, console, reads=_DATA)
    run("lengths", "dataset.unreadable", model.check_lengths, given, datasets)
    run("prompt", "dataset.unreadable", model.check_prompt, given, datasets)
    run("episode", "environment.fails", model.check_episode, given, episodes, datasets)
    run("duplicates", "dataset.unreadable", dataset.check_duplicates, datasets)
    run("overlap", "dataset.unreadable", dataset.check_overlap, datasets)
    run("answers", "dataset.unreadable", dataset.check_answers, config, datasets)
    scored = (*_DATA, "worker.reward.")
    judged = run("reward", "reward.unusable", rewards.check_reward, config, builder, datasets, stack, reads=scored)
    run("ground truths", "reward.fails", rewards.check_ground_truths, config, judged, datasets, console)
    every = ("data.", "algorithm.", "worker.", "trainer.")
    last_step = run("run folder", "checkpoint.unusable", machine.check_run_folder, config, reads=every)
    steps = (*_DATA, "worker.actor.", "trainer.max_steps", "trainer.total_epochs", "trainer.val_only")
    knows_lengths = not isinstance(given, Missing)
    plan = run(
        "steps",
        "steps.plan",
        dataset.check_steps,
        config,
        datasets,
        knows_lengths=knows_lengths,
        last_step=0 if isinstance(last_step, Missing) else last_step,
        reads=steps,
    )
    total_steps = None if isinstance(plan, Missing) else plan.total_steps
    saved = ("worker.actor.", *_WORKERS, "trainer.save")
    run("disk", "disk.full", machine.check_disk, given, here, total_steps=total_steps, reads=saved)


# -- how a report is shown, on the console and for programs ----------------------------------------


def console_lines(result: Result) -> str:
    """Return one result as text: a line, its problems with what to do, and its tables."""
    indent = " " * (10 + _NAME_WIDTH)
    lines = _wrap(result.skipped)
    for problem in result.problems:
        mark = "" if len(result.problems) == 1 else "FAIL: " if problem.is_fatal else "warning: "
        first, *rest = problem.message.splitlines() or [""]
        lines += [*_wrap(f"{mark}{first}"), *(f"  {line}" for line in rest)]
        lines += [line for example in problem.examples for line in _wrap(f"  {example}")]
        lines += _wrap(f"-> {problem.advice}") if problem.advice else []
    lines = lines or _wrap(result.summary) or [""]
    head = f"{_SHOWN[result.status]:<8}  {result.name:<{_NAME_WIDTH}}"
    shown = [f"{head}{lines[0]}", *(f"{indent}{line}" for line in lines[1:])]
    shown += [f"{indent}| {line}" for line in result.text.splitlines()]
    return sanitize("\n".join(shown), max_characters=_MAX_CHARACTERS)


def _wrap(text: str) -> list[str]:
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text, _WIDTH - 10 - _NAME_WIDTH, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
    )


def count_statuses(report: Report) -> str:
    """Return how many checks passed: "15 passed, 2 with warnings, 1 failed, 2 skipped in 3.4 s"."""
    counts = Counter(result.status for result in report.results.values())
    return (
        f"{counts['pass']} passed, {counts['warning']} with warnings, {counts['fail']} failed, {counts['skipped']} "
        f"skipped in {report.seconds:.1f} s"
    )


def as_json(report: Report) -> str:
    """Return the report for programs."""
    content = {
        "would_fail": report.would_fail,
        "seconds": round(report.seconds, 2),
        "checks": [
            {
                "name": result.name,
                "status": result.status,
                "seconds": round(result.seconds, 2),
                "summary": result.skipped or result.summary,
                "problems": [asdict(problem) for problem in result.problems],
                "text": result.text,
            }
            for result in report.results.values()
        ],
    }
    return json.dumps(content, indent=2) + "\n"
