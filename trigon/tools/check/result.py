"""What a check finds, and how it is shown: on the console, and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trigon.system.terminal import sanitize

Status = Literal["pass", "warning", "fail", "skipped"]

_SHOWN = {"pass": "pass", "warning": "warning", "fail": "FAIL", "skipped": "skipped"}
_MAX_CHARACTERS = 20_000
_WIDTH = 110
_NAME_WIDTH = 14


class Skipped(Exception):
    """Raised by a check that does not apply, or lacks what it needs. The message says why."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A part of the run that could not be made. reason: why a check that needs it is skipped."""

    reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    kind: a name for programs, which docs/check.md lists. message: what is wrong, with the value.
    advice: what to do. examples: a few of the rows or values with this problem. is_fatal: the run
    would fail, or be wasted.
    """

    kind: str
    message: str
    advice: str = ""
    examples: tuple[str, ...] = ()
    is_fatal: bool = True


@dataclass(slots=True)
class Result:
    """What one check found; the check fills it in.

    summary: one line, shown if there is no problem. text: tables, shown as they are. skipped: why
    the check was skipped; "": it was not.
    """

    name: str
    summary: str = ""
    text: str = ""
    skipped: str = ""
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0

    def fail(self, kind: str, message: str, advice: str = "", examples: Sequence[str] = ()) -> None:
        """Add a problem by which the run would fail, or be wasted."""
        self.problems.append(Problem(kind, message, advice, tuple(examples)))

    def warn(self, kind: str, message: str, advice: str = "", examples: Sequence[str] = ()) -> None:
        """Add a problem with which the run can start."""
        self.problems.append(Problem(kind, message, advice, tuple(examples), is_fatal=False))

    def add(self, is_fatal: bool, kind: str, message: str, advice: str = "", examples: Sequence[str] = ()) -> None:
        """Add a problem by which the run would fail if is_fatal, and can start otherwise."""
        (self.fail if is_fatal else self.warn)(kind, message, advice, examples)

    @property
    def status(self) -> Status:
        """How the check ended."""
        if self.skipped:
            return "skipped"
        if any(problem.is_fatal for problem in self.problems):
            return "fail"
        return "warning" if self.problems else "pass"


@dataclass(slots=True)
class Report:
    """The results of all checks, in the order in which they ran."""

    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def problems(self) -> list[Problem]:
        """All problems of all checks."""
        return [problem for result in self.results for problem in result.problems]

    @property
    def would_fail(self) -> bool:
        """Whether the run would fail, or be wasted."""
        return any(problem.is_fatal for problem in self.problems)

    def result(self, name: str) -> Result:
        """Return the result of the check of this name. Raises: KeyError."""
        return {result.name: result for result in self.results}[name]


def console_lines(result: Result) -> str:
    """Return one result as text: a line, its problems with what to do, and its tables."""
    indent = " " * (10 + _NAME_WIDTH)
    lines = _wrap(result.skipped)
    for problem in result.problems:
        mark = "" if len(result.problems) == 1 else "FAIL: " if problem.is_fatal else "warning: "
        first, *rest = problem.message.splitlines() or [""]
        lines += [*_wrap(f"{mark}{first}"), *(f"  {line}" for line in rest)]
        lines += [line for example in problem.examples for line in _wrap(f"  {example}")]
        lines += _wrap(f"-> {problem.advice}") if problem.advice else []
    lines = lines or _wrap(result.summary) or [""]
    head = f"{_SHOWN[result.status]:<8}  {result.name:<{_NAME_WIDTH}}"
    shown = [f"{head}{lines[0]}", *(f"{indent}{line}" for line in lines[1:])]
    shown += [f"{indent}| {line}" for line in result.text.splitlines()]
    return sanitize("\n".join(shown), max_characters=_MAX_CHARACTERS)


def _wrap(text: str) -> list[str]:
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text, _WIDTH - 10 - _NAME_WIDTH, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
    )


def count_statuses(report: Report) -> str:
    """Return how many checks passed: "15 passed, 2 with warnings, 1 failed, 2 skipped in 3.4 s"."""
    passed, warned, failed, skipped = (sum(each.status == status for each in report.results) for status in _SHOWN)
    return f"{passed} passed, {warned} with warnings, {failed} failed, {skipped} skipped in {report.seconds:.1f} s"


def as_json(report: Report) -> str:
    """Return the report for programs."""
    content = {
        "would_fail": report.would_fail,
        "seconds": round(report.seconds, 2),
        "checks": [
            {
                "name": result.name,
                "status": result.status,
                "seconds": round(result.seconds, 2),
                "summary": result.skipped or result.summary,
                "problems": [dataclasses.asdict(problem) for problem in result.problems],
                "text": result.text,
            }
            for result in report.results
        ],
    }
    return json.dumps(content, indent=2) + "\n"
