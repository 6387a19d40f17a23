"""`trigon plan [CONFIG.yaml] [key=value ...]`: what a run will do and need, before it starts."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trigon.system.terminal import format_bytes, format_duration, sanitize, shorten
from trigon.tools.cli.parser import ArgumentParser, number

if TYPE_CHECKING:
    from trigon.tools.plan.plan import RunPlan

EXIT_DOES_NOT_FIT = 1

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_WIDE = 110
"""Columns from which the memory table names several parts of a phase."""


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main.

    EXIT_DOES_NOT_FIT: the run does not fit into the memory that is there.
    """
    given = make_parser().parse_args(arguments)
    # Imported here: a help page does not need pydantic.
    from trigon.config.load import split_arguments
    from trigon.tools.plan.call import load_planned

    loaded = load_planned(*split_arguments(given.config))
    for warning in loaded.warnings:
        print(f"warning: {sanitize(warning, max_characters=5000)}", file=sys.stderr)
    # And here, so that errors of the configuration do not wait for heavy libraries.
    from trigon.tools.plan.lengths import LengthOptions
    from trigon.tools.plan.plan import plan

    known = {field.name: getattr(given, field.name) for field in fields(LengthOptions)}
    made = plan(
        loaded.config,
        gpus=given.gpus,
        host_memory=given.host_memory,
        model_config=given.model_config,
        measured=given.measured,
        lengths=LengthOptions(**known),
        download=given.download,
    )
    print(json.dumps(as_json(made), indent=2) if given.json else as_text(made, width=given.width))
    return 0 if made.fits else EXIT_DOES_NOT_FIT


def make_parser() -> ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = ArgumentParser(
        prog="trigon plan",
        description="Plan a run: batches, memory, operations and disk. Needs neither a GPU nor the model's "
        "weights. Exit status 1: the run does not fit into memory.",
        examples=(
            ("trigon plan run.yaml", "on this machine"),
            ("trigon plan run.yaml --gpus 8xH100-80G", "on other GPUs"),
            ("trigon plan run.yaml --measured runs/first", "with the seconds of a finished run"),
        ),
    )
    parser.add_argument("config", nargs="*", metavar="CONFIG.yaml key=value", help="as for trigon train")
    parser.add_argument("--gpus", metavar="8xH100-80G", help="the GPUs; 2x8xH100-80G: two nodes; default: this machine")
    parser.add_argument("--host-memory", type=_bytes, metavar="SIZE", help="of each machine, such as 1000G")
    parser.add_argument("--model-config", type=Path, metavar="FILE", help="a config.json in place of the model's own")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="RUN",
        help="folder of a finished run of the same model on as many GPUs, for seconds",
    )
    tokens, share = number(1, 1e9), number(1e-3, 1)
    or_none, count = number(0, 1e9), number(1, 1e12, whole=True)
    for flag, field, kind, metavar, help_text in (
        ("--prompt-length", "prompt_tokens", tokens, "TOKENS", "mean of the prompts, with images"),
        ("--image-tokens", "image_tokens", or_none, "TOKENS", "of a prompt's images; 0: none"),
        ("--response-length", "response_tokens", tokens, "TOKENS", "mean of the completions"),
        (
            "--observed-length",
            "observed_tokens",
            or_none,
            "TOKENS",
            "mean that a completion observes with tools",
        ),
        ("--observed-image-tokens", "observed_image_tokens", or_none, "TOKENS", "of these, those of images"),
        ("--rows", "num_prompts", count, "N", "usable training prompts"),
        ("--val-rows", "num_val_prompts", count, "N", "validation prompts"),
        ("--keep-rate", "keep_rate", share, "SHARE", "of the groups, with online filtering"),
    ):
        parser.add_argument(flag, dest=field, type=kind, metavar=metavar, help=help_text)
    parser.add_argument("--download", action="store_true", help="read the tokenizer and the data from the hub")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--width", type=count, metavar="COLUMNS", help="of the tables; default: of the terminal")
    return parser


def _bytes(text: str) -> int:
    written = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if written is None or float(written[1]) == 0:
        raise ArgumentTypeError(f"{text!r} is not a size, such as 1000G")
    return int(float(written[1]) * _UNITS[written[2].upper()])


def as_text(plan: RunPlan, *, width: int | None = None) -> str:
    """Return the plan as tables. width: columns of the terminal; None: of this terminal."""
    width = max(60, min(width or shutil.get_terminal_size((100, 24)).columns, 140))
    sections = [
        _wrap(f"{plan.model} on {plan.devices}: {_verdict(plan)}", width),
        _section("Batches of a step", _pairs(_batches(plan), width)),
        _section("Memory", [*_memory(plan, width - 2), *_changes(plan, width)]),
        _section("Work of a step", _pairs(_work(plan), width)),
        _section("Seconds of a step", _pairs(_seconds(plan), width)),
        _section("The run", _pairs(_run(plan), width)),
        _section("Disk", _pairs(_disk(plan), width)),
        _section("This rests on", [line for each in plan.assumptions for line in _item(each, width)]),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as data for JSON, with units in the names: seconds, bytes, flops, tokens."""
    simple = ("model", "devices", "num_devices", "parameters", "trained_parameters", "verdict", "fits", "combination")
    return {
        **{name: getattr(plan, name) for name in simple},
        "problem": None if plan.memory.problem is None else plan.memory.problem.text,
        "changes": [asdict(each) for each in plan.remedies],
        "training_prompts": plan.num_prompts,
        "steps": plan.num_steps,
        "validations": plan.num_validations,
        "plan": asdict(plan.plan),
        "batches": asdict(plan.batches),
        "mean_tokens": {
            "prompt": plan.lengths.mean_prompt,
            "response": plan.lengths.response_tokens,
            "observed": plan.lengths.observed_tokens,
        },
        "memory": [
            {
                "phase": phase.phase,
                "pool": phase.pool,
                "workers": phase.workers,
                "needed_bytes": phase.expected,
                "at_least_bytes": phase.certain,
                "capacity_bytes": plan.memory.capacity(phase),
                "parts_bytes": {part.name: part.expected for part in phase.parts},
            }
            for phase in plan.memory.phases
        ],
        "flops": None if plan.flops is None else asdict(plan.flops),
        "seconds": {
            "phases": plan.seconds,
            "step": plan.step_seconds,
            "epoch": plan.epoch_seconds,
            "run": plan.run_seconds,
            "validation": plan.validation_seconds,
        },
        "disk_bytes": {**asdict(plan.disk), "checkpoints": plan.disk.checkpoints},
        "assumptions": plan.assumptions,
    }


def _verdict(plan: RunPlan) -> str:
    if plan.memory.problem is not None:
        return f"{plan.verdict}; {plan.memory.problem.text}"
    worst = plan.memory.worst(certain=False)
    limit = "" if plan.memory.capacity(worst) is None else f" of {plan.memory.describe_capacity(worst)}"
    return (
        f"{plan.verdict}; the fullest phase, {worst.phase}, needs {format_bytes(worst.expected)}{limit} ({worst.where})"
    )


def _batches(plan: RunPlan) -> list[tuple[str, str]]:
    batches, lengths, steps = plan.batches, plan.lengths, plan.plan
    device = "GPU" if plan.device == "cuda" else "worker"
    filtered = batches.sampled_prompts - batches.prompts
    epochs = f", in {steps.epochs_per_step} passes over the step" if steps.epochs_per_step > 1 else ""
    observed = f" and {lengths.observed_tokens:,.0f} observed ones" if lengths.observed_tokens else ""
    return [
        (
            "sampled",
            f"{batches.sampled_prompts:,} prompts x {batches.completions} = {batches.sampled:,} completions"
            f"{f' ({filtered:,} prompts filtered)' if filtered else ''}",
        ),
        (
            "lengths",
            f"prompt {lengths.mean_prompt:,.0f} tokens, completion {lengths.response_tokens:,.0f} tokens{observed} in "
            "the mean",
        ),
        ("updates", f"{steps.updates_per_step}{epochs}"),
        (
            "an update",
            f"{steps.prompts_per_update:,} prompts x {batches.completions} = {steps.sequences_per_update:,} "
            f"sequences, {batches.sequences_per_gpu:,} for each {device}",
        ),
        (
            "micro-batches",
            f"{batches.update_rows} accumulated on each {device}, of at most {steps.tokens_per_update_pass:,} tokens",
        ),
        (
            "scoring passes",
            f"{batches.score_rows} on each {device}, of at most {steps.tokens_per_experience_pass:,} tokens",
        ),
        (
            "tokens",
            f"{batches.sequence_tokens:,.0f} of sequences{', without observed ones' if observed else ''}; "
            f"{batches.row_tokens:,.0f} computed, prompts shared",
        ),
    ]


def _memory(plan: RunPlan, width: int) -> list[str]:
    most = 3 if width >= _WIDE else 1
    rows = [("phase", "where", "needs", "of", "largest parts" if most > 1 else "largest part")]
    for phase in plan.memory.phases:
        parts = sorted(phase.parts, key=lambda part: -part.expected)[:most]
        named = ", ".join(f"{part.name} {format_bytes(part.expected)}" for part in parts)
        rows.append(
            (phase.phase, phase.where, format_bytes(phase.expected), plan.memory.describe_capacity(phase), named)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(columns) if number in (2, 3) else cell.ljust(columns)
            for number, (cell, columns) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if not plan.memory.counts_passes:
        lines += _wrap("Activations of this family are not counted.", width)
    return [shorten(line, width) for line in lines]


def _changes(plan: RunPlan, width: int) -> list[str]:
    from trigon.assemble.remedies import format_changes

    if plan.fits or (plan.memory.problem is not None and not plan.remedies):
        return []
    lines = ["", "What helps most:" if plan.remedies else "No single change of the configuration helps."]
    lines += [line for each in plan.remedies for line in _item(str(each), width)]
    if plan.combination is not None and not any(each.fits for each in plan.remedies):
        lines += ["With all of these the run fits:", *_item(format_changes(plan.combination), width)]
    return lines


def _work(plan: RunPlan) -> list[tuple[str, str]]:
    flops = plan.flops
    if flops is None:
        return [("operations", "not counted for this family of models")]
    prefilled = "prompts and observations" if plan.lengths.observed_tokens else "prompts"
    rows = [("sampling", f"{_flops(flops.prefill)} of {prefilled}, {_flops(flops.decode)} of completions")]
    if flops.old or flops.reference:
        rows.append(("log-probs", f"{_flops(flops.old)} of the policy, {_flops(flops.reference)} of the reference"))
    return [*rows, ("updates", _flops(flops.update)), ("a step", _flops(flops.total))]


def _seconds(plan: RunPlan) -> list[tuple[str, str]]:
    total = plan.step_seconds
    if plan.seconds is None or not total:
        return []
    rows = [(name, f"{format_duration(each)}, {each / total:.0%}") for name, each in plan.seconds.items() if each]
    return [*rows, ("a step", format_duration(total))]


def _run(plan: RunPlan) -> list[tuple[str, str]]:
    def taking(seconds: float | None) -> str:
        return "" if seconds is None else f", {format_duration(seconds)}"

    rows = [("an epoch", "unknown, as the number of training prompts is (--rows)")]
    if plan.num_prompts is not None:
        epoch = f"{plan.num_prompts:,} prompts, {plan.plan.steps_per_epoch:,} steps{taking(plan.epoch_seconds)}"
        rows = [("an epoch", epoch)]
    if plan.num_steps is not None:
        updates = plan.num_steps * plan.plan.updates_per_step
        rows.append(("the run", f"{plan.num_steps:,} steps, {updates:,} updates{taking(plan.run_seconds)}"))
    if plan.num_validations:
        each = "" if plan.validation_seconds is None else f", each {format_duration(plan.validation_seconds)}"
        rows.append(("validations", f"{plan.num_validations}{each}"))
    return rows


def _disk(plan: RunPlan) -> list[tuple[str, str]]:
    disk, kept, in_run = plan.disk, "their number is unknown, as that of the steps is", ""
    if plan.num_steps is not None:
        kept = f"at most {disk.kept} at a time: {format_bytes(disk.checkpoints)}"
        rollouts = disk.rollouts * plan.num_steps + disk.validation_rollouts * plan.num_validations
        in_run = f", {format_bytes(rollouts)} in the run"
    validated = f" and {format_bytes(disk.validation_rollouts)} a validation" if plan.num_validations else ""
    return [
        ("checkpoint", f"{format_bytes(disk.checkpoint)}; {kept}"),
        ("rollout files", f"about {format_bytes(disk.rollouts)} a step{validated}{in_run}, without images"),
    ]


# -- text ------------------------------------------------------------------------------------------


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  {line}" if line else line for line in lines)] if lines else []


def _pairs(rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    lines = []
    for name, value in rows:
        first, *more = textwrap.wrap(value, width - 20) or [""]
        lines += [f"{name:<16}{first}", *(" " * 16 + line for line in more)]
    return lines


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _item(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width - 2, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _flops(number: float) -> str:
    for divisor, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP")):
        if number >= divisor:
            return f"{number / divisor:,.2f} {unit}"
    return f"{number / 1e9:,.2f} GFLOP"
