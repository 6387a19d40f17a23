"""Token budgets measured on the device instead of configured (trainer.auto_micro_batch)."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from trigon.config.plan import Plan, num_workers
from trigon.config.schema import Config
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import RunFolder
from trigon.training.budget import Budgets, Lengths

from trigon.build.engines import Engines
from trigon.build.options import loss_terms, model_path, needs_reference
from trigon.report.summary import readable


def plan_with_budgets(
    config: Config,
    plan: Plan,
    engines: Engines,
    folder: RunFolder,
    report: Reporter,
    console: Console,
    *,
    resumes: bool,
) -> Plan:
    """Return the plan with as many tokens in a pass as the device has memory for.

    What was measured is kept in the run folder, and holds for as long as nothing changes that it depends on: other
    budgets would pack other rows, and change the last bits of a run that goes on.
    """
    lengths = lengths_of(config, plan)
    found, known = folder.read_budgets(), None
    measured_for = json.loads(json.dumps(budget_cache_key(config, lengths)))  # as it comes back from the file
    if found is not None and found.keys() == {"budgets", "measured_for"} and found["measured_for"] == measured_for:
        known = Budgets(**found["budgets"])
    with report.phase("measure memory"):
        budgets = engines.tune_micro_batch(lengths, known)
    if budgets != known:
        folder.write_budgets({"budgets": asdict(budgets), "measured_for": measured_for})
        if resumes:
            report.warn("token budgets were measured anew, so that rounding differs from that of the run so far")
    console.print(
        f"auto micro-batch: {budgets.update_tokens:,} tokens an update pass ({readable(budgets.update_bytes)} of "
        f"{readable(budgets.device_bytes)}), {budgets.experience_tokens:,} a pass without gradient "
        f"({readable(budgets.experience_bytes)}){', as measured before' if budgets == known else ''}"
    )
    return replace(
        plan, tokens_per_update_pass=budgets.update_tokens, tokens_per_experience_pass=budgets.experience_tokens
    )


def lengths_of(config: Config, plan: Plan) -> Lengths:
    """Return what the groups of a run have at most."""
    data = config.data
    group = data.max_prompt_length + config.worker.rollout.n * data.max_response_length
    return Lengths(
        prompt_tokens=data.max_prompt_length,
        response_tokens=data.max_response_length,
        image_pixels=data.max_pixels,
        update_tokens=plan.prompts_per_update * group,
        step_tokens=plan.prompts_per_step * group,
    )


def budget_cache_key(config: Config, lengths: Lengths) -> dict[str, object]:
    """Return what the memory of a pass depends on, besides the device."""
    actor = config.worker.actor
    return {
        "model": model_path(config),
        "workers": num_workers(config),
        "lengths": asdict(lengths),
        "terms": asdict(loss_terms(config)),
        "strategy": actor.optim.strategy,
        "actor.model": actor.model.model_dump(exclude={"vision_cache_gb"}),
        "actor.fsdp": actor.fsdp.model_dump(),
        "actor.offload": actor.offload.model_dump(),
        "ref": config.worker.ref.model_dump() if needs_reference(config) else None,
    }
