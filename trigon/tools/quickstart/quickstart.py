"""`trigon quickstart`: makes a tiny model and its data, trains the model, and exports it.

`trigon tiny FOLDER` makes the model, warms it up, and generates its data, and does no more.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from trigon.assemble.start import share_heaps
from trigon.config.load import load_config, split_arguments
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.report.console import Console
from trigon.system.processes import python_command
from trigon.tools.cli.parser import ArgumentParser, new_folder, number, require_absent
from trigon.tools.cli.train import train
from trigon.tools.quickstart.drawings import BLANK, TRAIN, VALIDATION

CONFIG = Path(__file__).with_name("quickstart.yaml")
TINY = "from trigon.tools.cli.main import main; sys.exit(main(['tiny', *sys.argv[1:]]))"

NUM_TRAIN, NUM_VALIDATION = 2048, 192
DRAW = """
from pathlib import Path
from trigon.tools.quickstart.drawings import make_dataset
folder, num_train, num_validation, seed = sys.argv[1:]
make_dataset(Path(folder), num_train=int(num_train), num_validation=int(num_validation), seed=int(seed))
"""
MAKING = ".making_model"
"""Folder of a model that is being made."""

WARM_START_ACCURACY, WARM_START_UPDATES = 0.35, 120
WARM_START_BATCH, WARM_START_RATE, WARM_START_WARMUP = 8, 2.5e-3, 10


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
        "--folder", type=new_folder, default=Path("runs/quickstart"), help="folder of all files (%(default)s)"
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
            shutil.rmtree(made, ignore_errors=True)  # data whose model was removed
            arguments = [str(made), "--model-type", chosen.model_type, "--seed", str(chosen.seed)]
            # In another process, while this one imports vLLM, which takes about as long.
            making = stack.enter_context(subprocess.Popen(python_command(TINY, *arguments)))
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


def tiny(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main."""
    parser = ArgumentParser(
        prog="trigon tiny",
        description="Make FOLDER/model, a tiny Qwen2.5-VL or Qwen3-VL after a short supervised warm start, and "
        "FOLDER/data, drawings in Geometry3K's schema: train.parquet, validation.parquet, validation_blank.parquet.",
        examples=[
            ("trigon tiny made", "made/model and made/data"),
            ("trigon tiny made --model-type qwen3_vl --skill 0", "another family, with random weights"),
        ],
    )
    parser.add_argument("folder", type=new_folder, help="folder to write; nothing in it is overwritten")
    parser.add_argument("--model-type", default="qwen2_5_vl", choices=["qwen2_5_vl", "qwen3_vl"], help="(%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the model, the data and the warm start (%(default)s)"
    )
    parser.add_argument(
        "--skill",
        type=number(0, 1),
        default=WARM_START_ACCURACY,
        help="accuracy in [0, 1] at which the supervised warm start ends; 0: random weights (%(default)s)",
    )
    parser.add_argument(
        "--max-updates",
        type=number(0, whole=True),
        default=WARM_START_UPDATES,
        help="maximum number of supervised updates (%(default)s)",
    )
    chosen = parser.parse_args(arguments)
    console = Console()
    folder: Path = chosen.folder
    # Data that an interrupted call has left there are made again.
    data = [] if (folder / MAKING).exists() else [f"data/{name}" for name in (TRAIN, VALIDATION, BLANK)]
    require_absent(folder, ["model", *data])
    if not make(
        folder,
        console,
        model_type=chosen.model_type,
        seed=chosen.seed,
        skill=chosen.skill,
        max_updates=chosen.max_updates,
    ):
        return 1
    console.print(f"model: {folder / 'model'}\ndata:  {folder / 'data'}")
    return 0


def make(
    folder: Path,
    console: Console,
    *,
    model_type: str = "qwen2_5_vl",
    seed: int = 0,
    skill: float = WARM_START_ACCURACY,
    max_updates: int = WARM_START_UPDATES,
) -> bool:
    """Make the model and the data in a folder. False if a process failed, which has printed why.

    The options are the options of the command.
    """
    # Renamed at the end, so that an interrupted command leaves no incomplete model folder.
    temporary = folder / MAKING
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    # Drawing and importing torch take about as long, so they run in parallel.
    draw = python_command(DRAW, str(folder / "data"), str(NUM_TRAIN), str(NUM_VALIDATION), str(seed))
    with subprocess.Popen(draw) as drawing, console.progress("make the model and draw the data", None):
        from trigon.tools.quickstart.model import make_tiny

        make_tiny(temporary, model_type=model_type, seed=seed)
        if drawing.wait():
            return False
    if skill > 0 and max_updates > 0:
        warm_up(temporary, folder / "data" / TRAIN, console, seed=seed, skill=skill, max_updates=max_updates)
    temporary.rename(folder / "model")
    return True


def warm_up(folder: Path, train: Path, console: Console, *, seed: int, skill: float, max_updates: int) -> None:
    """Train the model in a folder on the training prompts, in place. Options: as in make."""
    from pyarrow.parquet import read_table

    from trigon.config.schema import DataConfig, OptimConfig
    from trigon.data.prompts import PromptBuilder
    from trigon.models.load import load_processors
    from trigon.tools.quickstart.warm_start import as_target, warm_start_folder
    from trigon.training.optim import Schedule
    from trigon.types import TrainGroup

    processors = load_processors(str(folder))
    data = DataConfig(prompt_key="problem", max_prompt_length=1024, max_image_pixels=10**6)
    builder = PromptBuilder(processors, data)
    rows = read_table(train).to_pylist()  # generated, so they need not be validated

    def make_example(index: int) -> TrainGroup:
        prompt = builder.build(rows[index], f"train:{index}")
        completion = f"<think>I see it in the picture.</think>\\boxed{{{prompt.ground_truth}}}"
        token_ids = (*processors.tokenizer.encode(completion), processors.stop_token_ids[0])
        return TrainGroup(prompt, (as_target(token_ids),))

    with console.progress("warm up the model", None) as advance:
        accuracy = warm_start_folder(
            folder,
            processors,
            make_example,
            num_examples=min(len(rows), max_updates * WARM_START_BATCH),
            max_updates=max_updates,
            target_accuracy=skill,
            batch_size=WARM_START_BATCH,
            schedule=Schedule(OptimConfig(lr=WARM_START_RATE), WARM_START_WARMUP, max_updates),
            seed=seed,
            on_progress=lambda _: advance(1),
        )
    console.print(f"accuracy after the warm start: {accuracy:.0%}")
