"""Writes the side files of a model as a run used them: its processors, tokenizer and configuration.

A run may set pixel limits, a chat template, a tokenizer and values of the configuration. They are
written into the copies of the model's files that a checkpoint and its export have, so that vLLM and
transformers see the pixels and prompts of training.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trigon.models.load import Processors, copy_side_files, load_hf_config
from trigon.system.json_files import read_json_object, write_json

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
)
_CHAT_TEMPLATE = "chat_template.jinja"


def write_side_files(
    source: Path,
    destination: Path,
    processors: Processors,
    *,
    sets_limits: bool = False,
    sets_chat_template: bool = False,
    tokenizer: Path | None = None,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Copy the files of a model folder except its weights, with what a run has changed.

    Args:
        source: the folder of the model.
        processors: those of the run.
        sets_limits: the image processor has other pixel limits than the model's.
        sets_chat_template: the tokenizer has another chat template than the model's.
        tokenizer: the folder of the tokenizer; None: source.
        override_config: as of load_model.
    """
    copy_side_files(source, destination)
    if override_config:
        config = load_hf_config(source, trust_remote_code=trust_remote_code, override_config=override_config)
        config.save_pretrained(destination)
    if tokenizer is not None:
        _copy_tokenizer(tokenizer, destination)
    if sets_chat_template:
        _write_chat_template(destination, processors.tokenizer.chat_template)
    family = processors.family
    if sets_limits and family.takes_patches:
        assert processors.image_processor is not None
        size = processors.image_processor.size
        limits = (int(size["shortest_edge"]), int(size["longest_edge"]))
        _write_pixel_limits(destination, limits, of_videos=family.video in ("patches", "seconds"))


def pixel_limits(processors: Processors) -> tuple[int, int] | None:
    """Return the least and the most pixels of an image; None for a model without such limits."""
    if processors.image_processor is None or not processors.family.takes_patches:
        return None
    size, frames = processors.image_processor.size, processors.family.frames_per_image
    return int(size["shortest_edge"]) // frames, int(size["longest_edge"]) // frames


def _copy_tokenizer(source: Path, destination: Path) -> None:
    """Replace the files of the tokenizer, and the chat template that belongs to it."""
    for file in _tokenizer_files(destination):
        file.unlink()
    for file in _tokenizer_files(source):
        shutil.copyfile(file, destination / file.name)


def _tokenizer_files(folder: Path) -> set[Path]:
    return {file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}


def _write_chat_template(folder: Path, template: str) -> None:
    """Write a chat template in the one place that transformers and vLLM read first."""
    (folder / "chat_template.json").unlink(missing_ok=True)
    for name in ("tokenizer_config.json", "processor_config.json"):
        content = read_json_object(folder / name) if (folder / name).is_file() else {}
        if content.pop("chat_template", None) is not None:
            write_json(folder / name, content, ensure_ascii=False)
    (folder / _CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _write_pixel_limits(folder: Path, limits: tuple[int, int], *, of_videos: bool) -> None:
    """Write the pixel limits into the configuration of the image processor, wherever that is.

    of_videos: into that of the video processor too, whose limits are those of a frame. Qwen3-VL's
    are those of all frames together, as which the limits of a frame cannot be written.
    """
    places = [("preprocessor_config.json", ""), ("processor_config.json", "image_processor")]
    if of_videos:
        places += [("video_preprocessor_config.json", ""), ("processor_config.json", "video_processor")]
    for name, key in places:
        path = folder / name
        content = read_json_object(path) if path.is_file() else {}
        section = content.get(key) if key else content
        if not isinstance(section, dict) or not section:
            continue
        section["size"] = {"shortest_edge": limits[0], "longest_edge": limits[1]}
        for limit_key, limit in zip(("min_pixels", "max_pixels"), limits, strict=True):
            if limit_key in section:  # of folders that version 4 of transformers wrote
                section[limit_key] = limit
        write_json(path, content, ensure_ascii=False)
