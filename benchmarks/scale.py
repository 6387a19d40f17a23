"""What a step costs, against prompts, answers, response length and workers; and what the controller
costs by itself.

    python benchmarks/scale.py [--plot docs/scale.svg]

The controller is measured with engines that do nothing (rollout/fake.py, training/fake.py) and
everything else real: data and drawings, reward workers, advantages, reports. Its cost for each
prompt should not grow with their number. The rest is the 40 M-parameter model of the other
benchmarks with vLLM, in float32 with one thread a worker.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from shared import SHORT, VOCABULARY, Figure, Shape, figures_table, make_data, make_folder, phases_of, table
from side_trigon import options

from trigon.algorithms.advantages import estimate_advantages
from trigon.assemble import data as build_data
from trigon.assemble import run as build_run
from trigon.assemble.engines import Engines, open_engines
from trigon.assemble.options import make_sampling_params
from trigon.assemble.start import StopSignals, start_run
from trigon.config.load import load_config
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.data.prompts import PromptBuilder
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import RunFolder
from trigon.rollout.fake import FakeEngine
from trigon.system.process_settings import set_gc_threshold
from trigon.system.trace import LocalTracer
from trigon.training.fake import FakeTrainEngine
from trigon.training.train_groups import build_reward_batch, build_train_groups
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, SamplingParams, Score

CONTROLLED = (64, 512, 8192)
ANSWERS = 8
FLAT = 1.5
"""How much more a prompt may cost among the most than among the fewest, and still be called flat.
"""

# One thing is changed at a time.
SHAPES = {
    "prompts": [replace(SHORT, prompts=prompts) for prompts in (1, 2, 3)],
    "answers to a prompt": [replace(SHORT, prompts=1, n=n) for n in (2, 4, 8, 16)],
    "response tokens": [replace(SHORT, prompts=1, response=response) for response in (32, 64, 128)],
}
WORKERS = (1, 2)


# -- the controller --


class EngineWithoutMedia(FakeEngine):
    """Samples without the images, which the workers of a real engine process themselves."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, **options: Any) -> list[list[Completion]]:
        """See RolloutEngine."""
        return super().generate([replace(prompt, vision=None) for prompt in prompts], sampling, **options)


def controller(prompts: int, folder: Path) -> dict[str, float]:
    """Return the seconds of each phase of a step with engines that do nothing."""
    from trigon.tools.quickstart.drawings import make_dataset
    from trigon.tools.quickstart.model import make_tiny

    model = make_tiny(folder / "model")
    train, _ = make_dataset(folder / "data", num_train=prompts, num_validation=1, seed=0)
    changes = (
        f"data.train_files={train}",
        "data.max_prompt_length=128",
        "data.max_response_length=24",
        f"data.rollout_batch_size={prompts}",
        f"worker.actor.global_batch_size={prompts}",
        f"worker.rollout.n={ANSWERS}",
        "worker.rollout.ignore_eos=false",
        f"worker.actor.model.model_path={model}",
        f"trainer.save_checkpoint_path={folder / 'run'}",
        f"trainer.max_steps={2 + 512 // prompts}",
        "worker.reward.num_cpus=2",
    )
    loaded = load_config(None, [*options(folder, SHORT, 3), *changes])

    def open_fakes(config: Any, processors: Any, *_: Any, **__: Any) -> Engines:
        rollout = EngineWithoutMedia(
            tokenizer=processors.tokenizer,
            stop_token_id=processors.stop_token_ids[0],
            complete=lambda prompt, version, seed: f"\\boxed{{{seed % 7}}}",
        )
        tracer = LocalTracer(folder, rank=None)
        return Engines("none", FakeTrainEngine(), None, rollout, tracer, tune_micro_batch=nobody_asks)

    def nobody_asks(*_: Any) -> Any:
        raise AssertionError("trainer.auto_micro_batch is false")

    def open_builder(config: Config, processors: Any, *, schemas: Sequence[Any] = ()) -> PromptBuilder:
        several = config.model_copy(update={"trainer": config.trainer.model_copy(update={"n_gpus_per_node": 2})})
        # To several workers images go as files, which they process themselves.
        return real_builder(several, processors, schemas=schemas)

    real_builder = build_data.open_builder
    with mock.patch.multiple(build_run, open_engines=open_fakes, open_builder=open_builder):
        start_run(loaded, stop=StopSignals())
    return phases_of(folder / "run", statistics.median)


def measure_controller(counts: Sequence[int]) -> tuple[list[Figure], list[tuple[int, dict[str, float]]]]:
    """Return the figure of bar 6, and milliseconds a prompt by phase for each number of prompts."""
    found = []
    for prompts in counts:
        with tempfile.TemporaryDirectory() as folder:
            phases = controller(prompts, Path(folder))
        found.append((prompts, {name: 1000.0 * seconds / prompts for name, seconds in phases.items()}))
    costs = [phases["step"] - phases["gen"] for _, phases in found]  # what the fake says is not the controller's
    what = f"controller's cost of a prompt, {counts[-1]:,} against {counts[0]:,} prompts"
    note = f"{costs[0]:.2f} ms, {costs[-1]:.2f} ms"
    return [Figure(6, what, costs[-1] / costs[0], "x", at_most=FLAT, note=note)], found


# -- engines --


def engines(shapes: Iterable[Shape], folder: Path) -> list[tuple[Shape, float, float]]:
    """Return for each shape the seconds of sampling, and of one update, in one process that has its
    engines open.
    """
    shapes = list(dict.fromkeys(shapes))
    widest = replace(
        SHORT,
        prompts=max(shape.prompts for shape in shapes),
        n=max(shape.n for shape in shapes),
        response=max(shape.response for shape in shapes),
    )
    make_folder(folder / "model", vocabulary=VOCABULARY, shape=SHORT)
    make_data(folder / "data.parquet", model=folder / "model", shape=SHORT, rows=widest.prompts)
    config = load_config(None, options(folder, widest, 1)).config
    found = []
    with ExitStack() as stack:
        processors = build_data.open_processors(config)
        report = stack.enter_context(_quiet_reporter(folder))
        prompts = build_data.scan_datasets(
            config, config.data.train_files, (), build_data.open_builder(config, processors), report
        )
        plan = make_plan(config, num_train_prompts=prompts.prompts_per_epoch)
        opened = open_engines(config, processors, plan, None, report, stack, shows_videos=False)
        rows = [prompts[index] for index in range(widest.prompts)]
        for number, shape in enumerate([shapes[0], *shapes]):  # the first one warms up
            sampling = replace(make_sampling_params(config), n=shape.n, max_tokens=shape.response)
            with opened.rollout.awake(opened.trainer.weights(), version=number):
                start = time.perf_counter()
                answers = opened.rollout.generate(rows[: shape.prompts], sampling)
                sampled = time.perf_counter() - start
            groups = [
                RolloutGroup(
                    prompt, tuple(Rollout(each, Score(float(i % 2), {}, "ok", "")) for i, each in enumerate(row))
                )
                for prompt, row in zip(rows, answers, strict=False)
            ]
            algorithm = config.algorithm
            outcomes = build_reward_batch(groups, algorithm, penalties=None, baselines=None)
            advantages = estimate_advantages(
                outcomes,
                algorithm.adv_estimator,
                gamma=algorithm.gamma,
                weights=algorithm.reward_weights or None,
            )
            trained = build_train_groups(groups, advantages, outcomes.valid, old=None, ref=None)
            start = time.perf_counter()
            opened.trainer.step(trained)
            found.append((shape, sampled, time.perf_counter() - start))
    return found[1:]


def _quiet_reporter(folder: Path) -> Reporter:
    return Reporter(RunFolder(folder / "run"), Console(progress=False, step_lines=False))


# -- workers --


def workers(count: int, folder: Path, *, prompts: int, steps: int) -> dict[str, float]:
    """Return the seconds of each phase of a step with this many workers, one CPU thread each."""
    shape = replace(SHORT, prompts=prompts)
    make_folder(folder / "model", vocabulary=VOCABULARY, shape=shape)
    make_data(folder / "data.parquet", model=folder / "model", shape=shape, rows=prompts * steps)
    command = [sys.executable, "-m", "trigon", "train", *options(folder, shape, steps)]
    command += [f"trainer.n_gpus_per_node={count}", f"trainer.max_steps={steps}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return phases_of(folder / "trigon", statistics.median)


# -- tables --


def measure(*, plot: Path | None) -> tuple[list[Figure], str]:
    """Return the figure of bar 6, and the tables; draw the plot, if one is wanted."""
    set_gc_threshold()  # as the command does
    figures, controlled = measure_controller(CONTROLLED)
    names = sorted({name for _, phases in controlled for name in phases} - {"step", "gen", "save_checkpoint"})
    rows = [
        (f"{count:,}", *(f"{phases.get(name, 0.0):.2f}" for name in names), f"{phases['step'] - phases['gen']:.2f}")
        for count, phases in controlled
    ]
    parts = [
        f"The controller, {ANSWERS} answers to each prompt, milliseconds a prompt:",
        table(rows, ("prompts a step", *names, "all but the fake's own")),
    ]
    with tempfile.TemporaryDirectory() as folder:
        measured = engines([shape for shapes in SHAPES.values() for shape in shapes], Path(folder))
    of_shape = {shape: (sampled, updated) for shape, sampled, updated in measured}
    for name, shapes in SHAPES.items():
        key = {"prompts": "prompts", "answers to a prompt": "n", "response tokens": "response"}[name]
        rows = [
            (
                getattr(shape, key),
                f"{of_shape[shape][0]:.2f}",
                f"{of_shape[shape][1]:.2f}",
                f"{1000 * sum(of_shape[shape]) / (shape.sequences * shape.response):.2f}",
            )
            for shape in shapes
        ]
        parts += [
            f"Against {name}:",
            table(rows, (name, "sampling, s", "update, s", "milliseconds a response token")),
        ]
    by_workers = []
    for count in WORKERS:
        with tempfile.TemporaryDirectory() as folder:
            by_workers.append((count, workers(count, Path(folder), prompts=2, steps=2)))
    shown = ("gen", "weights", "parity", "update_actor", "step")
    rows = [(count, *(f"{phases.get(name, 0.0):.2f}" for name in shown)) for count, phases in by_workers]
    parts += ["Against workers, 2 prompts, seconds:", table(rows, ("workers", *shown))]
    if plot is not None:
        draw(plot, controlled, of_shape)
    return figures, "\n\n".join(parts)


def draw(
    file: Path,
    controlled: Sequence[tuple[int, dict[str, float]]],
    of_shape: dict[Shape, tuple[float, float]],
) -> None:
    """Draw the cost of a prompt to the controller, and a step against what it is made of."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "trigon"
    figure, axes = plt.subplots(1, 1 + len(SHAPES), figsize=(14, 3.4))
    counts = [count for count, _ in controlled]
    axes[0].plot(counts, [phases["step"] - phases["gen"] for _, phases in controlled], marker="o")
    axes[0].set(xscale="log", xlabel="prompts a step", ylabel="controller, ms a prompt", ylim=(0, None))
    for axis, (name, shapes) in zip(axes[1:], SHAPES.items(), strict=True):
        key = {"prompts": "prompts", "answers to a prompt": "n", "response tokens": "response"}[name]
        at = [getattr(shape, key) for shape in shapes]
        axis.plot(at, [of_shape[shape][0] for shape in shapes], marker="o", label="sampling")
        axis.plot(at, [of_shape[shape][1] for shape in shapes], marker="o", label="update")
        axis.set(xlabel=name, ylabel="seconds", ylim=(0, None), xlim=(0, None))
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, help="draw them into this file as well")
    torch.set_num_threads(1)
    figures, tables = measure(plot=parser.parse_args().plot)
    print(f"{tables}\n\n{figures_table(figures)}")


if __name__ == "__main__":
    main()
