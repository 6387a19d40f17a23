"""`trigon train [CONFIG.yaml] [key=value ...]`: trains a model."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trigon import __version__
from trigon.assemble.start import StopSignals, start_run
from trigon.config.load import LoadedConfig, dump_config, load_config, split_arguments
from trigon.system.terminal import sanitize
from trigon.tools.cli.parser import ArgumentParser

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

EXIT_SIGNAL = 128
"""Plus the number of the signal: the exit status after SIGHUP (129), SIGINT (130), SIGTERM (143).

After one signal the last step that could be finished is saved, and the same command resumes.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main."""
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
        # A text may continue in the next line: a comment after the first one would be part of it.
        if line.endswith(":") or not following.startswith(f"{key[1]}  "):
            lines.append(f"{line}  {comment}")
        else:
            lines += [f"{key[1]}{comment}", line]
    return "\n".join(["# Options without a comment have their defaults.", *lines, ""])


def train(loaded: LoadedConfig, *, export_to: Path | None = None) -> int:
    """Train, and return the exit status. export_to: where to export the last checkpoint."""
    print(f"trigon {__version__}: loading libraries", flush=True)
    stop = StopSignals()
    try:
        start_run(loaded, stop=stop, export_to=export_to)
    except KeyboardInterrupt:
        if stop.received is None:
            raise
        print(f"{stop.received.name}: stopped at once; steps since the last checkpoint are lost", file=sys.stderr)
    return 0 if stop.received is None else EXIT_SIGNAL + stop.received
