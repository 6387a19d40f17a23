"""What a checkpoint and its export record of their run, so that evaluations can use it.

These are the options on which a model's prompts, pixels and completions depend: the format of
prompts, limits, and the sampling of validation. They have their resolved values, and templates
their text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trigon.assemble.options import make_validation_sampling_params
from trigon.config.options import options
from trigon.config.paths import read_template
from trigon.config.schema import Config

_SAMPLING = "worker.rollout.val_override_config."

NOT_COMPARED = (f"{_SAMPLING}n", f"{_SAMPLING}seed", "worker.rollout.dtype")
"""Differences in these change no expected value."""


def recorded_settings(config: Config, *, pixel_limits: tuple[int, int] | None) -> dict[str, Any]:
    """Return the settings of a run by the names of their options, as values of JSON.

    pixel_limits: of its image processor, see side_files.py.
    """
    data, sampling = config.data, make_validation_sampling_params(config)
    smallest, largest = pixel_limits or (data.min_pixels, data.max_pixels)
    return {
        "data.format_prompt": read_template(data.format_prompt),
        "data.system_prompt": data.system_prompt,
        "data.allow_special_tokens": data.allow_special_tokens,
        "data.min_pixels": smallest,
        "data.max_pixels": largest,
        "data.video_fps": data.video_fps,
        "data.max_video_frames": data.max_video_frames,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        "worker.rollout.dtype": config.worker.rollout.dtype,
        f"{_SAMPLING}n": sampling.n,
        f"{_SAMPLING}temperature": sampling.temperature,
        f"{_SAMPLING}top_p": sampling.top_p,
        f"{_SAMPLING}top_k": sampling.top_k,
        f"{_SAMPLING}max_tokens": sampling.max_tokens,
        f"{_SAMPLING}ignore_eos": sampling.ignore_eos,
        f"{_SAMPLING}seed": sampling.seed,
    }


def known_settings(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded settings that are options of this version and not null."""
    known = {option.name for option in options().values()}
    return {name: value for name, value in recorded.items() if name in known and value is not None}


def find_differences(recorded: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Return (recorded, used) of each setting in which an evaluation differs from a model's run.

    A pixel limit that the evaluation does not set is the model's own.
    """
    used = recorded_settings(config, pixel_limits=None)
    return {
        name: (recorded[name], value)
        for name, value in used.items()
        if name in recorded
        and name not in NOT_COMPARED
        and recorded[name] != value
        and not (name in ("data.min_pixels", "data.max_pixels") and value is None)
    }
