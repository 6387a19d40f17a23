"""What a run will do and what it did, as rows of text for the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.training.local import Sizes


def planned(
    config: Config,
    plan: Plan,
    *,
    num_val_prompts: int | None,
    device: str,
    sizes: Sequence[Sizes],
    has_reference: bool,
) -> list[tuple[str, str]]:
    """Return what the run will do, as (what, how much):

    the arithmetic that people otherwise do by hand, and get wrong.
    """
    n = config.worker.rollout.n
    size = sizes[0]
    each = " on each worker" if len(sizes) > 1 else ""
    return [
        ("device", device),
        (
            "training prompts",
            f"{plan.num_train_prompts:,}, {plan.steps_per_epoch * plan.prompts_per_step:,} of them in an epoch",
        ),
        ("validation prompts", f"{num_val_prompts:,}" if num_val_prompts is not None else "none"),
        ("steps", f"{plan.total_steps:,} ({plan.steps_per_epoch:,} an epoch)"),
        ("a step samples", f"{plan.prompts_per_step:,} prompts x {n} = {plan.sequences_per_step:,} answers"),
        (
            "a step learns",
            f"in {plan.updates_per_step:,} updates of {plan.prompts_per_update:,} prompts x {n} = "
            f"{plan.sequences_per_update:,} answers",
        ),
        (
            "an update runs",
            f"in micro-batches of at most {plan.tokens_per_update_pass:,} tokens{each}, prompts counted once",
        ),
        ("a step's tokens", f"at most {plan.max_tokens_per_step:,}, prompts counted once"),
        ("reference policy", "yes" if has_reference else "none"),
        ("parameters", f"{size.parameters:,}, {size.trainable:,} of them trained"),
        (
            "memory",
            f"weights {readable(size.weight_bytes)}, gradients {readable(size.gradient_bytes)}, optimizer "
            f"{readable(size.optimizer_bytes)}{each}; activations and rollout engine not counted",
        ),
    ]


def readable(num_bytes: int) -> str:
    """Return a number of bytes as a person says it: "3.3 MiB", "7.0 GiB"."""
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.1f} GiB"


def next_steps(config: Config, folder: Path, exported: Path | None, step: int) -> list[str]:
    """Return what to try after a run."""
    steps = [f"read what the model says: {folder / 'rollouts'}/*.jsonl"]
    if exported is None and step > 0:
        steps.append(f"export it: trigon export {folder}")
    steps.append("go on: the same command with a larger trainer.max_steps or trainer.total_epochs resumes")
    return steps
