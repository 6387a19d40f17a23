"""`trigon doctor [--gpu]`: checks this machine, and writes a report for a bug report."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from trigon import __version__
from trigon.cli.parser import ArgumentParser
from trigon.doctor.catalogue import CHECKS, ENVIRONMENT, choose
from trigon.doctor.report import as_json, console_lines, markdown, summary
from trigon.doctor.result import Result, Setting
from trigon.doctor.runner import Limits, run_check, run_checks

MINUTES = 10.0
ENVIRONMENT_SECONDS = 90.0


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status: 1 if a check failed. Raises TrigonError."""
    options = make_parser().parse_args(arguments)
    if options.list:
        width = max(len(check.name) for check in CHECKS)
        print("\n".join(f"{check.name:<{width}}  {check.title}" for check in CHECKS))
        return 0
    chosen = choose(options.only) if options.gpu or options.only else [ENVIRONMENT]
    folder: Path = options.folder
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    heading = f"trigon {__version__}: {' '.join(['trigon doctor', *arguments])}"
    width = max(len(check.name) for check in (ENVIRONMENT, *chosen))
    results: list[Result] = []
    start = time.monotonic()

    def show(result: Result) -> None:
        results.append(result)
        print(console_lines(result, width=width), flush=True)
        titles = {check.name: check.title for check in CHECKS}
        seconds = time.monotonic() - start
        # After each check, so that the report is there even if this process is ended.
        (folder / "report.md").write_text(markdown(results, titles, heading=heading, seconds=seconds), encoding="utf-8")
        (folder / "report.json").write_text(
            as_json(results, titles, heading=heading, seconds=seconds), encoding="utf-8"
        )

    environment = {**os.environ, **CHILD_ENVIRONMENT}
    # Always first: the others depend on what it finds, and a bug report needs the versions.
    unknown = Setting(device="cpu", num_gpus=0, folder=work.absolute(), tolerance_factor=options.tolerance_factor)
    found = run_check(ENVIRONMENT, unknown, ENVIRONMENT_SECONDS, environment=environment)
    show(found)
    num_gpus = int(found.findings.figures.get("GPUs", "0"))
    others = [check for check in chosen if check is not ENVIRONMENT]
    if others:
        setting = Setting(
            device="cuda" if num_gpus else "cpu",
            num_gpus=num_gpus,
            folder=work.absolute(),
            tolerance_factor=options.tolerance_factor,
        )
        if not num_gpus:
            print("no GPU: the checks run in small shapes on the CPU, which shows only that they run", flush=True)
        limits = Limits(options.limit, options.minutes * 60 - (time.monotonic() - start) if options.minutes else None)
        for result in run_checks(others, setting, limits, environment=environment):
            show(result)
    print(f"\n{summary(results, time.monotonic() - start)}")
    print(f"report: {folder / 'report.md'} (paste it into a bug report), {folder / 'report.json'}")
    if not options.keep:
        shutil.rmtree(work)
    return int(any(result.status == "fail" for result in results))


CHILD_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # everything is made here
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",  # the last lines before a crash are in the report
}


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = ArgumentParser(
        prog="trigon doctor",
        description="Check versions, memory and disk of this machine; with --gpu also kernels, training, vLLM, memory "
        "and speed, on the GPUs or, in small shapes, on the CPU. Exit status 1 if a check fails.",
    )
    parser.add_argument("--gpu", action="store_true", help="run all checks, in less than ten minutes on a GPU")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this check; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the checks, and exit")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/doctor"), help="folder of report.md and report.json (%(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="keep models, runs and outputs in the folder's work/")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="skip what would start later; 0: no limit (%(default)s)"
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="time limit of each check; default: its own")
    parser.add_argument(
        "--tolerance-factor", type=float, default=1.0, metavar="X", help="multiply all tolerances (%(default)s)"
    )
    return parser
