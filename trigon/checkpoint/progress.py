"""Reads progress.json of a checkpoint: its step, the training loop's state, and its score."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from trigon.checkpoint.manifest import PROGRESS, has_all_files
from trigon.errors import CheckpointError
from trigon.system.json_files import read_json_object


def is_complete(folder: Path) -> bool:
    """Return whether all files are there with their sizes, and progress can be read."""
    if not has_all_files(folder):
        return False
    try:
        read_progress(folder)
    except CheckpointError:
        return False
    return True


def read_progress(folder: Path) -> tuple[int, Mapping[str, Any], float | None]:
    """Return (step, progress, score). Raises: CheckpointError."""
    path = folder / PROGRESS
    try:
        state = read_json_object(path, max_bytes=None)  # its size is in the manifest
        step, progress, score = state["step"], state["progress"], state["val_reward_score"]
        if type(step) is not int or not isinstance(progress, dict):
            raise ValueError("it has no step, or no progress")
        if score is not None and not isfinite(score):
            raise ValueError(f"its score is {score}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; restore it, or use another checkpoint") from error
    return step, progress, score
