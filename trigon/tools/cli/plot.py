"""`trigon plot RUN [RUN ...]`: draws learning curves, or writes their numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path

from trigon.system.terminal import sanitize
from trigon.tools.cli.parser import ArgumentParser, count, writing

DEFAULT_OUTPUT = Path("curves.png")
ENDINGS = (".png", ".svg", ".pdf", ".csv")


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status. Raises TrigonError."""
    options = make_parser().parse_args(arguments)
    # Imported here: they load pydantic, which a help page does not need.
    from trigon.report.run import open_run
    from trigon.tools.plot.curves import as_csv, learning_curves
    from trigon.tools.plot.figure import Reference, check_installed, save_plot

    outputs: list[Path] = options.output or [DEFAULT_OUTPUT]
    if any(path.suffix.lower() != ".csv" for path in outputs):
        check_installed()
    curves = learning_curves(
        [open_run(path) for path in options.runs],
        metrics=[metric for metrics in options.metric or () for metric in metrics],
        x=options.x,
        smooth=options.smooth,
        group_by=options.group_by,
        band=options.band,
    )
    references = [Reference(value, label) for value, label in options.reference or ()]
    for path in outputs:
        if path.suffix.lower() == ".csv":
            with writing(path, "the numbers"):
                path.write_text(as_csv(curves), encoding="utf-8")
        else:
            save_plot(curves, path, title=options.title, references=references)
    for curve in curves.curves:
        runs = f" of {curve.num_runs} runs" if curve.num_runs > 1 else ""
        line = f"{curve.label}: {curve.metric} {curve.mean[0]:.4g} -> {curve.mean[-1]:.4g}"
        if curve.num_runs > 1 and isfinite(curve.low[-1]):
            line += f" ({curve.low[-1]:.4g} to {curve.high[-1]:.4g})"
        print(sanitize(line + runs, max_characters=1000))
    for note in curves.notes:
        print(sanitize(f"note: {note}", max_characters=1000))
    print(f"written: {', '.join(map(str, outputs))}")
    return 0


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = ArgumentParser(
        prog="trigon plot",
        description="Draw learning curves of runs. Runs that differ in their seeds only become one line with a band; "
        "the others are labelled with the options in which they differ.",
        examples=[
            ("trigon plot runs/quickstart -o curves.png", "one run"),
            ("trigon plot runs/seed* -o curves.svg -o curves.csv --band ci95", "seeds; the numbers too"),
            ("trigon plot runs/* --group-by adv_estimator --metric reward/overall", "by an option"),
        ],
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        type=_output,
        metavar="FILE",
        help="a figure (.png, .svg, .pdf) or its numbers (.csv); may be repeated; default: curves.png",
    )
    parser.add_argument(
        "--metric",
        action="append",
        nargs="+",
        metavar="KEY",
        help="metrics, one panel each; default: accuracy of validations (or their reward), and reward/overall",
    )
    parser.add_argument(
        "--x", choices=["step", "tokens", "hours"], default="step", help="what the horizontal axis is (%(default)s)"
    )
    parser.add_argument(
        "--smooth",
        type=count,
        default=1,
        metavar="K",
        help="moving mean over K steps of the metrics of training; validations stay as they are (%(default)s)",
    )
    parser.add_argument(
        "--group-by",
        default="seed",
        metavar="seed|none|OPTION",
        help="which runs share a line: those that differ in seeds only, none, or those with the same value of an "
        "option (%(default)s)",
    )
    parser.add_argument(
        "--band",
        choices=["std", "minmax", "ci95"],
        default="std",
        help="band around the mean: one standard deviation, minimum to maximum, or the 95 %% confidence interval of "
        "the mean by Student's t (%(default)s)",
    )
    parser.add_argument(
        "--reference",
        action="append",
        type=_reference,
        metavar="VALUE:LABEL",
        help="a horizontal line in the first panel, such as 0.25:chance; may be repeated",
    )
    parser.add_argument("--title", help="title of the figure")
    return parser


def _output(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in ENDINGS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in one of {', '.join(ENDINGS)}")
    return path


def _reference(text: str) -> tuple[float, str]:
    value, _, label = text.partition(":")
    try:
        height = float(value)
    except ValueError:
        height = nan
    if not isfinite(height):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, or a number and a label: 0.25:chance")
    return height, label or value
