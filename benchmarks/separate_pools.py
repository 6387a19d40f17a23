"""Steps a second of one worker that learns beside one that samples, and of two that do both.

    python benchmarks/separate_pools.py [--steps 8] [--repeats 2] [--prompts 8] [--mean 48] [--tiny]

Twice: with lengths that have a long tail (geometric, cut at eight times their median), and with
equal ones of the same mean. The runs of both layouts alternate. The time of a phase of separate
workers is that in which its pool was busy. The model of 40 M parameters of the other benchmarks
(--tiny: the tiny model), float32, one thread a worker. Needs two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

from cluster_runs import LAYOUTS, Setting, Step, measure
from shared import SHORT, Figure, figures_table, machine, table

COLOCATED, SEPARATE = LAYOUTS["two workers"], LAYOUTS["separate, k = 1"]
TAIL = 8
"""The longest completion, in medians."""

WARM_UP = 2
"""Steps that do not count: one that warms up, and one in which nothing is sampled ahead yet."""


def settings(prompts: int, mean: int) -> tuple[Setting, Setting]:
    """Return the work of a step with a long tail, and with equal lengths."""
    median = round(mean * 0.693)  # of a geometric distribution
    tail = replace(SHORT, prompts=prompts, response=TAIL * median)
    equal = replace(SHORT, prompts=prompts, response=mean)
    return Setting("long tail", tail, mean), Setting("equal lengths", equal)


def describe(steps: list[Step]) -> tuple[float, float, float, float]:
    """Return the seconds of a step, and of its sampling and learning; and the longest completion in
    medians.
    """
    counted = steps[WARM_UP:]
    lengths = [length for step in counted for group in step.lengths for length in group]
    tail = statistics.fmean(max(max(group) for group in step.lengths) for step in counted) / statistics.median(lengths)
    return (
        statistics.fmean(step.total for step in counted),
        statistics.fmean(step.sampling for step in counted),
        statistics.fmean(step.learning for step in counted),
        tail,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="of each run that count (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each layout (%(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help=f"of a step, with {SHORT.n} completions each")
    parser.add_argument("--mean", type=int, default=48, help="tokens of a completion (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the tiny model")
    chosen = parser.parse_args()
    rows, figures = [], []
    for setting in settings(chosen.prompts, chosen.mean):
        runs: dict[str, list[tuple[float, float, float, float]]] = {}
        for _ in range(chosen.repeats):
            for layout in (COLOCATED, SEPARATE):
                steps = measure(layout, setting, steps=chosen.steps + WARM_UP, tiny=chosen.tiny)
                runs.setdefault(layout.name, []).append(describe(steps))
        means = {name: [statistics.fmean(each) for each in zip(*found, strict=True)] for name, found in runs.items()}
        rows += [
            (setting.name, name, *(f"{value:.2f}" for value in found[:3]), f"{found[3]:.1f}")
            for name, found in means.items()
        ]
        step, *phases, _ = means[SEPARATE.name]
        ratio = means[COLOCATED.name][0] / step
        figures.append(Figure(18, f"steps a second, separate / colocated, {setting.name}", ratio, "x"))
        figures.append(Figure(18, f"step / its longer phase, separate, {setting.name}", step / max(phases), "x"))
    print(table(rows, ("lengths", "workers", "step, s", "sampling, s", "learning, s", "longest / median")))
    print()
    print(figures_table(figures))
    print(machine())


if __name__ == "__main__":
    main()
