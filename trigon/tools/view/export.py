"""Writes the page with chosen contents of runs as one HTML file, which needs no network."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Template

from trigon.report.rollouts import RolloutRow, row_to_line, to_json_line
from trigon.tools.cli.parser import writing
from trigon.tools.view.index import RolloutFilter
from trigon.tools.view.runs import ViewedRun, configurations
from trigon.tools.view.server import EMPTY_STYLE_HASH, STATIC, plotly_script, read_image, shrink, source_hash

TEMPLATE = Path(__file__).with_name("export.html.jinja")

MAX_IMAGE_BYTES = 300_000
MAX_IMAGE_SIDE = 1024

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w]+\.js)";\n', flags=re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|async function|const|class)", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Exported:
    """What a file has. num_rollouts: number of rollouts, of num_matching that match in all runs.

    problems: what could not be read, which the page says too.
    """

    path: Path
    num_bytes: int
    num_rollouts: int
    num_matching: int
    num_images: int
    problems: tuple[str, ...]


def export(
    runs: Sequence[ViewedRun], path: Path, *, max_rollouts: int = 256, filters: RolloutFilter | None = None
) -> Exported:
    """Write metrics, configurations and some rollouts of runs as one HTML file.

    The rollouts are whole groups that match the filter, evenly spaced in its order, at most
    max_rollouts for all runs together; at least one group of each run if max_rollouts is not 0.
    Images above 300 kB are made smaller, to 1,024 pixels a side at most.
    Raises: ConfigError if the file cannot be written.
    """
    filters = filters or RolloutFilter()
    groups: list[list[Mapping[str, Any]]] = []
    images: dict[str, str] = {}
    num_rollouts = num_matching = 0
    for number, run in enumerate(runs):
        run.update()
        found = run.rollouts.find(filters)
        num_matching += found.num_rollouts
        chosen: list[Mapping[str, Any]] = []
        for summary, rows in _groups(run, found.ids, min(max_rollouts, max(1, max_rollouts // len(runs)))):
            num_rollouts += len(rows)
            chosen.append({**summary, "rows": [json.loads(row_to_line(row)) for row in rows]})
            observed = (name for row in rows for turn in row.turns for name in turn.image_files)
            for name in dict.fromkeys((*rows[0].image_files, *observed)):
                if (image := read_image(run.record.path, name)) is not None:
                    content, media_type = shrink(*image, max_bytes=MAX_IMAGE_BYTES, max_side=MAX_IMAGE_SIDE)
                    images[f"{number}/{name}"] = f"data:{media_type};base64,{b64encode(content).decode()}"
        groups.append(chosen)
    names = ", ".join(run.name for run in runs)
    states = [_state(run, chosen) for run, chosen in zip(runs, groups, strict=True)]
    config = configurations(runs)
    page: dict[str, Any] = {
        "note": f"Exported file: all metrics, the configuration, and {num_rollouts:,} of {num_matching:,} rollouts.",
        "state": {"runs": states},
        "metrics": [run.metrics.columns(0) for run in runs],
        "config": config,
        "groups": groups,
        "images": images,
    }
    text = _html(names, page)
    with writing(path, "the page"):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    problems = [f"{state['name']}: {problem}" for state in states for problem in state["problems"]]
    return Exported(
        path, path.stat().st_size, num_rollouts, num_matching, len(images), (*problems, *config["problems"])
    )


def _groups(
    run: ViewedRun, ids: Sequence[int], max_rollouts: int
) -> list[tuple[Mapping[str, Any], Sequence[RolloutRow]]]:
    """Return evenly spaced groups with at most max_rollouts completions, but at least one group."""
    if not ids or max_rollouts <= 0:
        return []
    mean_size = fmean(summary["num"] for summary in run.rollouts.summaries(ids))
    num = min(max(int(max_rollouts / mean_size), 1), len(ids))
    chosen: list[tuple[Mapping[str, Any], Sequence[RolloutRow]]] = []
    total = 0
    for summary in run.rollouts.summaries([ids[k * len(ids) // num] for k in range(num)]):
        rows = run.rollouts.read_group(summary["split"], summary["step"], summary["number"])
        if rows is not None and (not chosen or total + len(rows) <= max_rollouts):
            chosen.append((summary, rows))
            total += len(rows)
    return chosen


def _state(run: ViewedRun, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a run with the splits of its exported groups only."""
    rows = [row for group in groups for row in group["rows"]]
    return {
        **run.state(),
        "is_running": False,  # nothing is added to a file
        "path": run.name,  # not where it is on the machine that exports it
        "splits": {group["split"]: {} for group in groups},
        "num_not_ok": sum(row["outcome"] != "ok" for row in rows),
    }


def _html(names: str, content: Mapping[str, Any]) -> str:
    """Return the page as one document, whose policy admits its own scripts and style, by hash."""
    # Within a script element, only < can begin its end or a comment.
    data = to_json_line(content).decode().strip().replace("<", "\\u003c")
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    scripts = [plotly_script().read_text(encoding="utf-8").replace("</script", "<\\/script"), as_one_script()]
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(source_hash, scripts))}",
            f"style-src {source_hash(style)} {EMPTY_STYLE_HASH}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    plotly, page = scripts
    template = Template(TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    document: str = template.render(names=names, policy=policy, style=style, data=data, plotly=plotly, page=page)
    return document


def as_one_script() -> str:
    """Return the modules of the page as one, in an order in which each follows what it imports.

    The modules use one form of import and export, and no two have the same names at top level.
    """
    done: dict[str, str] = {}

    def add(name: str) -> None:
        text = (STATIC / name).read_text(encoding="utf-8")
        for other in _IMPORT.findall(text):
            if other not in done:
                add(other)
        done[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add("main.js")
    return "\n".join(done.values())
