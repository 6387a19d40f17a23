"""Checks that a folder holds a Hugging Face model, without reading it. Does not depend on torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from trigon.errors import ModelError


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
