"""Compares the simulation of clusters with real runs on this machine: it measures some short runs,
fits the times of the simulation to them, and predicts the steps of other runs, with other lengths
and other batches.

    python benchmarks/cluster_runs.py [--layouts ...] [--steps 6] [--tiny]

Layouts: one worker, two workers that sample and learn in turn, and one worker that samples beside
one that learns, with k = 0 and k = 1 (skipped where the configuration refuses it). The model of
40 M parameters of the other benchmarks, float32, one thread a worker. Needs two cores that do
nothing else; about half an hour. --tiny takes the tiny model: seven minutes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
from cluster_modes import MODES, Hardware, Mode, simulate
from drawn_lengths import environment
from shared import SHORT, VOCABULARY, Shape, machine, make_data, make_folder, table
from side_trigon import options
from simulation import Linear, LongTail, SamplingTimes

from trigon.config.load import load_config
from trigon.errors import ConfigError
from trigon.report.run import open_run

WITHIN = 0.15
WARM_UP = 2
"""Steps that do not count: one that warms up, and one in which nothing is sampled ahead yet."""

_MODES = {mode.name: mode for mode in MODES}


@dataclass(frozen=True, slots=True)
class Layout:
    """Which workers there are. samplers: of a pool of their own; 0: those that learn sample too."""

    name: str
    mode: Mode
    learners: int
    samplers: int = 0

    @property
    def options(self) -> list[str]:
        """The options of a run."""
        changes = [f"trainer.n_gpus_per_node={self.learners}"]
        if self.samplers:
            changes += [
                "worker.hybrid_engine=false",
                "worker.rollout.nnodes=1",
                f"worker.rollout.n_gpus_per_node={self.samplers}",
                f"algorithm.max_staleness={self.mode.max_staleness}",
            ]
        return changes


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one worker", _MODES["colocated"], 1),
        Layout("two workers", _MODES["colocated"], 2),
        Layout("separate, k = 0", _MODES["separate, k = 0"], 1, 1),
        Layout("separate, k = 1", _MODES["separate, k = 1"], 1, 1),
    )
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The work of a run's step. lengths: of completions, at most the shape's response; None: all
    have the shape's.
    """

    name: str
    shape: Shape
    lengths: LongTail | None = None


def equal(prompts: int, response: int, n: int = SHORT.n) -> Setting:
    """Return steps whose completions all have one length."""
    shape = replace(SHORT, prompts=prompts, n=n, response=response)
    return Setting(f"{prompts} x {n}, {response} tokens", shape)


def long_tail(prompts: int, median: int, n: int = SHORT.n) -> Setting:
    """Return steps with lognormal lengths, about eight medians for the longest of a step."""
    lengths = LongTail.with_longest(median, ratio=8, of=prompts * n)
    shape = replace(SHORT, prompts=prompts, n=n, response=lengths.limit)
    return Setting(f"{prompts} x {n}, median of {median}, at most {lengths.limit}", shape, lengths)


FITTED = (equal(2, 32), equal(2, 128), equal(4, 64))
PREDICTED = (equal(3, 64), equal(2, 160), long_tail(4, 40))


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step. lengths: of each group's completions. seconds: of its phases, by name. idle:
    the idle seconds of separate pools, by "learners" and "samplers".
    """

    lengths: Sequence[tuple[int, ...]]
    seconds: Mapping[str, float]
    idle: Mapping[str, float] = field(default_factory=dict)

    @property
    def sampled_tokens(self) -> int:
        """Of all completions."""
        return sum(map(sum, self.lengths))

    @property
    def total(self) -> float:
        """The seconds of the step; the last one of a run also saves a checkpoint."""
        return self.seconds["step"] - self.seconds.get("save_checkpoint", 0.0)

    @property
    def samples_ahead(self) -> bool:
        """Whether the next batch is sampled meanwhile, and none in the step."""
        return "gen" not in self.seconds

    @property
    def sampling(self) -> float:
        """The seconds in which completions were sampled and scored."""
        return self.total - self.idle["samplers"] if self.idle else self.seconds["gen"] + self.seconds["reward"]

    @property
    def learning(self) -> float:
        """The seconds outside of sampling; of separate pools those in which no learner waited."""
        return self.total - (self.idle["learners"] if self.idle else self.sampling)

    @property
    def sync(self) -> float:
        """The seconds in which neither pool does anything else: of the weight sync and, where a
        batch is sampled ahead, of the parity probe that follows it.
        """
        weights, parity = (self.seconds.get(name, 0.0) for name in ("weights", "parity"))
        return weights + parity if self.samples_ahead else weights

    @property
    def rest(self) -> float:
        """The seconds outside of sampling, update and sync, and of waiting for a batch."""
        return self.total - self.sync - sum(self.seconds.get(name, 0.0) for name in ("gen", "update_actor", "wait"))


# -- real runs --


def command_options(layout: Layout, setting: Setting, folder: Path, steps: int) -> list[str]:
    """Return the options of a run."""
    return [
        *options(folder, setting.shape, steps),
        *layout.options,
        f"trainer.max_steps={steps + WARM_UP + 1}",
        f"worker.rollout.max_num_seqs={setting.shape.sequences}",
        "trainer.rollout_tokens=0",  # what they write is not simulated
    ]


def measure(layout: Layout, setting: Setting, *, steps: int, tiny: bool, overrides: Sequence[str] = ()) -> list[Step]:
    """Return the steps of a real run, with those that warm up, and without a last one, in which
    nothing is sampled ahead.

    overrides: further options, as on the command line.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, setting, steps=steps, tiny=tiny)
        options_of_run = [*command_options(layout, setting, folder, steps), *overrides]
        command = [sys.executable, "-m", "trigon", "train", *options_of_run]
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        if setting.lengths is not None:
            variables |= environment(folder / "plugin", setting.lengths)
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        return steps_of(folder / "trigon")[:-1]


def make_files(folder: Path, setting: Setting, *, steps: int, tiny: bool) -> None:
    """Write the model and the data of a run."""
    shape = setting.shape
    make_folder(folder / "model", vocabulary=VOCABULARY, shape=shape, tiny=tiny)
    make_data(folder / "data.parquet", model=folder / "model", shape=shape, rows=shape.prompts * (steps + WARM_UP + 2))


def steps_of(folder: Path) -> list[Step]:
    """Return the steps of a run folder."""
    run = open_run(folder)
    lengths: dict[int, dict[str, list[int]]] = {}
    for file, row in run.rollouts(splits=("train",)):
        lengths.setdefault(file.step, {}).setdefault(row.prompt_id, []).append(row.num_tokens)
    return [
        Step(
            lengths=tuple(map(tuple, lengths[each.step].values())),
            seconds={
                key.removeprefix("timing_s/"): value
                for key, value in each.metrics.items()
                if key.startswith("timing_s/")
            },
            idle={
                pool: each.metrics[f"perf/{pool}_idle_seconds"]
                for pool in ("learners", "samplers")
                if f"perf/{pool}_idle_seconds" in each.metrics
            },
        )
        for each in run.metrics()
        if each.step in lengths and "timing_s/step" in each.metrics
    ]


# -- the fit --


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, fitted: of a prompt's prefill; of a decoding step, fixed and for each sequence; of
    learning, fixed and for each token of the rows; of a weight sync; of the driver for each group.
    """

    prompt: float
    decode: Linear
    learn_fixed: float
    learn_token: float
    sync: float
    group: float


def fit(steps: Sequence[Step], *, prompt: int, workers: int) -> Times:
    """Return the times that explain steps best, in relative terms.

    steps: of several settings, without those that warm up. workers: that sample; groups are dealt
    to them in turn. Sampling ends when the last of them has ended.
    """
    work = [_work_of(step.lengths, workers) for step in steps]
    sampling = [step.sampling if step.samples_ahead else step.seconds["gen"] for step in steps]
    prefill, fixed, each = _least_squares(work, sampling)
    rows = [(1.0, float(prompt * len(step.lengths) + step.sampled_tokens)) for step in steps]
    learn_fixed, learn_token = _least_squares(rows, [step.seconds["update_actor"] for step in steps])
    groups = [(1.0, float(len(step.lengths))) for step in steps]
    rest_fixed, rest_group = _least_squares(groups, [step.rest for step in steps])
    return Times(
        prompt=prefill,
        decode=Linear(fixed, each),
        # The parity probe, most of what is fixed, is a forward pass of the trainer.
        learn_fixed=learn_fixed + rest_fixed,
        learn_token=learn_token,
        sync=statistics.fmean(step.sync for step in steps),
        group=rest_group,
    )


def _work_of(lengths: Sequence[tuple[int, ...]], workers: int) -> tuple[float, float, float]:
    """Return prompts, decoding steps and tokens of the worker that has most tokens."""
    parts = [lengths[worker::workers] for worker in range(min(workers, len(lengths)))]
    longest = max(parts, key=_tokens)
    return float(len(longest)), float(max(map(max, longest))), float(_tokens(longest))


def _tokens(groups: Sequence[tuple[int, ...]]) -> int:
    return sum(map(sum, groups))


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the coefficients, none of them negative, with the smallest relative errors."""
    chosen = list(range(len(rows[0])))
    scaled = numpy.array([[value / measured for value in row] for row, measured in zip(rows, seconds, strict=True)])
    while True:
        found = numpy.linalg.lstsq(scaled[:, chosen], numpy.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all() or len(chosen) == 1:
            break
        chosen.pop(int(found.argmin()))
    coefficients = [0.0] * len(rows[0])
    for index, value in zip(chosen, found, strict=True):
        coefficients[index] = max(0.0, float(value))
    return coefficients


# -- the comparison --


def predict(layout: Layout, setting: Setting, steps: Sequence[Step], times: Times) -> float:
    """Return the seconds of a step by the simulation, for the lengths that a run had."""
    shape = setting.shape
    hardware = Hardware(
        replicas=layout.samplers or layout.learners,
        sampling=SamplingTimes(times.decode, shape.sequences, times.prompt),
        learn_fixed=times.learn_fixed,
        learn_token=times.learn_token,
        sync_seconds=times.sync,
        group_seconds=times.group,
    )
    found = simulate(
        layout.mode,
        hardware,
        _lengths(steps),
        groups_per_step=shape.prompts,
        prompt=shape.prompt,
        steps=len(steps) - WARM_UP,
        warm_up=WARM_UP,
    )
    return found.step_seconds


def _lengths(steps: Sequence[Step]) -> Iterator[tuple[int, ...]]:
    """Yield those of all steps, and of the last one again and again."""
    yield from itertools.chain.from_iterable(step.lengths for step in steps)
    yield from itertools.cycle(steps[-1].lengths)


def measured_seconds(steps: Sequence[Step]) -> float:
    """Return the mean seconds of the steps after the warm-up."""
    return statistics.fmean(step.total for step in steps[WARM_UP:])


def compare(layouts: Sequence[Layout], *, steps: int, tiny: bool) -> str:
    """Return the fitted times, and predicted with measured steps."""
    fits: dict[str, Times] = {}
    rows, worst = [], 0.0
    notes = []
    for layout in layouts:
        refused = _refusal(layout)
        if refused is not None:
            notes.append(f"{layout.name}: skipped, since this version refuses it: {refused}")
            continue
        fitting = [measure(layout, setting, steps=steps, tiny=tiny) for setting in FITTED]
        counted = [step for run in fitting for step in run[WARM_UP:]]
        fits[layout.name] = fit(counted, prompt=SHORT.prompt, workers=layout.samplers or layout.learners)
        for setting in PREDICTED:
            run = measure(layout, setting, steps=steps, tiny=tiny)
            predicted, measured = predict(layout, setting, run, fits[layout.name]), measured_seconds(run)
            worst = max(worst, abs(predicted / measured - 1))
            lengths = [length for step in run[WARM_UP:] for group in step.lengths for length in group]
            rows.append(
                (
                    layout.name,
                    setting.name,
                    f"{max(lengths) / statistics.fmean(lengths):.1f}",
                    f"{measured:.2f}",
                    f"{predicted:.2f}",
                    f"{predicted / measured:.2f}",
                )
            )
            print(f"{layout.name}, {setting.name}: {measured:.2f} s, predicted {predicted:.2f}", file=sys.stderr)
    fitted = [
        (
            name,
            f"{1000 * times.prompt:.1f}",
            f"{1000 * times.decode.fixed:.2f}",
            f"{1000 * times.decode.per_sequence:.3f}",
            f"{times.learn_fixed:.2f}",
            f"{1000 * times.learn_token:.3f}",
            f"{times.sync:.2f}",
            f"{1000 * times.group:.1f}",
        )
        for name, times in fits.items()
    ]
    header = ("runs of", "prompt, ms", "decoding step, ms", "each sequence, ms", "update, s", "each token, ms")
    parts = [
        "Fitted to runs of " + "; ".join(setting.name for setting in FITTED) + ":",
        table(fitted, (*header, "weight sync, s", "driver, ms a group")),
        "Predicted:",
        table(rows, ("workers", "a step", "longest / mean", "measured, s", "predicted, s", "predicted / measured")),
        *notes,
        machine(),
    ]
    if rows:
        verdict = "within" if worst <= WITHIN else "not within"
        parts.append(f"Largest deviation of a prediction: {worst:.0%}, {verdict} {WITHIN:.0%}")
    return "\n\n".join(parts)


def _refusal(layout: Layout) -> str | None:
    """Return why the configuration refuses a layout, or None."""
    with tempfile.TemporaryDirectory() as name:
        make_files(Path(name), FITTED[0], steps=1, tiny=True)
        try:
            load_config(None, command_options(layout, FITTED[0], Path(name), 1))
        except ConfigError as error:
            return " ".join(str(error).split())
    return None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS), help="which to compare (all)")
    parser.add_argument("--steps", type=int, default=6, help="of each run that count (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the tiny model")
    arguments = parser.parse_args()
    print(compare([LAYOUTS[name] for name in arguments.layouts], steps=arguments.steps, tiny=arguments.tiny))


if __name__ == "__main__":
    main()
