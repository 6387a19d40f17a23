"""`trigon plan [CONFIG.yaml] [key=value ...]`: what a run will do and need, before it starts."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from trigon.system.terminal import sanitize
from trigon.tools.cli.parser import ArgumentParser, number

EXIT_DOES_NOT_FIT = 1

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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
    from trigon.tools.plan.tables import as_json, as_text

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
