"""`trigon train [CONFIG.yaml] [key=value ...]`: trains a model."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trigon import __version__
from trigon.cli.parser import ArgumentParser
from trigon.config.load import LoadedConfig, dump_config, load_config, split_arguments
from trigon.terminal import sanitize

DESCRIPTION = """\
Train with the options of CONFIG.yaml; key=value overrides an option, for example
data.max_prompt_length=1024. Configuration files and command lines of EasyR1 work unchanged;
config=CONFIG.yaml is accepted too."""

HELP = """\
What most runs set:
  worker.actor.model.model_path            the model: a hub id or a folder
  data.train_files, data.val_files         the data: hub ids, files or folders
  data.prompt_key, data.answer_key, data.image_key    the columns of the data
  data.format_prompt                       a template around each question
  data.max_prompt_length, data.max_response_length    in tokens
  data.rollout_batch_size                  prompts of a step
  worker.rollout.n                         completions for each prompt
  worker.reward.reward_function            file.py:function, or one of the shipped ones
  worker.actor.global_batch_size           prompts of an update
  worker.actor.optim.lr                    learning rate
  algorithm.adv_estimator                  grpo, or another algorithm
  algorithm.kl_coef, algorithm.disable_kl  the KL term
  worker.actor.model.lora.rank             above 0: train adapters
  trainer.n_gpus_per_node, trainer.nnodes  workers
  worker.rollout.gpu_memory_utilization    vLLM's share of each GPU
  trainer.max_steps, trainer.total_epochs  length of the run
  trainer.val_freq, trainer.save_freq      steps between validations, and between checkpoints
  trainer.logger                           console, file, wandb, ...
  trainer.experiment_name                  names the run's folder

`trigon options NAME` explains an option, `trigon options` lists all of them with their defaults,
and docs/configuration.md has them in one page."""

EXIT_STOPPED = 143
"""Exit status after SIGTERM: the current step was finished and saved, and the same command resumes.
"""

_STDERR = 2  # file descriptor

EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C (SIGINT). After one, the current step was finished and saved."""


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.cli.main."""
    options = make_parser().parse_args(arguments)
    loaded = load_config(*split_arguments(options.arguments))
    if options.print_config:
        print_config(loaded)
        return 0
    return train(loaded)


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = ArgumentParser(
        prog="trigon train",
        usage="trigon train [--print-config] [CONFIG.yaml] [key=value ...]",
        description=DESCRIPTION,
        epilog=HELP,
        examples=[
            ("trigon train run.yaml trainer.max_steps=20", "a file, and an option"),
            ("trigon train run.yaml --print-config", "the options as they would be"),
        ],
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="CONFIG.yaml|key=value", help="a YAML file, and options that override it"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the resolved configuration, and where each value was written, and exit; with status 2 if it has "
        "errors",
    )
    return parser


def print_config(loaded: LoadedConfig) -> None:
    """Print the resolved configuration, and its warnings to standard error."""
    for warning in loaded.warnings:
        print(f"warning: {sanitize(warning, max_characters=5000)}", file=sys.stderr)
    print(annotate(dump_config(loaded.config), loaded.sources), end="")


def annotate(text: str, sources: Mapping[str, str]) -> str:
    """Return the YAML text of a configuration with a comment at each option that is not a default.

    sources: where each of them was written, by its name.
    """
    given = text.splitlines()
    lines: list[str] = []
    path: list[str] = []
    for line, following in zip(given, [*given[1:], ""], strict=True):
        key = re.match(r"((?:  )*)([a-z_0-9]+):(?= |$)", line)
        path = path if key is None else [*path[: len(key[1]) // 2], key[2]]
        if key is None or ".".join(path) not in sources:
            lines.append(line)
            continue
        comment = f"# {sanitize(sources['.'.join(path)], max_characters=500)}"
        # A text may go on in the next line, and would then contain a comment behind its first one.
        if line.endswith(":") or not following.startswith(f"{key[1]}  "):
            lines.append(f"{line}  {comment}")
        else:
            lines += [f"{key[1]}{comment}", line]
    return "\n".join(["# Options without a comment have their defaults.", *lines, ""])


def train(loaded: LoadedConfig, *, export_to: Path | None = None) -> int:
    """Train, and return the exit status. export_to: where to export the last checkpoint."""
    print(f"trigon {__version__}: loading libraries", flush=True)
    if loaded.config.trainer.device == "cpu":
        # Read as torch is imported. vLLM's C++ code notes on which NUMA node its memory is.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported here, so that errors of the configuration do not wait for heavy libraries.
    from trigon.build.run import run_training
    from trigon.data.images import ignore_pillow_warnings
    from trigon.report.loggers.protocol import LoggerEnvironment

    ignore_pillow_warnings()

    logger_environment = LoggerEnvironment(
        tensorboard_dir=read_path("TENSORBOARD_DIR"),
        swanlab_dir=read_path("SWANLAB_DIR"),
        swanlab_mode=os.environ.get("SWANLAB_MODE"),
        swanlab_api_key=os.environ.get("SWANLAB_API_KEY"),
    )
    stop = StopSignals()
    try:
        with stop.handled(signal.SIGTERM):
            run_training(
                loaded.config,
                warnings=loaded.warnings,
                logger_environment=logger_environment,
                should_stop=stop.requested,
                defer_interrupts=lambda: stop.handled(signal.SIGINT),
                export_to=export_to,
            )
    except KeyboardInterrupt:
        if not stop.requested():
            raise
        print("stopped at once: the current step is not saved", file=sys.stderr)
        return EXIT_INTERRUPTED
    match stop.received:
        case None:
            return 0
        case signal.SIGINT:
            return EXIT_INTERRUPTED
        case _:
            return EXIT_STOPPED


def read_path(variable: str) -> Path | None:
    """Return the path in an environment variable, or None if it is unset or empty."""
    return Path(os.environ[variable]) if os.environ.get(variable) else None


class StopSignals:
    """Turns signals into a request to stop after the current step; a second signal acts at once.

    received: the signal that made the request; None: no request.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._handlers: dict[int, Any] = {}  # by signal: what was in effect before

    def requested(self) -> bool:
        """Return whether a signal was received."""
        return self.received is not None

    @contextmanager
    def handled(self, number: signal.Signals) -> Iterator[None]:
        """Handle a signal within the context, unless this process was started to ignore it."""
        before = signal.getsignal(number)
        if before is signal.SIG_IGN:
            yield
            return
        self._handlers[number] = before
        signal.signal(number, self._receive)
        try:
            yield
        finally:
            del self._handlers[number]
            signal.signal(number, before)

    def _receive(self, number: int, frame: object) -> None:
        self.received = signal.Signals(number)
        for each, before in self._handlers.items():
            signal.signal(each, before)
        if self.received is signal.SIGINT:
            text = "\nCtrl-C: finishing and saving the current step; press Ctrl-C again to stop at once\n"
        else:
            text = f"{self.received.name}: finishing and saving the current step\n"
        # Not print, which raises if the signal arrives during another print.
        os.write(_STDERR, text.encode())
