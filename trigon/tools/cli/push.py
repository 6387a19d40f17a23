"""`trigon push RUN REPO`: exports a model, and pushes it with a model card to the hub."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from trigon.tools.cli.parser import ArgumentParser


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status. Raises TrigonError."""
    options = make_parser().parse_args(arguments)
    # Imported here, so that errors of the command line do not wait for heavy libraries.
    from trigon.report.console import Console
    from trigon.report.run import open_run
    from trigon.tools.push.push import PushSettings, push, write_folder

    console = Console()
    run = open_run(options.run)
    settings = PushSettings(
        step=options.step,
        best=options.best,
        merged=options.merged,
        base=options.base,
        license_id=options.license,
        dtype=options.dtype,
        logits=options.logits,
    )
    if options.dry_run:
        folder: Path = options.output or run.path / "push"
        write_folder(run, options.repo, folder, settings, warn=console.warn, on_progress=console.print)
        console.print(f"written, and not pushed: {folder}; read {folder / 'README.md'}")
        return 0
    with ExitStack() as stack:
        # Not RUN/push, which --dry-run writes to be read and kept.
        folder = options.output or Path(stack.enter_context(_temporary_folder(run.path))) / "push"
        address = push(
            run, options.repo, folder, settings, private=options.private, warn=console.warn, on_progress=console.print
        )
    console.print(f"pushed: {address}")
    return 0


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = ArgumentParser(
        prog="trigon push",
        description="Export a checkpoint of a run, verify it, and push it to the Hugging Face Hub with a model card "
        "that says how it was trained: base model, data, options, learning curves, validations. A run with LoRA "
        "pushes its adapter. Secrets in options are hidden.",
        examples=[
            ("trigon push runs/geo me/geo --dry-run", "write the folder and its card, to read them"),
            ("trigon push runs/geo me/geo --private", "push the latest checkpoint"),
            ("trigon push runs/lora me/lora-merged --merged --step 200", "a whole model of a LoRA run"),
        ],
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("repo", type=_repo, metavar="REPO", help="NAMESPACE/NAME on the hub; NAME: in your namespace")
    parser.add_argument("--private", action="store_true", help="make a private repository, if it does not exist yet")
    parser.add_argument("--dry-run", action="store_true", help="write the folder only, and push nothing")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step; default: the latest")
    which.add_argument("--best", action="store_true", help="the checkpoint with the best validation")
    parser.add_argument("--merged", action="store_true", help="of a LoRA run: the whole model, not the adapter")
    parser.add_argument("--base", metavar="MODEL", help="base model of the LoRA adapter, if it has moved")
    parser.add_argument("--dtype", help="bf16, fp16 or fp32; default: as in trigon export")
    parser.add_argument("--license", metavar="ID", help="such as apache-2.0; default: the base model's, where known")
    parser.add_argument("--no-logits", dest="logits", action="store_false", help="as in trigon export")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder to write, and keep; default: RUN/push with --dry-run, otherwise a temporary one in RUN",
    )
    return parser


def _temporary_folder(run: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder in a run, where there is space for a model, that is removed at the end."""
    return tempfile.TemporaryDirectory(dir=run, prefix=".push_", ignore_cleanup_errors=True)


def _repo(text: str) -> str:
    if not re.fullmatch(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]{0,95}", text) or ".." in text or "--" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a repository: write NAMESPACE/NAME")
    return text
