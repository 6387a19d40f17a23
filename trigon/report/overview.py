"""Texts of the overview before a run and of the hints after it."""

from __future__ import annotations

import shlex
from pathlib import Path

from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.system.terminal import format_bytes
from trigon.training.protocol import Sizes


def describe_plan(
    config: Config,
    plan: Plan,
    *,
    num_val_prompts: int | None,
    device: str,
    sizes: Sizes,
    has_reference: bool,
) -> list[tuple[str, str]]:
    """Return the rows of the overview as (name, value).

    num_val_prompts: None without validation. device: description of the devices. sizes: the
    sizes of the policy on each rank that learns.
    """
    n = config.group_size
    per_worker = " on each worker" if config.num_workers > 1 else ""
    if config.trainer.val_only:
        return [
            ("device", device),
            ("validation prompts", f"{num_val_prompts or 0:,}"),
            ("steps", "none: trainer.val_only"),
            ("parameters", f"{sizes.parameters:,}"),
            ("memory", f"weights {format_bytes(sizes.weight_bytes)}{per_worker}; rollout engine not counted"),
        ]
    return [
        ("device", device),
        (
            "training prompts",
            f"{plan.num_train_prompts:,}, {plan.steps_per_epoch * plan.prompts_per_step:,} of them per epoch",
        ),
        ("validation prompts", f"{num_val_prompts:,}" if num_val_prompts is not None else "none"),
        ("steps", f"{plan.total_steps:,} ({plan.steps_per_epoch:,} per epoch)"),
        ("sampled per step", f"{plan.prompts_per_step:,} prompts x {n} = {plan.sequences_per_step:,} completions"),
        (
            "updates per step",
            f"{plan.updates_per_step:,}, each of {plan.prompts_per_update:,} prompts x {n} = "
            f"{plan.sequences_per_update:,} completions",
        ),
        (
            "micro-batches of an update",
            f"at most {plan.tokens_per_update_pass:,} tokens{per_worker}, prompts counted once",
        ),
        ("tokens per step", f"at most {plan.max_tokens_per_step:,}, prompts counted once"),
        ("reference policy", "yes" if has_reference else "none"),
        ("parameters", f"{sizes.parameters:,}, {sizes.trainable:,} of them trained"),
        (
            "memory",
            f"weights {format_bytes(sizes.weight_bytes)}, gradients {format_bytes(sizes.gradient_bytes)}, optimizer "
            f"{format_bytes(sizes.optimizer_bytes)}{per_worker}; activations and rollout engine not counted",
        ),
    ]


def suggest_next_steps(
    config: Config, folder: Path, checkpoint: Path | None, exported: Path | None, *, stopped: bool
) -> list[str]:
    """Return hints on what to do after a run, one line each.

    folder: the run folder. checkpoint: the folder of the last checkpoint, global_step_N, or None.
    exported: the exported model, if any. stopped: whether a signal stopped it before its last step.
    """
    steps = [f"look at the curves and the completions: trigon view {shlex.quote(str(folder))}"]
    if exported is None and checkpoint is not None:
        place = folder if checkpoint.parent == folder else checkpoint
        steps.append(f"export the model: trigon export {shlex.quote(str(place))}")
    if config.trainer.val_only:
        data = "" if config.data.train_files else " and data.train_files"
        return [*steps, f"train: run the same command with trainer.val_only=false{data}"]
    if stopped and checkpoint is None:
        return ["continue: the same command starts from the beginning, since no step was finished", *steps]
    same_command = config.trainer.same_command
    if stopped and checkpoint is not None:
        step = checkpoint.name.removeprefix("global_step_")
        return [f"continue: {same_command.from_checkpoint(checkpoint, f'resumes after step {step}')}", *steps]
    longer = "continues, with a larger trainer.max_steps or trainer.total_epochs"
    last = folder / "global_step_..." if checkpoint is None else checkpoint
    return [*steps, f"continue: {same_command.from_checkpoint(last, longer)}"]
