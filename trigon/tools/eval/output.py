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
from pathlib import Path, PurePath

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


def check_output(folder: Path) -> None:
    """Raise ConfigError if a folder has files, and is none of an earlier evaluation."""
    is_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_empty and not (folder / RESULT).is_file():
        raise ConfigError(f"{folder} exists and is no earlier evaluation; choose another --output")


def open_output(output: str | PurePath | None, source: ModelSource) -> Path:
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
    """Remove what an earlier evaluation wrote into a folder, but for these exports.

    Anything else stays, and so does what a link leads to. Raises: ConfigError as check_output.
    """
    check_output(folder)
    (folder / RESULT).unlink(missing_ok=True)
    _remove_run(folder)
    for run in _folders(folder):
        if _MODEL_FOLDER.fullmatch(run.name):
            _remove_run(run)
            _remove_empty(run)
    resolved = {path.resolve() for path in kept}
    exported = folder / EXPORTED
    for entry in _folders(exported):
        if exported_step(entry) is not None and entry.resolve() not in resolved:
            shutil.rmtree(entry)
    _remove_empty(exported)


def _remove_run(folder: Path) -> None:
    """Remove what an evaluation wrote into a run folder."""
    for name in _RUN_FILES:
        (folder / name).unlink(missing_ok=True)
    for entry in _folders(folder):
        if entry.name in _RUN_FOLDERS:
            shutil.rmtree(entry)
        elif entry.name == BLIND:
            _remove_run(entry)
            _remove_empty(entry)


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()] if folder.is_dir() else []


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
