"""The folder of an evaluation, and which of its files a later evaluation replaces.

root/
  evaluation.json     every number; marks the folder as that of an evaluation
  config.yaml ...     with one model, its run folder: metrics.jsonl, rollouts/, images/, ...
  blind/              with one model, the run folder of its evaluation with blank images
  1-NAME/ 2-NAME/     with several models, the run folder of each, with its own blind/
  exported/1-NAME/    exports of checkpoints whose own folder cannot be written
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from trigon.checkpoint.manifest import exported_step
from trigon.errors import ConfigError
from trigon.report.rollouts import IMAGES
from trigon.report.run import CONFIG, LOCK, METRICS
from trigon.report.run_folder import SKIPPED_ROWS
from trigon.tools.eval.models import ModelSource

RESULT = "evaluation.json"
BLIND = "blind"
"""Folder of the evaluation without images, below that of the evaluation with them."""
EXPORTED = "exported"

_RUN_FILES = (CONFIG, METRICS, LOCK, SKIPPED_ROWS)
_RUN_FOLDERS = ("rollouts", IMAGES)
_MODEL_FOLDER = re.compile(r"\d+-.+")


def label(number: int, source: ModelSource) -> str:
    """Return the name of the folder of one of several models."""
    name = re.sub(r"[^\w.-]+", "-", Path(source.spec).resolve().name).strip("-")
    return f"{number}-{name or 'model'}"


def check_output(output: str | Path) -> None:
    """Raise ConfigError if a folder has anything that an evaluation does not replace."""
    folder = Path(output)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / RESULT).is_file():
        raise ConfigError(f"{folder} exists and is no earlier evaluation; choose another --output")
    foreign = [name for entry in sorted(folder.iterdir()) if (name := _find_foreign(entry)) is not None]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ConfigError(
            f"{folder} has an earlier evaluation, which would be replaced, and {foreign[0]}{more}, which no evaluation "
            "has written; move it elsewhere, or choose another --output"
        )


def open_output(output: str | Path | None, source: ModelSource) -> Path:
    """Return the folder for the results, made if needed. An earlier evaluation stays in it.

    output: as check_output accepts it; None: a new folder in `evaluations`, named like the model.
    """
    if output is None:
        name = label(1, source).partition("-")[2]
        number = 1
        while (folder := Path("evaluations") / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
    else:
        folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove_earlier(folder: Path, *, kept: Collection[Path]) -> None:
    """Remove an earlier evaluation from a folder, but for these exports.

    Raises: ConfigError if the folder has anything else; then nothing is removed.
    """
    check_output(folder)
    resolved = {path.resolve() for path in kept}
    exported = folder / EXPORTED
    for entry in [*folder.iterdir(), *(exported.iterdir() if exported.is_dir() else ())]:
        if entry.is_file():
            entry.unlink()
        elif entry != exported and entry.resolve() not in resolved:
            shutil.rmtree(entry)
    if exported.is_dir() and not any(exported.iterdir()):
        exported.rmdir()


def _find_foreign(entry: Path) -> Path | None:
    """Return what no evaluation writes: an entry of its folder or an entry below; or None."""
    if entry.is_symlink():
        return entry
    if entry.is_file():
        return None if entry.name in (RESULT, *_RUN_FILES) else entry
    if entry.name in _RUN_FOLDERS:
        return None
    if entry.name == EXPORTED:
        return next((each for each in sorted(entry.iterdir()) if exported_step(each) is None), None)
    if entry.name == BLIND:
        return _find_foreign_of_run(entry, (*_RUN_FILES, *_RUN_FOLDERS))
    if _MODEL_FOLDER.fullmatch(entry.name):
        return _find_foreign_of_run(entry, (*_RUN_FILES, *_RUN_FOLDERS, BLIND))
    return entry


def _find_foreign_of_run(folder: Path, names: Collection[str]) -> Path | None:
    """Return an entry of a run folder that has none of these names, or None."""
    for entry in sorted(folder.iterdir()):
        if entry.name not in names or entry.is_symlink() or entry.is_dir() == (entry.name in _RUN_FILES):
            return entry
        if entry.name == BLIND and (foreign := _find_foreign_of_run(entry, (*_RUN_FILES, *_RUN_FOLDERS))) is not None:
            return foreign
    return None
