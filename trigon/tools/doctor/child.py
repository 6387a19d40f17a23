"""The process of one check: calls it, and writes what it found into a JSON file.

An exception ends the process with its traceback, which the report shows.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trigon.tools.doctor.result import CheckSkipped, Findings, Setting

CODE = "from trigon.tools.doctor.child import main; main(*sys.argv[1:])"
_TASK, _RESULT = "task.pickle", "result.json"


def write_task(folder: Path, run: Callable[[Setting], Findings], setting: Setting) -> None:
    """Write what the process has to do: call run, a function of a module or a partial of one."""
    (folder / _TASK).write_bytes(pickle.dumps((run, setting)))


def main(folder: str) -> None:
    """Do what write_task has written into a folder."""
    run, setting = pickle.loads((Path(folder) / _TASK).read_bytes())
    result: dict[str, Any]
    try:
        result = {"findings": dataclasses.asdict(run(setting))}
    except CheckSkipped as skipped:
        result = {"skipped": str(skipped)}
    # Complete or not at all.
    temporary = Path(folder) / f"{_RESULT}.tmp"
    temporary.write_text(json.dumps(result), encoding="utf-8")
    temporary.replace(Path(folder) / _RESULT)


def read_result(folder: Path) -> Findings | str | None:
    """Return what the check found, or why it was skipped; None if it did not come to its end."""
    path = folder / _RESULT
    if not path.is_file():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    if "skipped" in result:
        return str(result["skipped"])
    found = result["findings"]
    return Findings(found["figures"], tuple(found["problems"]), tuple(found["notes"]), found["text"])
