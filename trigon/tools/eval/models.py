"""Finds the weights of a model that is to be evaluated, and the configuration of its run.

A model is a Hugging Face folder, a hub id, a checkpoint, or a run folder, whose last checkpoint is
meant. Checkpoints are exported first, as `trigon export` does; the export is kept and used again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trigon.checkpoint.manifest import EXPORT_RECORD, EXPORTED, exported_step
from trigon.config.paths import local_path, nearest_path
from trigon.errors import DataError, ModelError
from trigon.report.run import CONFIG, is_run, open_run
from trigon.system.files import read_json_object

_STEP = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model was found.

    spec: as it was given. kind: what it is. path: the folder of kind "folder", the hub id of "hub",
    a checkpoint's folder of "checkpoint". step: of the checkpoint; 0 for the others.
    run_config: config.yaml of the run of a checkpoint, if there is one.
    """

    spec: str
    kind: str
    path: str
    step: int
    run_config: Path | None


def find_model(spec: str) -> ModelSource:
    """Return where a model is; nothing is read but the names of files.

    Raises: ModelError if a folder is not a model, a checkpoint or a run with a checkpoint.
    """
    folder = local_path(spec)
    if folder is None:
        return ModelSource(spec, "hub", spec, 0, None)
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}{nearest_path(spec)}")
    if (folder / "config.json").is_file():
        return ModelSource(spec, "folder", str(folder), 0, None)
    if folder.resolve().name == "actor" and _STEP.fullmatch(folder.resolve().parent.name):
        folder = folder.resolve().parent
    if (folder / "actor").is_dir():
        step = _STEP.fullmatch(folder.resolve().name)
        config = folder.resolve().parent / CONFIG
        return ModelSource(
            spec, "checkpoint", str(folder), int(step[1]) if step else 0, config if config.is_file() else None
        )
    try:
        run = folder if any(folder.glob("global_step_*")) else open_run(folder).path
    except DataError as error:
        raise ModelError(
            f"{folder} is neither a Hugging Face model (it has no config.json) nor a checkpoint or a run: {error}"
        ) from error
    steps = [int(match[1]) for each in run.glob("global_step_*") if (match := _STEP.fullmatch(each.name))]
    if not steps:
        raise ModelError(
            f"the run {run} has no checkpoint yet; wait for one (trainer.save_freq), or name the model that it "
            "starts from"
        )
    config = run / CONFIG
    return ModelSource(
        spec,
        "checkpoint",
        str(run / f"global_step_{max(steps)}"),
        max(steps),
        config if config.is_file() else None,
    )


def looks_like_model(spec: str) -> bool:
    """Return whether an argument names a folder that holds a model, a checkpoint or a run."""
    folder = local_path(spec)
    if folder is None or not folder.is_dir():
        return False
    return (folder / "config.json").is_file() or (folder / "actor").is_dir() or is_run(folder)


def exported_folder(
    source: ModelSource,
    fallback: Path,
    *,
    warn: Callable[[str], None],
    on_progress: Callable[[str], None],
) -> str:
    """Return the Hugging Face folder or hub id of a model, exporting a checkpoint if needed.

    The export is written into the checkpoint's folder, or to fallback if that cannot be written. An
    earlier export of the same step there is used again. Its names, shapes and values are verified.
    Raises: as export_checkpoint.
    """
    if source.kind != "checkpoint":
        return source.path
    from trigon.checkpoint.export import export_checkpoint

    checkpoint = Path(source.path)
    folder = checkpoint / EXPORTED
    if exported_step(folder) == source.step:
        on_progress(f"{source.spec}: using {folder}, exported earlier")
        return str(folder)
    if not os.access(checkpoint, os.W_OK):
        folder = fallback
    on_progress(f"{source.spec}: exporting step {source.step} to {folder}")
    return str(export_checkpoint(checkpoint, folder, dtype=None, logits=False, warn=warn))


def recorded_of(source: ModelSource) -> dict[str, Any]:
    """Return the settings of a model's run, by option, that its export or checkpoint has.

    Empty if it has none. Of a hub id, the files except weights are downloaded if needed.
    Raises: ModelError if the file cannot be read, or the hub id is not found.
    """
    folder = Path(source.path)
    if source.kind == "hub":
        from trigon.models.load import folder_without_weights

        folder = folder_without_weights(source.path)
    path = folder / "actor" / "run_settings.json" if source.kind == "checkpoint" else folder / EXPORT_RECORD
    if not path.is_file():
        return {}
    try:
        content = read_json_object(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    settings = content if source.kind == "checkpoint" else content.get("settings")
    return settings if isinstance(settings, dict) else {}


def context_length(folder: Path) -> int | None:
    """Return the most tokens that a model takes, from its config.json; None if it does not say."""
    try:
        config = read_json_object(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error}") from error
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        if isinstance(length := part.get("max_position_embeddings"), int):
            return length
    return None
