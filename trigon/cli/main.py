"""The `trigon` command: finds the subcommand's file and turns our own errors into one clear message.

Imports nothing heavy, so that `trigon --help` is instant.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from trigon import __version__
from trigon.errors import TrigonError
from trigon.garbage import collect_seldom

COMMANDS = {
    "train": ("trigon.cli.train", "train: YAML file and key=value overrides, EasyR1's included"),
    "quickstart": ("trigon.tiny.quickstart", "train the embedded tiny model on the embedded data, here and now"),
    "tiny": ("trigon.tiny.make", "make the embedded tiny model and dataset"),
    "export": ("trigon.cli.export", "write a checkpoint as a Hugging Face model, and prove it"),
    "merge": ("trigon.cli.export", "the same under EasyR1's name: --local_dir .../global_step_N/actor"),
}


def usage() -> str:
    """Return the help text."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: trigon COMMAND [ARGUMENTS]   (trigon COMMAND --help for more)", "", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status:

    0 done, 1 failed with an error of ours, 2 bad usage, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("-h", "--help", ""):
        print(usage())
        return 0 if command else 2
    if command in ("-V", "--version"):
        print(f"trigon {__version__}")
        return 0
    if command not in COMMANDS:
        print(f"trigon: there is no command {command!r}\n\n{usage()}", file=sys.stderr)
        return 2
    collect_seldom()
    try:
        return int(importlib.import_module(COMMANDS[command][0]).main(rest))
    except TrigonError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
