"""Which hub stands behind a hub id: the Hugging Face Hub, or ModelScope where USE_MODELSCOPE_HUB is 1.

Knows that variable, by which users of EasyR1 choose, and ModelScope's client, an optional package. A mirror of the
Hugging Face Hub needs nothing of ours: its client and `datasets` read HF_ENDPOINT themselves. Refuses to know what is
in a repository.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from trigon.errors import ConfigError, DataError, ModelError

VARIABLE = "USE_MODELSCOPE_HUB"

UNREAD = ("*.bin", "*.pth", "*.gguf", "*.onnx", "original/*")
"""Files of a model that are not downloaded: weights in formats that are not read here."""

Kind = Literal["model", "dataset"]


def uses_modelscope() -> bool:
    """Tell whether hub ids are ModelScope's. Raises: ConfigError if the variable is neither yes nor no."""
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise ConfigError(f"the environment variable {VARIABLE} is {value!r}; set it to 1 for ModelScope, or to 0")
    return value in ("1", "true", "yes", "on")


def modelscope_folder(repo_id: str, kind: Kind) -> Path:
    """Return the local copy of a ModelScope repository, downloaded when needed.

    Raises: ConfigError if the package modelscope is not installed; ModelError or DataError if there is no such
    repository, or no way to it.
    """
    try:
        import modelscope
        from modelscope.hub.errors import HubError
    except ImportError as error:
        raise ConfigError(
            f"{VARIABLE} is set, but the package modelscope cannot be imported ({error}); run "
            "pip install 'trigon[modelscope]', or unset the variable"
        ) from error
    failure = {"model": ModelError, "dataset": DataError}[kind]
    try:
        match kind:
            case "model":
                return Path(modelscope.snapshot_download(repo_id, ignore_patterns=list(UNREAD)))
            case "dataset":
                return Path(modelscope.dataset_snapshot_download(repo_id))
    except (HubError, OSError, ValueError) as error:
        raise failure(
            f"{repo_id!r} is neither a folder on this machine nor a {kind} that ModelScope would give "
            f"({VARIABLE} is set): {error}. Check the spelling and the network."
        ) from error
