"""`trigon train [CONFIG.yaml] [key=value ...]`: the main job, from the command line to the final table."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trigon.config.load import LoadedConfig, dump_config, load_config, split_arguments

HELP = """\
usage: trigon train [CONFIG.yaml] [key=value ...]

Trains with the options of CONFIG.yaml, changed by key=value (data.max_prompt_length=1024, say). Every option, its
default and its
meaning: docs/configuration.md. EasyR1's files and command lines work as they are; config=CONFIG.yaml is understood too.

  --print-config   print the resolved configuration and stop
"""

EXIT_STOPPED = 143
"""The exit status after SIGTERM, as shells give it:

the step in hand was finished and saved, and the same command goes on from there.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; see trigon.cli.main for the exit status."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(HELP)
        return 0
    print_only = "--print-config" in arguments
    path, overrides = split_arguments([argument for argument in arguments if argument != "--print-config"])
    loaded = load_config(path, overrides)
    if print_only:
        for warning in loaded.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(dump_config(loaded.config), end="")
        return 0
    return train(loaded)


def train(loaded: LoadedConfig, *, export_to: Path | None = None) -> int:
    """Train, and export the last checkpoint to a folder if one is given."""
    # Heavy libraries are imported only now that the configuration is known to be sound.
    from trigon.build.run import TrackerEnvironment, run_training

    trackers = TrackerEnvironment(
        tensorboard_dir=path_from("TENSORBOARD_DIR"),
        swanlab_dir=path_from("SWANLAB_DIR"),
        swanlab_mode=os.environ.get("SWANLAB_MODE"),
        swanlab_api_key=os.environ.get("SWANLAB_API_KEY"),
    )
    with stop_on_sigterm() as stopped:
        run_training(
            loaded.config, warnings=loaded.warnings, trackers=trackers, should_stop=stopped, export_to=export_to
        )
        return EXIT_STOPPED if stopped() else 0


def path_from(variable: str) -> Path | None:
    """Return the path that an environment variable holds, None if it is unset or empty."""
    return Path(os.environ[variable]) if os.environ.get(variable) else None


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM ask for an orderly end:

    yield a function that tells whether it came. A second one ends the process at once.
    """
    came = False

    def remember(number: int, frame: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGTERM, before)
        print("SIGTERM: finishing and saving this step", file=sys.stderr)

    before = signal.signal(signal.SIGTERM, remember)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGTERM, before)
