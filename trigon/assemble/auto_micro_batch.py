"""Measures token budgets on the device instead of reading them from the configuration.

Used with trainer.auto_micro_batch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from trigon.assemble.engines import Engines
from trigon.assemble.options import model_path
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import RunFolder
from trigon.system.secrets import mask
from trigon.system.terminal import format_bytes
from trigon.training.budget import Budgets, Lengths


def tune_plan(
    config: Config,
    plan: Plan,
    engines: Engines,
    folder: RunFolder,
    report: Reporter,
    console: Console,
    *,
    resumes: bool,
) -> Plan:
    """Return the plan with token budgets that fill the device's memory.

    The budgets are stored in the run folder and reused while make_budget_key returns the same: a
    run that is resumed with other budgets packs other rows, which changes the last bits of its
    numbers. resumes: the run continues from a checkpoint; new budgets are then warned about.
    """
    if config.trainer.auto_micro_batch is None:
        console.print(
            "trainer.auto_micro_batch is on by default on a GPU: worker.actor.micro_batch_size_per_device_for_update "
            "and micro_batch_size_per_device_for_experience are not used; trainer.auto_micro_batch=false uses them"
        )
    lengths = make_lengths(config, plan)
    # Through JSON, as the stored key has gone through it.
    budget_key = json.loads(json.dumps(make_budget_key(config, lengths)))
    stored, known = folder.read_budgets(), None
    if stored is not None and stored.keys() == {"budgets", "measured_for"} and stored["measured_for"] == budget_key:
        known = Budgets(**stored["budgets"])
    with report.phase("measure memory"):
        budgets = engines.tune_micro_batch(lengths, known)
    if budgets != known:
        folder.write_budgets({"budgets": asdict(budgets), "measured_for": budget_key})
        if resumes:
            report.warn(
                "token budgets were measured again, so the numbers may differ in their last bits from those of the "
                "run so far"
            )
    console.print(
        f"auto micro-batch: {budgets.update_tokens:,} tokens per update pass ({format_bytes(budgets.update_bytes)} of "
        f"{format_bytes(budgets.device_bytes)}), {budgets.experience_tokens:,} per pass without gradient "
        f"({format_bytes(budgets.experience_bytes)}){', reused from the run folder' if budgets == known else ''}"
    )
    critic = plan.critic
    if config.has_critic:
        console.print(
            f"auto micro-batch of the critic: {budgets.critic_update_tokens:,} tokens per update pass, "
            f"{budgets.critic_experience_tokens:,} per pass without gradient"
        )
        critic = replace(
            critic,
            tokens_per_update_pass=budgets.critic_update_tokens,
            tokens_per_experience_pass=budgets.critic_experience_tokens,
        )
    return replace(
        plan,
        tokens_per_update_pass=budgets.update_tokens,
        tokens_per_experience_pass=budgets.experience_tokens,
        critic=critic,
    )


def make_lengths(config: Config, plan: Plan) -> Lengths:
    """Return the largest lengths that the groups of a run can have."""
    data = config.data
    group_tokens = data.max_prompt_length + config.group_size * data.max_response_length
    return Lengths(
        prompt_tokens=data.max_prompt_length,
        response_tokens=data.max_response_length,
        image_pixels=data.max_pixels,
        update_tokens=plan.prompts_per_update * group_tokens,
        step_tokens=plan.prompts_per_step * group_tokens,
        critic_update_tokens=plan.critic.prompts_per_update * group_tokens if config.has_critic else 0,
    )


def make_budget_key(config: Config, lengths: Lengths) -> dict[str, object]:
    """Return everything that the memory of a pass depends on, except the device."""
    actor = config.worker.actor
    return {
        "model": model_path(config),
        "workers": config.num_workers,
        "workers_per_row": actor.ulysses_sequence_parallel_size,
        "lengths": asdict(lengths),
        "loss": [
            actor.loss_type,
            config.algorithm.kl_in_loss,
            actor.entropy_coeff > 0,
            actor.router_aux_loss_coef > 0,
            config.mismatch_correction,
        ],
        "strategy": actor.optim.strategy,
        "actor.model": mask("worker.actor.model", actor.model.model_dump(exclude={"vision_cache_gb"})),
        "actor.fsdp": actor.fsdp.model_dump(),
        "actor.offload": actor.offload.model_dump(),
        "ref": config.worker.ref.model_dump() if config.needs_reference else None,
        "critic": mask("worker.critic", config.worker.critic.model_dump()) if config.has_critic else None,
    }
