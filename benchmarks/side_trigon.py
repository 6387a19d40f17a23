"""Trigon's side of whole_step.py: train, and before each step wait for a line on standard input.

python benchmarks/side_trigon.py FOLDER SHAPE PROMPTS STEPS      (as whole_step.py starts it)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shared import GEOMETRY, LONG, SHORT, Shape

from trigon.assemble.start import StopSignals, start_run
from trigon.config.load import load_config
from trigon.system.process_settings import set_gc_threshold


def options(folder: Path, shape: Shape, steps: int) -> list[str]:
    """Return the configuration, as a user would write it on the command line."""
    return [
        f"data.train_files={folder / 'data.parquet'}",
        "data.prompt_key=problem",
        "data.answer_key=answer",
        "data.image_key=images",
        "data.min_pixels=null",
        "data.max_pixels=null",
        "data.format_prompt=null",
        f"data.max_prompt_length={shape.prompt}",
        f"data.max_response_length={shape.response}",
        f"data.rollout_batch_size={shape.prompts}",
        "algorithm.disable_kl=true",
        f"worker.actor.global_batch_size={shape.prompts}",
        f"worker.actor.micro_batch_size_per_device_for_update={shape.sequences}",
        "worker.actor.model.enable_gradient_checkpointing=false",
        f"worker.actor.model.model_path={folder / 'model'}",
        "worker.actor.optim.lr=1e-6",
        "worker.actor.fsdp.torch_dtype=fp32",
        "worker.actor.fsdp.mp_param_dtype=fp32",
        f"worker.rollout.n={shape.n}",
        "worker.rollout.dtype=fp32",
        "worker.rollout.temperature=1.0",
        "worker.rollout.top_p=1.0",
        "worker.rollout.ignore_eos=true",
        f"worker.reward.reward_function={Path(__file__).with_name('shared.py')}:arbitrary_rewards",
        "worker.reward.num_cpus=1",
        "trainer.device=cpu",
        "trainer.logger=file",
        "trainer.val_before_train=false",
        f"trainer.max_steps={steps + 1}",  # so that none of them saves a checkpoint, as none of the peer's does
        f"trainer.save_checkpoint_path={folder / 'trigon'}",
        "trainer.find_last_checkpoint=false",
    ]


def train(options: Sequence[str], steps: int, describe: Callable[[], dict[str, float]] = dict) -> None:
    """Train, and print of each step the seconds and what describe returns."""
    made, started = 0, 0.0

    def wait() -> None:
        nonlocal started
        sys.stdin.readline()
        started = time.perf_counter()

    def after_step() -> bool:
        nonlocal made
        seconds = time.perf_counter() - started
        made += 1
        print(f"@step {json.dumps({'seconds': seconds} | describe())}", flush=True)
        if made == steps:
            return True
        wait()
        return False

    set_gc_threshold()  # as the command does
    loaded = load_config(None, options)
    wait()  # the first step has the start in it, and is not counted
    stop = StopSignals()
    stop.requested = after_step  # type: ignore[method-assign]
    start_run(loaded, stop=stop)


if __name__ == "__main__":
    shapes = {shape.name: shape for shape in (SHORT, LONG, GEOMETRY)}
    shape = replace(shapes[sys.argv[2]], prompts=int(sys.argv[3]))
    train(options(Path(sys.argv[1]), shape, int(sys.argv[4])), int(sys.argv[4]))
