"""Draws learning curves with matplotlib, an optional package: one panel per metric.

The only module that imports matplotlib. It uses no display, and the same numbers give an identical
file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trigon.errors import ConfigError
from trigon.system.installation import install_command
from trigon.tools.cli.parser import writing
from trigon.tools.plot.curves import BAND_MEANING, Curve, LearningCurves, is_validation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METADATA: Mapping[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""The endings of figures, and what is left out of their files so that they are identical."""

# Okabe and Ito's palette, which is distinct with all common kinds of colour blindness; without its
# yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")

TITLES = {
    "val/accuracy_reward": "validation accuracy",
    "val/reward_score": "validation reward",
    "reward/overall": "training reward",
    "reward/accuracy": "training accuracy",
    "response_length/mean": "completion length (tokens)",
    "actor/entropy": "entropy (nats)",
    "actor/kl_loss": "KL from the reference (nats)",
    "actor/grad_norm": "gradient norm",
    "actor/lr": "learning rate",
}
"""Titles of panels; other metrics have their keys."""

X_LABELS = {
    "step": "training step",
    "tokens": "tokens, prompts included",
    "hours": "hours",
}

PANEL_WIDTH, PANEL_HEIGHT = 4.4, 3.1  # inches
MAX_COLUMNS = 3
DPI = 200
SHARE_MARGIN = 0.02

_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so that all machines draw the same
    "font.size": 9,
    "text.parse_math": False,  # names of runs and metrics may have dollar signs
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "ytick.left": False,
    "axes.labelcolor": "#333333",
    "legend.fontsize": 8.5,
    "pdf.fonttype": 42,  # TrueType, which journals ask for; 3 has bitmaps in some viewers
    "svg.fonttype": "path",  # the same look where the font is not installed
    "svg.hashsalt": "trigon",
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A horizontal line in the first panel, such as the accuracy of a guess."""

    value: float
    label: str


def save_plot(
    curves: LearningCurves, path: Path, *, title: str | None = None, references: Sequence[Reference] = ()
) -> None:
    """Write the figure in the format of the ending of path, which is one of METADATA.

    Raises: ConfigError if matplotlib is not installed, or if the file cannot be written.
    """
    ending = path.suffix.lower()
    check_installed()
    from matplotlib import rc_context

    with rc_context(_STYLE):
        figure = _draw(curves, title, references)
        with writing(path, "the figure"):
            figure.savefig(path, format=ending.removeprefix("."), dpi=DPI, metadata=METADATA[ending])


def check_installed() -> None:
    """Raise ConfigError if matplotlib cannot be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"figures need the package matplotlib, which cannot be imported ({error}); run {install_command('plot')}, "
            "or write the numbers to a file that ends in .csv"
        ) from error


def _draw(curves: LearningCurves, title: str | None, references: Sequence[Reference]) -> Figure:
    from matplotlib.figure import Figure

    num_panels = len(curves.metrics)
    num_columns = 2 if num_panels == 4 else min(num_panels, MAX_COLUMNS)
    num_rows = -(-num_panels // num_columns)
    labels = list(dict.fromkeys(curve.label for curve in curves.curves))
    # A legend stands right of the panels; one group alone needs none.
    width = num_columns * PANEL_WIDTH + (0.5 + 0.075 * max(map(len, labels)) if len(labels) > 1 else 0.0)
    figure = Figure(figsize=(width, num_rows * PANEL_HEIGHT + 0.35), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number >= num_panels:
            axes.set_visible(False)
            continue
        metric = curves.metrics[number]
        _draw_panel(axes, curves, metric, labels, references if number == 0 else ())
        if number + num_columns >= num_panels:
            axes.set_xlabel(X_LABELS[curves.x])
    if len(labels) > 1:
        lines = {line.get_label(): line for axes in grid.flat for line in axes.lines}
        figure.legend([lines[label] for label in labels], labels, loc="outside right upper", frameon=False)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    caption = textwrap.fill(describe(curves), max(40, int(width * 14)))
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=7.5, color="#666666")
    return figure


def describe(curves: LearningCurves) -> str:
    """Return what lines and bands are, for the caption of a figure."""
    sizes = sorted({curve.num_runs for curve in curves.curves})
    parts: list[str] = []
    if sizes[-1] > 1:
        number = str(sizes[-1]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        parts.append(f"Line: mean of {number} runs. Band: {BAND_MEANING[curves.band]}.")
    if curves.smooth > 1 and not all(map(is_validation, curves.metrics)):
        parts.append(f"Training metrics: moving mean of {curves.smooth} steps.")
    return " ".join([*parts, *(f"{note}." for note in curves.notes)])


def _draw_panel(
    axes: Axes, curves: LearningCurves, metric: str, labels: Sequence[str], references: Sequence[Reference]
) -> None:
    axes.set_title(TITLES.get(metric, metric))
    axes.margins(x=0.01)
    drawn = [curve for curve in curves.curves if curve.metric == metric]
    for curve in drawn:
        number = labels.index(curve.label)
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        marker = "o" if is_validation(metric) and len(curve.x) <= 40 else None
        style: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": marker, "label": curve.label}
        axes.plot(curve.x, curve.mean, linewidth=1.6, markersize=3.5, **style)
        if curve.num_runs > 1:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    if _is_share(metric, drawn):
        axes.set_ylim(-SHARE_MARGIN, 1 + SHARE_MARGIN)
    for reference in references:
        axes.axhline(reference.value, color="#888888", linestyle=(0, (1, 2)), linewidth=1)
        axes.annotate(
            reference.label, (0, reference.value), xycoords=("axes fraction", "data"), xytext=(3, 2),
            textcoords="offset points", color="#666666", fontsize=8,
        )  # fmt: skip
    if curves.x == "tokens":
        from matplotlib.ticker import EngFormatter

        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _is_share(metric: str, curves: Sequence[Curve]) -> bool:
    """Return whether a metric is a share whose values are shown from 0 to 1."""
    if not any(word in metric for word in ("accuracy", "fraction", "share", "format")):
        return False
    return all(0 <= mean <= 1 for curve in curves for mean in curve.mean if isfinite(mean))
