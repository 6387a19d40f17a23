"""All checks of a run in the order in which they run, and the function that runs them.

The modules of checks import heavy libraries when a check is called, not before.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trigon.config.load import InspectedConfig, inspect_config
from trigon.errors import ConfigError, TrigonError
from trigon.tools.check.result import CheckReport, CheckSkipped, Findings, Problem, Result, status_of
from trigon.tools.check.subject import Progress, Subject, no_progress

if TYPE_CHECKING:
    from trigon.tools.check.machine import Machine


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    title: one line that says what it is about. function: "module.function" in this
    folder; it takes a Subject and returns Findings. kind: of an error that it raises. reads:
    options without which it says nothing, and sections, which end in a dot.
    """

    name: str
    title: str
    function: str
    kind: str
    reads: tuple[str, ...] = ()


_MODEL = ("worker.actor.model.",)
_DATA = (*_MODEL, "data.", "worker.rollout.limit_images")
_REWARD = (*_DATA, "worker.reward.")
_CODE = ("worker.rollout.", "worker.reward.")
_EPISODES = (*_DATA, *_CODE)
_WORKERS = ("trainer.n_gpus_per_node", "trainer.nnodes", "worker.hybrid_engine")
_SIZE = ("worker.actor.", *_WORKERS)
_STEPS = (*_DATA, "worker.actor.", "trainer.max_steps", "trainer.total_epochs", "trainer.val_only")

CHECKS = (
    Check("versions", "packages, and whether their versions fit", "machine.check_versions", "versions.package"),
    Check(
        "devices",
        "GPUs that are missing, idle or used by others; kernels",
        "machine.check_devices",
        "devices.missing",
        (*_WORKERS, "trainer.device", "worker.rollout."),
    ),
    Check("network", "connections between workers", "machine.check_network", "network.loopback", _WORKERS),
    Check("loggers", "trackers", "machine.check_loggers", "loggers.package", ("trainer.logger",)),
    Check("model", "config, tokenizer and processors; no weights", "model.check_model", "model.unusable", _MODEL),
    Check("memory", "whether the run fits", "machine.check_memory", "memory.too_little", ("data.", "worker.")),
    Check("environment", "the environment or the tools", "episodes.check_code", "environment.unusable", _EPISODES),
    Check("template", "chat template and format prompt", "model.check_templates", "template.chat", _DATA),
    Check("rows", "every row, with its images decoded", "rows.check_rows", "dataset.unreadable", _DATA),
    Check("lengths", "tokens of prompts, text and images apart", "lengths.check_lengths", "dataset.unreadable", _DATA),
    Check("prompt", "one prompt exactly as the model sees it", "rows.check_prompt", "dataset.unreadable", _DATA),
    Check(
        "episode", "the first observation of an environment", "episodes.check_episode", "environment.fails", _EPISODES
    ),
    Check("duplicates", "rows with the same text and images", "rows.check_duplicates", "dataset.unreadable", _DATA),
    Check("overlap", "validation rows among those of training", "rows.check_overlap", "dataset.unreadable", _DATA),
    Check("answers", "the distribution of ground truths", "rows.check_answers", "dataset.unreadable", _DATA),
    Check("reward", "the reward function on made completions", "rewards.check_reward", "reward.unusable", _REWARD),
    Check("ground truths", "each against itself", "rewards.check_ground_truths", "reward.unusable", _REWARD),
    Check("steps", "steps and updates of the run", "plan.check_steps", "steps.plan", _STEPS),
    Check("disk", "space for checkpoints", "machine.check_disk", "disk.full", (*_SIZE, "trainer.save")),
)
"""All checks but that of the configuration, which comes first."""

CONFIGURATION = "configuration"


def check_run(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    machine: Machine | None = None,
    has_cluster: bool = False,
    progress: Progress = no_progress,
    on_result: Callable[[Result], None] | None = None,
) -> CheckReport:
    """Check the run of a YAML file and of `key=value` overrides, without loading weights.

    Args:
        machine: on which the run is to start; None: this one.
        has_cluster: see Machine; unused if there is one.
        progress: shows the progress of long checks.
        on_result: called with each result as soon as it is there.
    Raises: nothing that the run would raise: each error is a problem of the report.
    """
    start = time.monotonic()
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        if on_result is not None:
            on_result(result)

    try:
        inspected = inspect_config(path, overrides)
    except ConfigError as error:
        problem = Problem("configuration.invalid", True, str(error))
        add(Result(CONFIGURATION, "options", "fail", time.monotonic() - start, Findings("", (problem,))))
        return CheckReport(tuple(results), time.monotonic() - start)
    findings = check_configuration(inspected)
    add(Result(CONFIGURATION, "options", status_of(findings), time.monotonic() - start, findings))
    from trigon.tools.check.machine import inspect_machine

    config = inspected.loaded.config
    machine = inspect_machine(config, has_cluster=has_cluster) if machine is None else machine
    with closing(Subject(inspected, machine, progress)) as subject:
        for check in CHECKS:
            add(run_check(check, subject))
    return CheckReport(tuple(results), time.monotonic() - start)


def check_configuration(inspected: InspectedConfig) -> Findings:
    """Return the problems and warnings of a configuration."""
    loaded = inspected.loaded
    problems = [Problem("configuration.invalid", True, text) for text in inspected.problems]
    problems += [Problem("configuration.warning", False, text) for text in loaded.warnings]
    return Findings(f"{len(loaded.sources)} options are set, all others have their defaults", tuple(problems))


def run_check(check: Check, subject: Subject) -> Result:
    """Run one check. An error of Trigon is a problem of the check's kind."""
    start = time.monotonic()

    def skipped(reason: str) -> Result:
        return Result(check.name, check.title, "skipped", time.monotonic() - start, Findings(""), reason)

    for option in sorted(subject.inspected.uncertain):
        if any(option == each or option.startswith(each) for each in check.reads):
            return skipped(f"{option} is invalid or misspelt, see the check {CONFIGURATION!r}")
    module, _, name = check.function.rpartition(".")
    function: Callable[[Subject], Findings] = getattr(importlib.import_module(f"trigon.tools.check.{module}"), name)
    try:
        findings = function(subject)
    except CheckSkipped as reason:
        return skipped(str(reason))
    except TrigonError as error:
        findings = Findings("", (Problem(check.kind, True, str(error)),))
    return Result(check.name, check.title, status_of(findings), time.monotonic() - start, findings)
