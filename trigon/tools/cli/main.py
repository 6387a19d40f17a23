"""The `trigon` command: runs a subcommand, and prints a TrigonError as one message.

Imports no heavy library, so that `trigon --help` is fast.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trigon import __version__
from trigon.errors import ConfigError, TrigonError
from trigon.system.files import describe_fault, fault_number
from trigon.system.process_settings import set_gc_threshold
from trigon.system.terminal import did_you_mean, sanitize

COMMANDS = {
    "init": ("cli.init:main", "write a run, a reward function and a few rows to start from"),
    "check": ("cli.check:main", "find what would go wrong in a run, before it is started"),
    "plan": ("cli.plan:main", "what a run will need: memory, operations, disk; without GPU and weights"),
    "train": (
        "cli.train:main",
        "train with a YAML file and key=value overrides, those of EasyR1 included",
    ),
    "eval": ("cli.eval:main", "evaluate models on a dataset: accuracy, pass@k, --blind, comparisons"),
    "score": ("cli.score:main", "score stored rollouts again with one reward function, or compare two"),
    "view": (
        "cli.view:main",
        "show runs in a browser: curves, rollouts with images and tokens, times, configurations",
    ),
    "plot": ("cli.plot:main", "draw learning curves of runs, with bands over seeds"),
    "export": ("cli.export:main", "write a checkpoint as a Hugging Face model, and verify it"),
    "push": ("cli.push:main", "push a model with a card of how it was trained to the Hugging Face Hub"),
    "merge": ("cli.export:merge", "export by EasyR1's name: --local_dir .../global_step_N/actor"),
    "quickstart": ("quickstart.quickstart:main", "make a tiny model and its data, train it and export it"),
    "tiny": ("quickstart.quickstart:tiny", "make a tiny model and its data"),
    "options": ("cli.options:main", "explain options of the configuration: trigon options lr"),
    "doctor": (
        "cli.check:doctor",
        "show versions and devices of this machine, and train two tiny steps on it",
    ),
    "completion": ("cli.completion:main", "print a script that completes commands and options in a shell"),
}

"""Each command with its function, as module:name in trigon.tools, and what it does."""

EXIT_NOT_READ = 141
"""As of a process that SIGPIPE ends: 128 + 13."""


def find_command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a command, which takes its arguments. Imports its module."""
    module, _, function = COMMANDS[name][0].partition(":")
    found: Callable[[Sequence[str]], int] = getattr(importlib.import_module(f"trigon.tools.{module}"), function)
    return found


def usage() -> str:
    """Return the help text."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: trigon COMMAND [ARGUMENTS]   (trigon COMMAND --help for more)", "", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: done, 1: failed with a TrigonError or the fault of a disk, 130: interrupted by Ctrl-C, 141:
    nothing reads standard output any more, as after `| head`. 2: wrong usage, that is the
    arguments, or the configuration (ConfigError); arguments that a parser rejects end the process.
    `trigon train` adds the statuses of other signals (cli/train.py, EXIT_SIGNAL).
    """
    if "_ARGCOMPLETE" in os.environ:  # set by the scripts of `trigon completion`
        from trigon.tools.cli.completion import complete

        complete()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for locales that are not UTF-8
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:
        if _is_read():
            raise  # of another pipe
        return EXIT_NOT_READ
    finally:
        _flush_output()


def _run(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "help" and rest:  # trigon help train = trigon train --help
        command, rest = rest[0], ["--help"]
    if command in ("-h", "--help", "help", ""):
        print(usage())
        return 0 if command else 2
    if command in ("-V", "--version", "version"):
        print(f"trigon {__version__}")
        return 0
    if command not in COMMANDS:
        known = [*COMMANDS, "help", "version"]
        print(f"trigon: unknown command {command!r}{did_you_mean(command, known)}\n\n{usage()}", file=sys.stderr)
        return 2
    set_gc_threshold()
    try:
        return find_command(command)(rest)
    except TrigonError as error:
        print(f"{type(error).__name__}: {sanitize(str(error), max_characters=20_000)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        # The others would hide where a bug of ours looked for a file.
        if fault_number(error) in (None, errno.ENOENT, errno.ENOTDIR):
            raise
        print(f"OSError: {sanitize(describe_fault(error, Path.cwd()), max_characters=5000)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _is_read() -> bool:
    """Return whether standard output is no pipe whose other end is closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLERR)
    return not poll.poll(0)


def _flush_output() -> None:
    """Flush standard output, or give it up.

    Python would try again when it ends, and change the exit status to 120.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"standard output could not be written: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
