"""Runs all benchmarks and prints one table: `make bench`, 15 to 22 minutes on two idle cores.

    python benchmarks/bench.py [--bars 1 3 5] [--plot docs/scale.svg]

Prints the tables of each benchmark as it finishes, and at the end every figure with its target and
whether it passes. Ratios are measured within one run, both sides in turn. Other trainers are
installed into separate environments (peers.py) when they are first needed, which takes extra time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from shared import Figure, figures_table, machine

Bar = Callable[[argparse.Namespace], tuple[list[Figure], str]]


def update(_: argparse.Namespace) -> tuple[list[Figure], str]:
    import update

    return update.measure(repeats=1)


def whole_step(_: argparse.Namespace) -> tuple[list[Figure], str]:
    import whole_step

    return whole_step.measure(steps=1)


def logprobs(_: argparse.Namespace) -> tuple[list[Figure], str]:
    import logprobs

    return logprobs.measure(repeats=1), ""


def start(_: argparse.Namespace) -> tuple[list[Figure], str]:
    import start

    return start.measure(), ""


def scale(arguments: argparse.Namespace) -> tuple[list[Figure], str]:
    import scale

    return scale.measure(plot=arguments.plot)


def episodes(_: argparse.Namespace) -> tuple[list[Figure], str]:
    import episodes

    return episodes.measure(repeats=1)


def linear_attention(_: argparse.Namespace) -> tuple[list[Figure], str]:
    import linear_attention

    return linear_attention.measure(repeats=1)


BARS: dict[str, Bar] = {
    "1": update,
    "2": whole_step,
    "3": logprobs,
    "5": start,
    "6": scale,
    "7": episodes,
    "8": linear_attention,
}
"""Benchmarks by the number of the target (bar) they measure; whole_step measures bar 4 too."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bars", nargs="*", choices=BARS, default=list(BARS), help="which to measure (all)")
    parser.add_argument("--plot", type=Path, help="draw the cost of a step into this file")
    arguments = parser.parse_args()
    # One thread for both sides of a ratio and all their processes. Read when torch is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    began = time.perf_counter()
    figures: list[Figure] = []
    for bar in arguments.bars:
        start = time.perf_counter()
        # Each in a separate process, so that no benchmark affects the memory of another.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found, tables = process.submit(BARS[bar], arguments).result()
        figures += found
        if tables:
            print(f"{tables}\n", flush=True)
        print(f"{figures_table(found)}\n\n(bar {bar}: {time.perf_counter() - start:.0f} s)\n", flush=True)
    print(f"{machine()}; {(time.perf_counter() - began) / 60:.0f} minutes\n")
    print(figures_table(sorted(figures, key=lambda figure: figure.bar)))


if __name__ == "__main__":
    main()
