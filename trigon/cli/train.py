"""`trigon train [CONFIG.yaml] [key=value ...]`: trains a model."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trigon.config.load import LoadedConfig, dump_config, load_config, split_arguments
from trigon.errors import ConfigError
from trigon.terminal import sanitize

HELP = """\
usage: trigon train [CONFIG.yaml] [key=value ...]

Train with the options of CONFIG.yaml; key=value overrides an option, for example data.max_prompt_length=1024.
docs/configuration.md explains every option. Configuration files and command lines of EasyR1 work unchanged;
config=CONFIG.yaml is accepted too.

  --print-config   print the resolved configuration and exit; with status 2 if it has errors
"""

EXIT_STOPPED = 143
"""Exit status after SIGTERM: the current step was finished and saved, and the same command resumes.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.cli.main."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(HELP)
        return 0
    print_only = "--print-config" in arguments
    arguments = [argument for argument in arguments if argument != "--print-config"]
    if print_only:
        return print_config(arguments)
    return train(load_config(*split_arguments(arguments)))


def print_config(arguments: Sequence[str]) -> int:
    """Print the resolved configuration, or its errors, and return the exit status."""
    try:
        loaded = load_config(*split_arguments(arguments))
    except ConfigError as error:
        print(f"{type(error).__name__}: {sanitize(str(error), max_characters=5000)}", file=sys.stderr)
        return 2
    for warning in loaded.warnings:
        print(f"warning: {sanitize(warning, max_characters=5000)}", file=sys.stderr)
    print(dump_config(loaded.config), end="")
    return 0


def train(loaded: LoadedConfig, *, export_to: Path | None = None) -> int:
    """Train, and return the exit status. export_to: where to export the last checkpoint."""
    # Imported here, so that errors of the configuration do not wait for heavy libraries.
    from trigon.build.run import TrackerEnvironment, run_training

    trackers = TrackerEnvironment(
        tensorboard_dir=read_path("TENSORBOARD_DIR"),
        swanlab_dir=read_path("SWANLAB_DIR"),
        swanlab_mode=os.environ.get("SWANLAB_MODE"),
        swanlab_api_key=os.environ.get("SWANLAB_API_KEY"),
    )
    with stop_on_sigterm() as stopped:
        run_training(
            loaded.config, warnings=loaded.warnings, trackers=trackers, should_stop=stopped, export_to=export_to
        )
        return EXIT_STOPPED if stopped() else 0


def read_path(variable: str) -> Path | None:
    """Return the path in an environment variable, or None if it is unset or empty."""
    return Path(os.environ[variable]) if os.environ.get(variable) else None


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM was received.

    A second SIGTERM ends the process at once.
    """
    received = False

    def handle(number: int, frame: object) -> None:
        nonlocal received
        received = True
        signal.signal(signal.SIGTERM, before)
        print("SIGTERM: finishing and saving the current step", file=sys.stderr)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield lambda: received
    finally:
        signal.signal(signal.SIGTERM, before)
