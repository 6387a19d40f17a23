"""What a run learns whose batches are sampled with older weights.

    python benchmarks/staleness.py [key=value ...] --seeds 0 1 2 3 [--plot FILE.svg]

The quickstart with k = 0 (one worker that samples and learns), with k = 1 and with k = 4 and
partial=continue (one learner and one sampler), from the same model and data for each seed. Prints
the reward of the last steps and the validation accuracy after the last one, with the standard
deviation over seeds, and the ages of tokens. The numbers of k = 4 depend on time, and differ from
run to run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import chain
from pathlib import Path

from learning import LAST_STEPS, mean_and_spread, plot, train_variants, values_of
from shared import machine, table

POOLS = ("worker.hybrid_engine=false", "worker.rollout.nnodes=1", "worker.rollout.n_gpus_per_node=1")
VARIANTS = {
    "k = 0": (),
    "k = 1": (*POOLS, "algorithm.max_staleness=1"),
    "k = 4, continue": (*POOLS, "algorithm.max_staleness=4", "worker.rollout.partial=continue"),
}


def learned_table(runs: dict[str, list[Path]]) -> str:
    """Return what each variant has learned, as a table."""
    rows = []
    for name, folders in runs.items():
        rewards = [statistics.fmean(values_of(folder, "reward/overall")[-LAST_STEPS:]) for folder in folders]
        accuracy = [values_of(folder, "val/accuracy_reward")[-1] for folder in folders]
        mean, largest = (
            [*chain.from_iterable(values_of(folder, f"staleness/{key}") for folder in folders)]
            for key in ("mean", "max")
        )
        rows.append(
            (
                name,
                *mean_and_spread(rewards),
                *mean_and_spread(accuracy),
                f"{statistics.fmean(mean or [0]):.2f}",
                f"{max(largest, default=0):.0f}",
            )
        )
    header = ("", f"reward, last {LAST_STEPS} steps", "std", "validation accuracy", "std", "mean age", "max age")
    return table(rows, header)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(%(default)s)")
    parser.add_argument("--folder", type=Path, help="of all runs; default: a temporary one")
    parser.add_argument("--plot", type=Path, help="a figure (.png, .svg) or its numbers (.csv)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="default: all")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of all runs")
    chosen = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="staleness-") as temporary:
        runs = train_variants(
            chosen.folder or Path(temporary),
            chosen.seeds,
            chosen.variants,
            lambda variant, *_: [*VARIANTS[variant], *chosen.overrides],
        )
        print(learned_table(runs))
        print(machine())
        if chosen.plot is not None:
            plot(runs, chosen.plot, "reward/overall", "val/accuracy_reward")


if __name__ == "__main__":
    main()
