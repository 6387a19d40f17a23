"""Finds the config.json of a model without its weights: on this machine, shipped, or on the hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trigon.config.paths import local_path
from trigon.errors import ModelError
from trigon.models.hub import hub_endpoint, uses_modelscope
from trigon.system.suggestions import did_you_mean
from trigon.system.temporary import private_folder

SHIPPED = Path(__file__).parent / "model_configs"
"""A folder with a config.json for each of the models that plans are made for most often."""

_OWNER = "Qwen"

_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Of a model's repository: config, tokenizer and processors, without weights."""


def shipped_models() -> list[str]:
    """Return the hub ids whose config.json is part of the package."""
    return [f"{_OWNER}/{folder.name}" for folder in sorted(SHIPPED.iterdir()) if folder.is_dir()]


@contextmanager
def open_model_config(model_path: str, model_config: Path | None) -> Iterator[Path]:
    """Yield a folder with the config.json of a model.

    Args:
        model_path: a folder, or a hub id.
        model_config: a config.json, or a folder with one, that is used instead.
    Raises: ModelError if there is none, or if it cannot be downloaded.
    """
    if model_config is None:
        yield _config_folder(model_path)
        return
    file = model_config / "config.json" if model_config.is_dir() else model_config
    if not file.is_file():
        raise ModelError(f"--model-config {model_config} is not a file: give a model's config.json, or its folder")
    if file.name == "config.json":
        yield file.parent
        return
    with private_folder() as folder:
        shutil.copyfile(file, folder / "config.json")  # transformers reads this name only
        yield folder


def _config_folder(model_path: str) -> Path:
    folder = local_path(model_path)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json; a plan needs no more of a model, see --model-config")
        return folder
    if model_path in shipped_models():
        return SHIPPED / model_path.partition("/")[2]
    return _download_config(model_path)


def _download_config(model_path: str) -> Path:
    if uses_modelscope():
        raise ModelError(
            f"a plan reads no config.json from ModelScope: download that of {model_path!r}, and give it with "
            "--model-config FILE"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model_path, "config.json")).parent
    except (OSError, ValueError) as error:  # the base classes of the hub's errors
        raise ModelError(
            f"the config.json of {model_path!r} could not be downloaded from {hub_endpoint()}: "
            f"{' '.join(str(error).split())[:300]}\nGive the file with --model-config FILE, or use one of the models "
            f"whose configuration is part of Trigon: {', '.join(shipped_models())}"
            f"{did_you_mean(model_path, shipped_models())}"
        ) from error


def processor_folder(model_path: str, *, download: bool) -> Path | None:
    """Return a folder with the tokenizer and processors of a model, or None if that is not at hand.

    At hand: a local folder, or the hub's cache on this machine.
    download: read them from the hub otherwise, without weights.
    Raises: ModelError if the download fails.
    """
    folder = local_path(model_path)
    if folder is not None:
        return folder if (folder / "tokenizer_config.json").is_file() else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(model_path, allow_patterns=list(_SMALL_FILES), local_files_only=not download))
    except (OSError, ValueError) as error:
        if isinstance(error, LocalEntryNotFoundError) and not download:
            return None
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"the tokenizer of {model_path!r} could not be downloaded from {hub_endpoint()}: {reason}"
        ) from error
    return found if (found / "tokenizer_config.json").is_file() else None
