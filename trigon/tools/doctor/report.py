"""Results as text: lines for the console, and the files for a bug report. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from trigon.system.terminal import sanitize
from trigon.tools.doctor.result import Result

_SHOWN = {"pass": "pass", "fail": "FAIL", "skipped": "skipped"}
_MAX_CHARACTERS = 20_000


def console_lines(result: Result, *, width: int) -> str:
    """Return one result as text. width: of the column of names."""
    head = f"{_SHOWN[result.status]:<8}{result.seconds:>6.1f} s  {result.name:<{width}}"
    details = [result.reason] if result.reason else []
    details += [f"{name} {value}" for name, value in result.findings.figures.items()]
    details += [f"note: {note}" for note in result.findings.notes]
    first, *rest = details or [""]
    indent = " " * 18
    lines = [f"{head}  {first}".rstrip(), *(f"{indent}{line}" for line in rest)]
    if result.findings.text:
        lines += [f"{indent}{line}" for line in result.findings.text.splitlines()]
    return sanitize("\n".join(lines), max_characters=_MAX_CHARACTERS)


def summary(results: Sequence[Result], seconds: float) -> str:
    """Return how many checks passed: "12 passed, 1 failed, 3 skipped in 412 s"."""
    counts = {status: sum(result.status == status for result in results) for status in _SHOWN}
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped in {seconds:.0f} s"


def markdown(results: Sequence[Result], titles: dict[str, str], *, heading: str, seconds: float) -> str:
    """Return the report. titles: of the checks by name."""
    lines = [
        f"# {heading}",
        "",
        summary(results, seconds),
        "",
        "| check | result | seconds | what | figures |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        figures = "; ".join(f"{name} {value}" for name, value in result.findings.figures.items())
        shown = "; ".join(part for part in (result.reason, figures) if part)
        cells = (result.name, _SHOWN[result.status], f"{result.seconds:.1f}", titles[result.name], shown)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    for result in results:
        lines += [f"\n{result.name}: {_plain(note)}" for note in result.findings.notes]
        if result.findings.text:
            lines += ["", f"## {result.name}", "", *_block(result.findings.text)]
        if result.last_lines:
            lines += ["", f"## {result.name} failed: last lines", "", *_block(result.last_lines)]
    return "\n".join(lines) + "\n"


def as_json(results: Sequence[Result], titles: dict[str, str], *, heading: str, seconds: float) -> str:
    """Return the same for programs."""
    content = {
        "heading": heading,
        "seconds": round(seconds, 1),
        "checks": [dataclasses.asdict(result) | {"title": titles[result.name]} for result in results],
    }
    return json.dumps(content, indent=2) + "\n"


def _plain(text: str) -> str:
    return sanitize(text, max_characters=_MAX_CHARACTERS)


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", " ")


def _block(text: str) -> list[str]:
    """Return text as a code block, with a fence that does not occur in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", _plain(text), fence]
