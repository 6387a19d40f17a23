"""`trigon check RUN.yaml [key=value ...] [--json]`: finds what would go wrong, before a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trigon.errors import ConfigError
from trigon.tools.cli.parser import ArgumentParser

EXIT_WOULD_FAIL = 1
"""Exit status if the run would fail, or be wasted."""


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main."""
    parser = ArgumentParser(
        prog="trigon check",
        description="Check a run before it is started: configuration, machine, model files, every row with its "
        "images, and the reward function. No weights are loaded. Exit status 1 if the run would fail.",
        epilog="All checks, with their thresholds: docs/check.md",
        examples=[
            ("trigon check run.yaml", "all checks"),
            ("trigon check run.yaml data.max_pixels=802816", "with another option"),
            ("trigon check run.yaml --json", "for programs"),
        ],
    )
    parser.add_argument("arguments", nargs="*", metavar="RUN.yaml key=value", help="as for trigon train")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")
    chosen = parser.parse_args(arguments)
    # Imported here, so that the help and errors of the command line do not wait for them.
    from trigon.config.load import split_arguments

    if not chosen.arguments:
        parser.error("no run is given; write trigon check RUN.yaml, or key=value")
    try:
        path, overrides = split_arguments(chosen.arguments)
    except ConfigError as error:
        parser.error(str(error))
    if path is not None and not path.is_file():
        parser.error(f"there is no file {path}")
    from trigon.data.images import ignore_pillow_warnings
    from trigon.report.console import Console
    from trigon.tools.check.result import as_json, console_lines, count_statuses
    from trigon.tools.check.run import check_run

    ignore_pillow_warnings()
    console = Console(stream=sys.stderr)
    report = check_run(
        path,
        overrides,
        has_cluster=bool(os.environ.get("RAY_ADDRESS")),
        progress=console.progress,
        on_result=None if chosen.json else lambda result: print(console_lines(result), flush=True),
    )
    verdict = "the run would fail" if report.would_fail else "the run can start"
    print(as_json(report) if chosen.json else f"\n{count_statuses(report)}: {verdict}\n", end="")
    return EXIT_WOULD_FAIL if report.would_fail else 0
