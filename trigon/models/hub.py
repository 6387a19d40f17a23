"""The hub that hub ids refer to: Hugging Face, or ModelScope if USE_MODELSCOPE_HUB is 1.

EasyR1 reads the same environment variable. The client of ModelScope is an optional package. A
mirror of the Hugging Face Hub needs no code here: its client and `datasets` read HF_ENDPOINT.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Literal

from trigon.errors import ConfigError, DataError, ModelError
from trigon.system.installation import install_command

VARIABLE = "USE_MODELSCOPE_HUB"

IGNORED_FILES = ("*.bin", "*.pth", "*.gguf", "*.onnx", "original/*")
"""Files of a model repository that are not downloaded: weights in formats that Trigon does not
read.
"""

Kind = Literal["model", "dataset"]


def uses_modelscope() -> bool:
    """Return whether hub ids refer to ModelScope.

    Raises: ConfigError if the environment variable is not a boolean.
    """
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise ConfigError(f"the environment variable {VARIABLE} is {value!r}; set it to 1 for ModelScope, or to 0")
    return value in ("1", "true", "yes", "on")


def hub_endpoint() -> str:
    """Return the address of the Hugging Face Hub, or of the mirror in HF_ENDPOINT."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def datasets_cache() -> Path:
    """Return the cache folder of `datasets`, without importing the library, which takes seconds."""
    from huggingface_hub.constants import HF_HOME

    imported = sys.modules.get("datasets.config")  # which a program may have changed
    folder = imported.HF_DATASETS_CACHE if imported else os.environ.get("HF_DATASETS_CACHE")
    return Path(folder or Path(HF_HOME) / "datasets")


def modelscope_folder(repo_id: str, kind: Kind) -> Path:
    """Return the local copy of a ModelScope repository, downloaded if needed.

    Raises: ConfigError if the package modelscope is not installed; ModelError or DataError if the
    repository does not exist or cannot be reached.
    """
    try:
        import modelscope
        from modelscope.hub.errors import HubError
    except ImportError as error:
        raise ConfigError(
            f"{VARIABLE} is set, but the package modelscope cannot be imported ({error}); run "
            f"{install_command('modelscope')}, or unset the variable"
        ) from error
    error_type = {"model": ModelError, "dataset": DataError}[kind]
    try:
        match kind:
            case "model":
                return Path(modelscope.snapshot_download(repo_id, ignore_patterns=list(IGNORED_FILES)))
            case "dataset":
                return Path(modelscope.dataset_snapshot_download(repo_id))
    except (HubError, OSError, ValueError) as error:
        raise error_type(
            f"{repo_id!r} is neither a folder on this machine nor a {kind} that could be downloaded from ModelScope "
            f"({VARIABLE} is set): {error}. Check the spelling and the network."
        ) from error


def require_config_file(folder: Path) -> None:
    """Raise ModelError if a folder has no config.json."""
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} contains no config.json, so it is not a Hugging Face model. {suggest_export(folder)}"
        )


def require_weight_files(folder: Path) -> None:
    """Raise ModelError if a model's folder has no safetensors files; they are not read."""
    if any(path.suffix == ".safetensors" for path in folder.iterdir()):
        return
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{folder} has its weights in pytorch_model.bin only, a format that can run code when it is read, and is "
            "not read here. Download the model's *.safetensors, or convert it once: load it with transformers and "
            "call save_pretrained on a new folder."
        )
    raise ModelError(f"{folder} has a config.json but no weights (*.safetensors). {suggest_export(folder)}")


def suggest_export(folder: Path) -> str:
    """Return what to do about an incomplete model folder: a checkpoint has to be exported."""
    if folder.parts[-2:] == ("actor", "huggingface"):
        return (
            "It belongs to a checkpoint, whose weights are in another format: "
            f"`trigon export {shlex.quote(str(folder.parent))}` writes the weights into this folder."
        )
    if any((folder / place).is_dir() for place in ("huggingface", "actor/huggingface")) or any(
        folder.glob("global_step_*")
    ):
        return (
            f"It is a checkpoint: run `trigon export {shlex.quote(str(folder))}`, and set model_path to the folder "
            "that it writes."
        )
    return "Use a folder written by `save_pretrained` or `trigon export`, or download the model again."
