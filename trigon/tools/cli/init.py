"""`trigon init [FOLDER]`: writes a run to start from: configuration, reward function, five rows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from trigon.tools.cli.parser import ArgumentParser


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see main.py. Raises TrigonError."""
    parser = ArgumentParser(
        prog="trigon init",
        description="Write run.yaml, reward.py with its test, and data.jsonl with five images, to be replaced by your "
        "own. Nothing is overwritten.",
        examples=[
            ("trigon init my_run", "for a model of the hub, on a GPU"),
            ("trigon init my_run --tiny", "with a tiny model, for a laptop"),
        ],
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="default: this folder")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--model", metavar="ID", help="hub id or folder; default: Qwen/Qwen2.5-VL-3B-Instruct")
    choice.add_argument(
        "--tiny", action="store_true", help="make a tiny model, with which the run works without a GPU and a hub"
    )
    chosen = parser.parse_args(arguments)
    from trigon.system.terminal import sanitize
    from trigon.tools.init.make import DEFAULT_MODEL, write_starter

    folder: Path = chosen.folder
    written = write_starter(folder, model=chosen.model or DEFAULT_MODEL, tiny=chosen.tiny)
    first = [] if folder == Path() else [f"cd {shlex.quote(str(folder))}"]
    files = ", ".join(str(path.relative_to(folder)) for path in written if path.parent == folder)
    commands = [*first, "trigon check run.yaml", "python reward.py", "trigon train run.yaml"]
    lines = "\n".join(f"  {command}" for command in commands)
    print(sanitize(f"wrote {files}, and images/\n\nnext:\n{lines}", max_characters=5000))
    return 0
