"""`trigon export CHECKPOINT` and `trigon merge --local_dir .../global_step_N/actor`: a checkpoint becomes a model.

With `--adapter`, what LoRA learned becomes an adapter.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trigon.report.console import Console


def main(arguments: Sequence[str]) -> int:
    """Run the command. Errors of ours are left to the caller."""
    options = _parser().parse_args(arguments)
    # Heavy libraries are imported only for a command line that makes sense.
    from trigon.checkpoint.export import export_checkpoint

    console = Console()
    folder = export_checkpoint(
        options.local_dir or options.checkpoint,
        options.output,
        dtype=options.dtype,
        adapter=options.adapter,
        base=options.base,
        best=options.best,
        warn=console.warn,
        on_progress=console.print,
    )
    console.print(f"exported and verified: {folder}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trigon export",
        description="Write a checkpoint as a Hugging Face model, and prove it: equal tensors, equal logits. "
        "What LoRA learned is merged into its base model.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "checkpoint", nargs="?", type=Path, help="a global_step_N folder, its actor folder, or a run folder"
    )
    source.add_argument("--local_dir", type=Path, metavar="ACTOR", help="the same, as EasyR1's merger calls it")
    parser.add_argument(
        "--output",
        type=Path,
        help="where to; default: huggingface_model in CHECKPOINT, huggingface in ACTOR; of an adapter, lora_adapter",
    )
    parser.add_argument(
        "--dtype", help="bf16, fp16 or fp32; default: the checkpoint's own, bit for bit; of a merged model, its base's"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="write what LoRA learned as an adapter for peft, unmerged"
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="the base model of LoRA's adapters, if it has moved: a folder or a hub id"
    )
    parser.add_argument(
        "--best", action="store_true", help="of a run folder, the best checkpoint instead of the latest"
    )
    return parser
