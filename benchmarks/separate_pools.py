"""Steps a second of one worker that learns beside one that samples, and of two that do both.

    python benchmarks/separate_pools.py [key=value] [--prompts 2] [--completions 8] [--median 96]

Twice: with lengths that have a long tail (lognormal, the longest of a step about eight medians),
and with equal ones of the same mean. Both layouts sample the same lengths, and their runs
alternate. The time of a phase of separate workers is that in which its pool was busy. The tiny
model (--large: that of 40 M parameters of the other benchmarks), float32, one thread a worker, no
per-token records, and so many passes over a batch that sampling and learning take about as long.
Needs two cores that do nothing else; four minutes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from cluster_runs import LAYOUTS, WARM_UP, Step, equal, long_tail, measure
from shared import SHORT, Figure, figures_table, machine, table

COLOCATED, SEPARATE = LAYOUTS["two workers"], LAYOUTS["separate, k = 1"]

PASSES = "worker.actor.ppo_epochs=3"


class Described(NamedTuple):
    """Means over the steps of a run. Seconds, of a step, its sampling, its learning, and the longer
    of both in each step; the longest completion of a step in medians of all.
    """

    step: float
    sampling: float
    learning: float
    longer_phase: float
    longest: float


def describe(steps: Sequence[Step]) -> Described:
    """Return the means over the steps that count."""
    counted = steps[WARM_UP:]
    lengths = [length for step in counted for group in step.lengths for length in group]
    return Described(
        statistics.fmean(step.total for step in counted),
        statistics.fmean(step.sampling for step in counted),
        statistics.fmean(step.learning for step in counted),
        statistics.fmean(max(step.sampling, step.learning) for step in counted),
        statistics.fmean(max(max(group) for group in step.lengths) for step in counted) / statistics.median(lengths),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="of each run that count (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each layout (%(default)s)")
    parser.add_argument("--prompts", type=int, default=2, help="of a step (%(default)s)")
    parser.add_argument("--completions", type=int, default=SHORT.n, help="of a prompt (%(default)s)")
    parser.add_argument("--median", type=int, default=96, help="tokens of a completion (%(default)s)")
    parser.add_argument("--lengths", nargs="+", choices=("tail", "equal"), default=["tail", "equal"], help="(both)")
    parser.add_argument("--large", action="store_true", help="the model of 40 M parameters")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of all runs")
    chosen = parser.parse_intermixed_args()
    tail = long_tail(chosen.prompts, chosen.median, chosen.completions)
    assert tail.lengths is not None
    settings = {"tail": tail, "equal": equal(chosen.prompts, round(tail.lengths.mean), chosen.completions)}
    rows, figures = [], []
    for setting in (settings[name] for name in chosen.lengths):
        runs: dict[str, list[Described]] = {}
        for _ in range(chosen.repeats):
            for layout in (COLOCATED, SEPARATE):
                overrides = [PASSES, *chosen.overrides]
                steps = measure(layout, setting, steps=chosen.steps, tiny=not chosen.large, overrides=overrides)
                runs.setdefault(layout.name, []).append(describe(steps))
        means = {name: Described(*map(statistics.fmean, zip(*found, strict=True))) for name, found in runs.items()}
        rows += [
            (setting.name, name, *(f"{value:.2f}" for value in found[:3]), f"{found.longest:.1f}")
            for name, found in means.items()
        ]
        separate = means[SEPARATE.name]
        ratio = means[COLOCATED.name].step / separate.step
        figures.append(Figure(18, f"steps a second, separate / colocated, {setting.name}", ratio, "x"))
        longer = separate.step / separate.longer_phase
        figures.append(Figure(18, f"step / its longer phase, separate, {setting.name}", longer, "x"))
    print(table(rows, ("lengths", "workers", "step, s", "sampling, s", "learning, s", "longest / median")))
    print()
    print(figures_table(figures))
    print(machine())


if __name__ == "__main__":
    main()
