"""The check of the numbers of a run: its steps, updates and completions."""

from __future__ import annotations

from trigon.config.plan import find_long_warmups
from trigon.errors import ConfigError
from trigon.tools.check.result import CheckSkipped, Findings, Problem
from trigon.tools.check.subject import Subject


def check_steps(subject: Subject) -> Findings:
    """Return whether an epoch fills a step, and how many steps and updates there are."""
    if subject.given.trainer.val_only:
        raise CheckSkipped("trainer.val_only takes no steps")
    try:
        plan = subject.plan.get()
    except ConfigError as error:
        return Findings("", (Problem("steps.plan", True, str(error)),))
    problems = [Problem("steps.warmup", False, text) for text in find_long_warmups(subject.given, plan)]
    unknown = "" if subject.reads_model else ", if none of the prompts is too long"
    return Findings(
        f"{plan.num_train_prompts:,} prompts, {plan.total_steps:,} steps of {plan.prompts_per_step} prompts and "
        f"{plan.sequences_per_step} completions, {plan.total_updates:,} updates{unknown}",
        tuple(problems),
    )
