"""Plot the accuracy of several runs: python scripts/plot_curves.py OUTPUT.svg RUN_FOLDER ...

Reads metrics.jsonl of each run folder. Thin lines are the accuracy of each step's training
completions, dots are validations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

CHANCE = 1 / 6


def read_metric(folder: Path, key: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a metric, and its values."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    pairs = [(line["step"], line["metrics"][key]) for line in lines if key in line["metrics"]]
    return [step for step, _ in pairs], [value for _, value in pairs]


def main(output: str, folders: list[str]) -> None:
    """Plot each run in its own colour, and print the validation accuracies."""
    matplotlib.rcParams["svg.hashsalt"] = "trigon"  # the same runs give an identical file
    figure, axes = plt.subplots(figsize=(8, 4.2))
    for number, folder in enumerate(folders):
        steps, accuracy = read_metric(Path(folder), "reward/accuracy")
        [line] = axes.plot(steps, accuracy, linewidth=0.8, alpha=0.5)
        steps, accuracy = read_metric(Path(folder), "val/accuracy_reward")
        axes.plot(steps, accuracy, "o-", color=line.get_color(), label=f"seed {number}")
        print(f"{folder}: validation accuracy " + ", ".join(f"{value:.3f}" for value in accuracy))
    axes.axhline(CHANCE, color="grey", linestyle=":", label="chance")
    axes.set(xlabel="training step", ylabel="accuracy", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
