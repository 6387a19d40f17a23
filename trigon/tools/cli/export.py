"""`trigon export CHECKPOINT`: writes a Hugging Face model, or a LoRA adapter for peft.

`trigon merge` is the same by the name of EasyR1's script, whose option to upload the model is
answered with the command that does it.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from trigon.errors import ConfigError
from trigon.report.console import Console
from trigon.tools.cli.parser import ArgumentParser


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status. Raises TrigonError."""
    return export(make_parser("trigon export").parse_args(arguments))


def merge(arguments: Sequence[str]) -> int:
    """Run `trigon merge`, and return its exit status. Raises TrigonError."""
    parser = make_parser("trigon merge")
    parser.add_argument("--hf_upload_path", metavar="REPOSITORY", help="not supported: names the command that uploads")
    options = parser.parse_args(arguments)
    if options.hf_upload_path:
        default = options.local_dir / "huggingface" if options.local_dir else options.checkpoint / "huggingface_model"
        folder = options.output or default
        parser.error(
            "--hf_upload_path is not supported, as this command uploads nothing. Leave it out, and then run: "
            f"hf upload {shlex.quote(options.hf_upload_path)} {shlex.quote(str(folder))}"
        )
    return export(options)


def export(options: Namespace) -> int:
    """Export a checkpoint, and return the exit status. options: parsed by make_parser's parser.

    Raises TrigonError.
    """
    # Imported here, so that errors of the command line do not wait for heavy libraries.
    from trigon.checkpoint.export import export_checkpoint

    console = Console()
    if options.critic and options.base is not None:
        raise ConfigError("--base is of a LoRA adapter, and cannot be used with --critic; leave out either")
    folder = export_checkpoint(
        options.local_dir or options.checkpoint,
        options.output,
        dtype=options.dtype,
        part="critic" if options.critic else "adapter" if options.adapter else "model",
        base=options.base,
        best=options.best,
        logits=options.logits,
        warn=console.warn,
        on_progress=console.print,
    )
    console.print(f"exported: {folder}")
    return 0


def make_parser(command: str) -> ArgumentParser:
    """Return the parser of the arguments. command: its name in the help."""
    parser = ArgumentParser(
        prog=command,
        description="Write a checkpoint as a Hugging Face model, and verify its tensors and, if it fits into "
        "memory, its logits. "
        "LoRA adapters are merged into the base model.",
        examples=[
            (f"{command} runs/quickstart/run", "the latest checkpoint of a run"),
            (f"{command} runs/quickstart/run --best --dtype bf16 --output my_model", "the best one, in bfloat16"),
        ],
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "checkpoint", nargs="?", type=Path, help="a global_step_N folder, its actor folder, or a run folder"
    )
    source.add_argument("--local_dir", type=Path, metavar="ACTOR", help="the same by the name of EasyR1's option")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder to write; default: CHECKPOINT/huggingface_model, ACTOR/huggingface, for an adapter lora_adapter",
    )
    parser.add_argument(
        "--dtype", help="bf16, fp16 or fp32; default: that of the checkpoint, or of the base model if LoRA is merged"
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--adapter", action="store_true", help="write the LoRA adapter for peft, not merged")
    parser.add_argument(
        "--base", metavar="MODEL", help="base model of the LoRA adapter, if it has moved: a folder or a hub id"
    )
    parser.add_argument(
        "--no-logits",
        dest="logits",
        action="store_false",
        help="do not load the exported model to verify its logits, which takes memory for it in its dtype; names, "
        "shapes and values of all tensors are always verified",
    )
    part.add_argument(
        "--critic",
        action="store_true",
        help="write the critic of a run with gae instead, as a token classifier with one label, for families of which "
        "transformers has one; default: huggingface_critic in CHECKPOINT, or beside ACTOR",
    )
    parser.add_argument(
        "--best", action="store_true", help="export the best checkpoint of a run folder instead of the latest"
    )
    return parser
