"""`trigon quickstart`: makes a tiny model and its data, trains the model, and exports it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from trigon.assemble.start import share_heaps
from trigon.config.load import load_config, split_arguments
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.system.child_python import python_command
from trigon.tools.cli.parser import ArgumentParser
from trigon.tools.cli.train import train

CONFIG = Path(__file__).with_name("quickstart.yaml")
TINY = "from trigon.tools.cli.main import main; sys.exit(main(['tiny', *sys.argv[1:]]))"


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main."""
    parser = ArgumentParser(
        prog="trigon quickstart",
        description="Make a tiny vision-language model and drawings, train it with GRPO, and export it.",
        epilog="Its configuration is trigon/tools/quickstart/quickstart.yaml.",
        examples=[
            ("trigon quickstart", "a whole run; the same command again resumes it"),
            ("trigon quickstart trainer.max_steps=20", "with another option of the configuration"),
            ("trigon quickstart --seed 1 --folder runs/seed1", "another seed, in another folder"),
        ],
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/quickstart"), help="folder of all files (%(default)s)"
    )
    parser.add_argument("--model-type", default="qwen2_5_vl", choices=["qwen2_5_vl", "qwen3_vl"], help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data, order and sampling (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of `trigon train`")
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder
    made = folder / "made" / f"{chosen.model_type}_seed{chosen.seed}"
    # Loaded first, so that an error in an override is found before anything is made.
    overrides = read_overrides(chosen.overrides)
    early = load_config(CONFIG, [*options("made/train", "made/validation", "made/model", chosen), *overrides])
    # A second thread does not speed up so small a model, and with one thread its numbers are the
    # same on every machine with the same kernels. Set before torch is imported, which reads it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        if not (made / "model").is_dir():
            tiny = [str(made), "--model-type", chosen.model_type, "--seed", str(chosen.seed)]
            # In another process, while this one imports vLLM, which takes about as long.
            making = stack.enter_context(subprocess.Popen(python_command(TINY, *tiny)))
            share_heaps()  # before the libraries start threads
            import_ahead(early.config)
            # The folder appears when the model is complete, two seconds before the process ends.
            while making.poll() is None and not (made / "model").is_dir():
                time.sleep(0.02)
            if making.returncode:
                return int(making.returncode)
        data = made / "data"
        files = str(data / "train.parquet"), str(data / "validation.parquet"), str(made / "model")
        return train(load_config(CONFIG, [*options(*files, chosen), *overrides]), export_to=folder / "model")


def import_ahead(config: Config) -> None:
    """Import the libraries that training in this process uses, if installed.

    Training reports missing ones.
    """
    import trigon.assemble.run  # noqa: F401
    from trigon.data import sources

    sources.import_ahead()
    uses_vllm = config.worker.rollout.name == "vllm" and config.trainer.device == "cpu" and not config.has_workers
    if uses_vllm and importlib.util.find_spec("vllm") is not None:
        from trigon.rollout import vllm

        vllm.import_ahead("cpu")


def read_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the overrides. Raises: ConfigError if an argument is no override, or names a file."""
    path, overrides = split_arguments(arguments)
    if path is not None:
        raise ConfigError(
            f"{path} is given, but trigon quickstart has a configuration of its own; give key=value, or run "
            f"trigon train {path}"
        )
    return overrides


def options(train_files: str, val_files: str, model_path: str, chosen: argparse.Namespace) -> list[str]:
    """Return the overrides of the command, which come before the user's."""
    return [
        f"data.train_files={train_files}",
        f"data.val_files={val_files}",
        f"data.seed={chosen.seed}",
        f"worker.rollout.seed={chosen.seed}",
        f"worker.actor.model.model_path={model_path}",
        f"trainer.save_checkpoint_path={chosen.folder / 'run'}",
    ]
