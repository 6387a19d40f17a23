"""Writes a plan as text for people, or as JSON. Every number has its unit."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from trigon.assemble.memory_table import PhaseMemory, format_gib
from trigon.tools.plan.result import RunPlan
from trigon.tools.plan.timing import PHASES

_NAMES = {
    "data": "data",
    "weights": "weight sync",
    "gen": "sampling",
    "reward": "rewards",
    "parity": "parity probe",
    "old": "log-probs, policy",
    "ref": "log-probs, reference",
    "update_actor": "update",
    "other": "other",
}

_WIDE = 110
"""Columns from which the memory table names several parts of a phase."""


def as_text(plan: RunPlan, *, width: int | None = None) -> str:
    """Return the plan as tables. width: columns of the terminal; None: those of this one."""
    width = max(60, min(width or shutil.get_terminal_size((100, 24)).columns, 140))
    sections = [
        _wrap(f"{plan.model} on {plan.devices}: {_verdict(plan)}", width),
        _section("Batches of a step", _pairs(_batches(plan), width)),
        _section("Memory", [*_memory(plan, width - 2), *_changes(plan, width)]),
        _section("Work and time of a step", _work(plan)),
        _section("Workers", _pairs(_pools(plan), width)),
        _section("The run", _pairs(_run(plan), width)),
        _section("Moved and written", _pairs(_moved(plan), width)),
        _section("This rests on", [line for each in plan.assumptions for line in _item(each, width)]),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as data for JSON, with units in the names: seconds, bytes, flops, tokens."""
    worst = plan.memory.worst(certain=False)
    return {
        "model": plan.model,
        "devices": plan.devices,
        "num_devices": plan.num_devices,
        "pools": [asdict(each) for each in plan.pools],
        "verdict": plan.verdict,
        "fits": plan.fits,
        "fullest_phase": {
            "phase": worst.phase,
            "pool": worst.pool,
            "workers": worst.workers,
            "needed_bytes": worst.expected,
            "capacity_bytes": _capacity(plan, worst),
        },
        "problem": plan.problem,
        "changes": [
            {"options": dict(each.changes), "saved_bytes": each.saved_bytes, "fits": each.fits}
            for each in plan.remedies
        ],
        "changes_that_fit": None if plan.combination is None else dict(plan.combination),
        "parameters": plan.parameters,
        "trained_parameters": plan.trained_parameters,
        "steps": plan.num_steps,
        "steps_per_epoch": None if plan.num_prompts is None else plan.plan.steps_per_epoch,
        "training_prompts": plan.num_prompts,
        "batches": asdict(plan.ledger),
        "lengths": {
            "mean_prompt_tokens": plan.lengths.mean_prompt,
            "mean_image_patches": plan.lengths.mean_image_patches,
            "mean_response_tokens": plan.lengths.response_tokens,
            "longest_response_tokens": plan.lengths.longest_response,
            "mean_observed_tokens": plan.lengths.observed_tokens,
        },
        "memory": [
            {
                "phase": phase.phase,
                "pool": phase.pool,
                "workers": phase.workers,
                "needed_bytes": phase.expected,
                "at_least_bytes": phase.certain,
                "capacity_bytes": _capacity(plan, phase),
                "parts_bytes": {part.name: part.expected for part in phase.parts},
            }
            for phase in plan.memory.phases
        ],
        "flops": None if plan.flops is None else asdict(plan.flops),
        "seconds": None
        if plan.time is None
        else {
            "phases": dict(plan.time.phases),
            "step": plan.time.total,
            "epoch": plan.epoch_seconds,
            "run": plan.run_seconds,
            "validation": plan.validation_seconds,
            "calibrated": plan.time.calibrated,
            "sampling_overlaps_learning": plan.time.overlaps,
        },
        "tokens_per_second_per_device": plan.tokens_per_second,
        "update_mfu": plan.update_mfu,
        "moved_bytes": None if plan.moved is None else asdict(plan.moved),
        "disk_bytes": {
            "checkpoint": plan.disk.checkpoint,
            "checkpoints_kept": plan.disk.kept,
            "checkpoints": plan.disk.checkpoints,
            "rollouts_of_a_step": plan.disk.rollouts,
        },
        "assumptions": list(plan.assumptions),
    }


def _verdict(plan: RunPlan) -> str:
    if plan.problem is not None:
        return f"{plan.verdict}; {plan.problem}"
    worst = plan.memory.worst(certain=False)
    of_workers = "" if worst.workers == "all" else f" of the {worst.workers}"
    where = f"on each GPU{of_workers}" if worst.pool == "GPU" else f"of a machine's memory{of_workers}"
    capacity = _capacity(plan, worst)
    limit = "" if capacity is None else f" of {format_gib(capacity)}"
    return f"{plan.verdict}; the fullest phase, {worst.phase}, needs {format_gib(worst.expected)}{limit} {where}"


def _capacity(plan: RunPlan, phase: PhaseMemory) -> int | None:
    """Return the bytes of a phase's pool; None if they are not known."""
    return None if phase.pool == "host" and not plan.knows_host_memory else plan.memory.capacity(phase)


def _batches(plan: RunPlan) -> list[tuple[str, str]]:
    ledger, lengths = plan.ledger, plan.lengths
    device = "GPU" if plan.device == "cuda" else "worker"
    filtered = ledger.sampled_prompts - ledger.prompts
    sampled = f"{ledger.sampled_prompts:,} prompts x {ledger.completions} = {ledger.sampled:,} completions"
    observed = f" and {lengths.observed_tokens:,.0f} observed ones" if lengths.observed_tokens else ""
    unobserved = ", without observed ones" if lengths.observed_tokens else ""
    epochs = f", in {ledger.epochs} passes over the step" if ledger.epochs > 1 else ""
    return [
        ("sampled", sampled + (f" ({filtered:,} prompts filtered)" if filtered else "")),
        (
            "lengths",
            f"prompt {lengths.mean_prompt:,.0f} tokens, completion {lengths.response_tokens:,.0f} tokens{observed} in "
            "the mean",
        ),
        ("updates", f"{ledger.updates}{epochs}"),
        (
            "an update",
            f"{ledger.prompts_per_update:,} prompts x {ledger.completions} = {ledger.sequences_per_update:,} sequences,"
            f" {ledger.sequences_per_gpu:,} for each {device}",
        ),
        (
            "micro-batches",
            f"{ledger.update_rows} accumulated on each {device}, of at most {ledger.update_budget:,} tokens",
        ),
        ("scoring passes", f"{ledger.score_rows} on each {device}, of at most {ledger.score_budget:,} tokens"),
        (
            "tokens",
            f"{ledger.sequence_tokens:,.0f} of sequences{unobserved}; {ledger.row_tokens:,.0f} computed, prompts "
            "shared",
        ),
    ]


def _memory(plan: RunPlan, width: int) -> list[str]:
    rows = [("phase", "where", "needs", "of", "largest parts" if width >= _WIDE else "largest part")]
    for phase in plan.memory.phases:
        parts = sorted(phase.parts, key=lambda part: -part.expected)[: 3 if width >= _WIDE else 1]
        capacity = _capacity(plan, phase)
        rows.append(
            (
                phase.phase,
                _where(phase),
                format_gib(phase.expected),
                "unknown" if capacity is None else format_gib(capacity),
                ", ".join(f"{part.name} {format_gib(part.expected)}" for part in parts),
            )
        )
    lines = _table(rows, right=(2, 3))
    if not plan.memory.counts_passes:
        lines += _wrap("Activations of this family are not counted.", width)
    return [line if len(line) <= width else line[: width - 3] + "..." for line in lines]


def _where(phase: PhaseMemory) -> str:
    of_workers = "" if phase.workers == "all" else f" of {phase.workers}"
    return ("each GPU" if phase.pool == "GPU" else "machine") + of_workers


def _changes(plan: RunPlan, width: int) -> list[str]:
    if plan.fits:
        return []
    if plan.problem is not None and not plan.remedies:
        return []
    lines = ["", "What helps most:" if plan.remedies else "No single change of the configuration helps."]
    lines += [line for each in plan.remedies for line in _item(str(each), width)]
    if plan.combination is not None and not any(each.fits for each in plan.remedies):
        options = " ".join(f"{name}={_value(value)}" for name, value in plan.combination.items())
        lines += ["With all of these the run fits:", *_item(options, width)]
    return lines


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _work(plan: RunPlan) -> list[str]:
    if plan.flops is None:
        return ["not counted for this family of models"]
    flops = {
        "gen": plan.flops.prefill + plan.flops.decode,
        "old": plan.flops.old,
        "ref": plan.flops.reference,
        "update_actor": plan.flops.update,
    }
    rows = [("phase", "work", "time", "share")]
    seconds = {} if plan.time is None else plan.time.phases
    total = 0.0 if plan.time is None else plan.time.total
    for name in PHASES:
        if not seconds.get(name) and not flops.get(name):
            continue
        work = _flops(flops[name]) if name in flops else ""
        rows.append((_NAMES[name], work, *_share(seconds.get(name), total)))
    rows.append(("a step", _flops(plan.flops.total), *_share(total if seconds else None, total)))
    lines = _table(rows if seconds else [row[:2] for row in rows], right=(1, 2, 3))
    prefilled = "prompts and observations" if plan.lengths.observed_tokens else "prompts"
    lines.append(f"sampling: {_flops(plan.flops.prefill)} of {prefilled}, {_flops(plan.flops.decode)} of completions")
    if plan.flops.computed > plan.flops.update:
        lines.append(f"update: {_flops(plan.flops.computed)} with what gradient checkpointing computes again")
    elif plan.flops.computed < plan.flops.update:
        lines.append(f"update: {_flops(plan.flops.computed)} without the gradients that LoRA does not need")
    return lines


def _pools(plan: RunPlan) -> list[tuple[str, str]]:
    """Return a row for each pool of workers, if they are separate."""
    rows: list[tuple[str, str]] = []
    for pool in plan.pools:
        does = f"{pool.replicas} replicas of vLLM" if pool.replicas else "model, optimizer, no vLLM"
        busy = ""
        if pool.busy is not None and pool.idle_fraction is not None:
            busy = f"; busy {format_seconds(pool.busy)} of a step, idle {pool.idle_fraction:.0%}"
        rows.append((pool.workers, f"{pool.devices}, {does}{busy}"))
    if plan.time is not None and plan.pools:
        ahead = plan.time.steps_ahead
        in_advance = "one batch in advance" if ahead == 1 else f"up to {ahead} steps in advance"
        how = f"at the same time, {in_advance}" if plan.time.overlaps else "in turns"
        rows.append(("they work", how))
    return rows


def _share(seconds: float | None, total: float) -> tuple[str, str]:
    """Return the cells of a time and its share; empty for a run that does not fit."""
    return ("", "") if seconds is None or not total else (format_seconds(seconds), f"{seconds / total:.0%}")


def _run(plan: RunPlan) -> list[tuple[str, str]]:
    rows = []
    if plan.time is None and plan.flops is not None:
        rows.append(("time", "not predicted, since the run does not fit"))
    if plan.num_prompts is None:
        rows.append(("an epoch", "unknown, as the number of training prompts is (--rows)"))
    else:
        seconds = "" if plan.epoch_seconds is None else f", {format_seconds(plan.epoch_seconds)}"
        rows.append(("an epoch", f"{plan.num_prompts:,} prompts, {plan.plan.steps_per_epoch:,} steps{seconds}"))
    if plan.num_steps is not None:
        seconds = "" if plan.run_seconds is None else f", {format_seconds(plan.run_seconds)}"
        updates = plan.num_steps * plan.plan.updates_per_step
        rows.append(("the run", f"{plan.num_steps:,} steps, {updates:,} updates{seconds}"))
    if plan.plan.critic.updates_per_step:
        what = "in the memory and the checkpoints, not in the times and the operations"
        if plan.plan.critic_shares_trunk:
            what = "a head of the policy, in the memory and the checkpoints; passes for values alone are not timed"
        rows.append(("critic", what))
    if plan.num_validations and plan.time is not None:
        rows.append(("validations", f"{plan.num_validations}, each {format_seconds(plan.validation_seconds)}"))
    if plan.tokens_per_second is not None and plan.update_mfu is not None:
        device = "GPU" if plan.device == "cuda" else "worker"
        speed = f"{plan.tokens_per_second:,.0f} tokens/s on each {device}"
        rows.append(("speed", speed + (f"; update at {plan.update_mfu:.0%} MFU" if plan.device == "cuda" else "")))
    return rows


def _moved(plan: RunPlan) -> list[tuple[str, str]]:
    rows, disk = [], plan.disk
    if plan.moved is not None and plan.num_devices > 1:
        each = "by each GPU in a step" if plan.device == "cuda" else "by each worker in a step"
        rows += [
            ("weight sync", f"{format_bytes(plan.moved.weight_sync)} gathered {each}"),
            ("FSDP", f"{format_bytes(plan.moved.gathers)} of weights gathered {each}"),
            ("gradients", f"{format_bytes(plan.moved.gradients)} reduced {each}"),
        ]
    if plan.moved is not None and plan.moved.sent:
        rows.append(("samplers", f"{format_bytes(plan.moved.sent)} of weights received by each in a step"))
    if plan.moved is not None and plan.moved.offload:
        rows.append(("offloading", f"{format_bytes(plan.moved.offload)} to and from host memory in a step"))
    if plan.sent_bytes:
        sent = format_bytes(plan.sent_bytes)
        rows.append(("driver", f"{sent} to and from the workers in a step, without images"))
    kept = f"{disk.kept} kept: {format_bytes(disk.checkpoints)}"
    rows.append(("checkpoint", f"{format_bytes(disk.checkpoint)}; {kept} on disk"))
    rollouts = f"about {format_bytes(disk.rollouts)} a step"
    if plan.num_steps is not None:
        rollouts += f", {format_bytes(disk.rollouts * plan.num_steps)} in the run"
    rows.append(("rollout files", rollouts))
    return rows


# -- text ----------------------------------------------------------------------------------------


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  {line}" if line else line for line in lines)] if lines else []


def _pairs(rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    lines = []
    for name, value in rows:
        first, *more = textwrap.wrap(value, width - 20) or [""]
        lines += [f"{name:<16}{first}", *(" " * 16 + line for line in more)]
    return lines


def _table(rows: Sequence[tuple[str, ...]], *, right: Sequence[int]) -> list[str]:
    """Return rows in columns of equal width. right: columns whose text ends at the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _item(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width - 2, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def format_seconds(seconds: float) -> str:
    """Return a duration: 4 ms, 0.42 s, 53.0 s, 12.5 min, 3.2 h, 2.1 days."""
    if seconds < 0.0095:
        return f"{1000 * seconds:.1f} ms"
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            number = seconds / divisor
            return f"{number:.2f} {unit}" if number < 1 else f"{number:,.1f} {unit}"
    return f"{seconds / 86_400:,.1f} days"


def format_bytes(number: float) -> str:
    """Return bytes with a decimal unit, as disks and links have: 16.6 GB."""
    for divisor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= divisor:
            return f"{number / divisor:,.1f} {unit}"
    return f"{number:,.0f} bytes"


def _flops(number: float) -> str:
    for divisor, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP")):
        if number >= divisor:
            return f"{number / divisor:,.2f} {unit}"
    return f"{number / 1e9:,.2f} GFLOP"
