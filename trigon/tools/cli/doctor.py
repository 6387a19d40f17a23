"""`trigon doctor [--gpu]`: checks this machine, and writes a report for a bug report."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trigon import __version__
from trigon.tools.cli.parser import ArgumentParser
from trigon.tools.doctor.catalogue import CHECKS, ENVIRONMENT, choose
from trigon.tools.doctor.report import as_json, console_lines, markdown, summary
from trigon.tools.doctor.result import Result, Setting
from trigon.tools.doctor.runner import Check, Limits, run_check, run_checks

MINUTES = 10.0
"""Default of --minutes on a GPU."""
EXIT_TERMINATED = 143
"""Exit status after SIGTERM."""

CHILD_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # everything is made here
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",  # the last lines before a crash are in the report
}


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status: 1 if a check failed. Raises TrigonError."""
    options = make_parser().parse_args(arguments)
    if options.list:
        width = max(len(check.name) for check in CHECKS)
        print("\n".join(f"{check.name:<{width}}  {check.title}" for check in CHECKS))
        return 0
    chosen = choose(options.only) if options.gpu or options.only else [ENVIRONMENT]
    options.folder.mkdir(parents=True, exist_ok=True)
    heading = f"trigon {__version__}: {' '.join(['trigon doctor', *arguments])}"
    titles = {check.name: check.title for check in CHECKS}
    width = max(len(check.name) for check in (ENVIRONMENT, *chosen))
    work = options.folder.absolute() / "work"
    results: list[Result] = []
    start = time.monotonic()
    with ending_on_sigterm():
        for result in run(chosen, work, options):
            results.append(result)
            print(console_lines(result, width=width), flush=True)
            seconds = time.monotonic() - start
            # After each check, so that the report is there even if this process is ended.
            for name, text_of in (("report.md", markdown), ("report.json", as_json)):
                text = text_of(results, titles, heading=heading, seconds=seconds)
                (options.folder / name).write_text(text, encoding="utf-8")
    print(f"\n{summary(results, time.monotonic() - start)}")
    print(f"report: {options.folder / 'report.md'} (paste it into a bug report), {options.folder / 'report.json'}")
    if not options.keep:
        shutil.rmtree(work)
    return int(any(result.status == "fail" for result in results))


def run(chosen: Sequence[Check], work: Path, options: Namespace) -> Iterator[Result]:
    """Run the checks, that of the environment first, and yield their results.

    The others depend on what it finds, and a bug report needs the versions.
    Args: work: the folder of the checks' files.
    """
    work.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    environment = {**os.environ, **CHILD_ENVIRONMENT}
    setting = Setting(device="cpu", num_gpus=0, folder=work, tolerance_factor=options.tolerance_factor)
    found = run_check(ENVIRONMENT, setting, ENVIRONMENT.seconds, environment=environment)
    yield found
    others = [check for check in chosen if check is not ENVIRONMENT]
    num_gpus = int(found.findings.figures.get("GPUs", "0"))
    if num_gpus:
        setting = Setting("cuda", num_gpus, work, options.tolerance_factor)
    elif others:
        print("no GPU: the checks run in small shapes on the CPU, which shows only that they run", flush=True)
    minutes = (MINUTES if num_gpus else 0) if options.minutes is None else options.minutes
    seconds = minutes * 60 - (time.monotonic() - start) if minutes else None
    yield from run_checks(others, setting, Limits(options.limit, seconds), environment=environment)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception within the context, so that a check's processes end too."""

    def end(number: int, frame: object) -> None:
        sys.exit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = ArgumentParser(
        prog="trigon doctor",
        description="Check versions, memory and disk of this machine; with --gpu also kernels, training, vLLM, memory "
        "and speed, on the GPUs or, in small shapes, on the CPU. Exit status 1 if a check fails.",
        examples=[
            ("trigon doctor", "versions, memory and disk of this machine"),
            ("trigon doctor --gpu", "everything, in less than ten minutes on a GPU"),
            ("trigon doctor --only parity", "one check; --list names them"),
        ],
    )
    parser.add_argument("--gpu", action="store_true", help="run all checks, in less than ten minutes on a GPU")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this check; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the checks, and exit")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/doctor"), help="folder of report.md and report.json (%(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="keep models, runs and outputs in the folder's work/")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"skip what would start or end later; 0: no limit; default: {MINUTES:g} on a GPU, 0 on a CPU",
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="time limit of each check; default: its own")
    parser.add_argument(
        "--tolerance-factor", type=float, default=1.0, metavar="X", help="multiply all tolerances (%(default)s)"
    )
    return parser
