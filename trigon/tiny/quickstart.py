"""`trigon quickstart`: make a tiny model and its data, train it, export it: the main job, here and now."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from trigon.cli.train import train
from trigon.config.load import load_config
from trigon.config.plan import num_workers
from trigon.config.schema import Config

CONFIG = Path(__file__).with_name("quickstart.yaml")


def main(arguments: Sequence[str]) -> int:
    """Run the command; see trigon.cli.main for the exit status."""
    parser = argparse.ArgumentParser(
        prog="trigon quickstart",
        description="Make a tiny genuine vision-language model and drawings to read, train it with GRPO, export it.",
        epilog="Any option may be changed: trigon quickstart trainer.max_steps=20. The configuration: " + str(CONFIG),
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/quickstart"), help="where everything goes (%(default)s)"
    )
    parser.add_argument("--model-type", default="qwen2_5_vl", choices=["qwen2_5_vl", "qwen3_vl"], help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of model, data, order and sampling (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of `trigon train`")
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder
    made = folder / "made" / f"{chosen.model_type}_seed{chosen.seed}"
    # Refuses a mistyped override before anything is made.
    planned = load_config(CONFIG, [*options("made/train", "made/validation", "made/model", chosen), *chosen.overrides])
    # A model this small gains nothing from a second thread, and with one its numbers are the same on every machine
    # with the same kernels. Read when torch is imported, so before that.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        if not (made / "model").is_dir():
            tiny = [str(made), "--model-type", chosen.model_type, "--seed", str(chosen.seed)]
            # In a process of its own, so that this one can meanwhile import what takes as long: vLLM and all it uses.
            making = stack.enter_context(subprocess.Popen([sys.executable, "-m", "trigon.cli", "tiny", *tiny]))
            import_ahead(planned.config)
            # The model is there when its folder is; that process then takes two more seconds to end.
            while making.poll() is None and not (made / "model").is_dir():
                time.sleep(0.02)
            if making.returncode:
                return int(making.returncode)
        data = made / "data"
        files = str(data / "train.parquet"), str(data / "validation.parquet"), str(made / "model")
        return train(load_config(CONFIG, [*options(*files, chosen), *chosen.overrides]), export_to=folder / "model")


def import_ahead(config: Config) -> None:
    """Import what training in this process will want, if it is installed; if not, training will say so."""
    import trigon.build.run  # noqa: F401
    from trigon.data import sources

    sources.import_ahead()
    wants_vllm = config.worker.rollout.name == "vllm" and config.trainer.device == "cpu" and num_workers(config) == 1
    if wants_vllm and importlib.util.find_spec("vllm") is not None:
        from trigon.rollout import vllm

        vllm.import_ahead("cpu")


def options(train_files: str, val_files: str, model_path: str, chosen: argparse.Namespace) -> list[str]:
    """Return what the command sets, besides the configuration file and the user's overrides."""
    return [
        f"data.train_files={train_files}",
        f"data.val_files={val_files}",
        f"data.seed={chosen.seed}",
        f"worker.rollout.seed={chosen.seed}",
        f"worker.actor.model.model_path={model_path}",
        f"trainer.save_checkpoint_path={chosen.folder / 'run'}",
    ]
