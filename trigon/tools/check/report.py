"""Results of checks as text: lines for the console, and JSON for programs. Pure."""

from __future__ import annotations

import dataclasses
import json
import textwrap

from trigon.system.terminal import sanitize
from trigon.tools.check.result import CheckReport, Problem, Result

_SHOWN = {"pass": "pass", "warning": "warning", "fail": "FAIL", "skipped": "skipped"}
_MAX_CHARACTERS = 20_000
_WIDTH = 110
_NAME_WIDTH = 14


def console_lines(result: Result) -> str:
    """Return one result as text: a line, its problems with what to do, and its tables."""
    indent = " " * (10 + _NAME_WIDTH)
    head = f"{_SHOWN[result.status]:<8}  {result.name:<{_NAME_WIDTH}}"
    first, *rest = _details(result) or [result.title]
    lines = [f"{head}{first}", *(f"{indent}{line}" for line in rest)]
    lines += [f"{indent}| {line}" for line in result.findings.text.splitlines()]
    return sanitize("\n".join(lines), max_characters=_MAX_CHARACTERS)


def _details(result: Result) -> list[str]:
    if result.reason:
        return _wrap(result.reason)
    lines: list[str] = []
    for problem in result.findings.problems:
        mark = "" if len(result.findings.problems) == 1 else "FAIL: " if problem.is_fatal else "warning: "
        lines += _problem_lines(problem, mark)
    return lines or _wrap(result.findings.summary)


def _problem_lines(problem: Problem, mark: str) -> list[str]:
    first, *rest = problem.message.splitlines() or [""]
    lines = [*_wrap(f"{mark}{first}"), *(f"  {line}" for line in rest)]
    lines += [line for example in problem.examples for line in _wrap(f"  {example}")]
    return [*lines, *_wrap(f"-> {problem.advice}")] if problem.advice else lines


def _wrap(text: str) -> list[str]:
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text, _WIDTH - 10 - _NAME_WIDTH, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
    )


def summary(report: CheckReport) -> str:
    """Return how many checks passed, and whether the run would fail."""
    counts = {status: sum(result.status == status for result in report.results) for status in _SHOWN}
    verdict = "the run would fail" if report.would_fail else "the run can start"
    return (
        f"{counts['pass']} passed, {counts['warning']} with warnings, {counts['fail']} failed, {counts['skipped']} "
        f"skipped in {report.seconds:.1f} s: {verdict}"
    )


def as_json(report: CheckReport) -> str:
    """Return the report for programs."""
    content = {
        "would_fail": report.would_fail,
        "seconds": round(report.seconds, 2),
        "checks": [
            {
                "name": result.name,
                "status": result.status,
                "seconds": round(result.seconds, 2),
                "summary": result.reason or result.findings.summary,
                "problems": [dataclasses.asdict(problem) for problem in result.findings.problems],
                "text": result.findings.text,
            }
            for result in report.results
        ],
    }
    return json.dumps(content, indent=2) + "\n"
