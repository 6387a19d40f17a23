"""What parts of a run take from several sections of the configuration, and from the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trigon.config.paths import read_template
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.system.machine import count_usable_cpus
from trigon.types import SamplingParams

PIXEL_CACHE_BYTES = 4 * 2**30
"""Host memory of each worker's cache of processed images, by which a step processes each once."""

_SAMPLING = "worker.rollout.val_override_config."


def model_path(config: Config) -> str:
    """Return the model to start from.

    trigon.config.checks has rejected a configuration without one.
    """
    path = config.worker.actor.model.model_path
    assert path is not None
    return path


def count_data_threads(config: Config) -> int:
    """Return how many threads build prompts: as configured, but at most the usable CPUs."""
    return min(config.data.filter_overlong_prompts_workers, count_usable_cpus())


def count_image_threads(config: Config, *, usable_cpus: int) -> int:
    """Return how many threads process the images of one of several workers.

    As configured, but at most its share of the usable CPUs of its node, whose other workers process
    images at the same time; at least 1.
    """
    return min(config.data.filter_overlong_prompts_workers, max(1, usable_cpus // config.workers_per_machine))


def needs_old_logprobs(config: Config, plan: Plan) -> bool:
    """Return whether the trainer computes log-probabilities before the first update of a step.

    Several updates need them for their ratios, and a sampled KL in the reward for its estimate.
    """
    return plan.updates_per_step > 1 or config.algorithm.kl_in_reward not in (None, "full")


def make_sampling_params(config: Config) -> SamplingParams:
    """Return the sampling parameters of training."""
    rollout = config.worker.rollout
    return SamplingParams(
        n=config.group_size,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed,
        with_baseline=config.algorithm.adv_estimator == "remax",
    )


def make_validation_sampling_params(config: Config) -> SamplingParams:
    """Return the sampling parameters of validation.

    They are the parameters of training, changed by val_override_config.
    """
    changed = config.worker.rollout.val_override_config.model_dump(exclude_none=True)
    return replace(make_sampling_params(config), with_baseline=False, **changed)


def max_completion_tokens(config: Config) -> int:
    """Return the most tokens of a completion: of training, or with val_only of validation."""
    make = make_validation_sampling_params if config.trainer.val_only else make_sampling_params
    return make(config).max_tokens


def recorded_settings(config: Config, *, pixel_limits: tuple[int, int] | None) -> dict[str, Any]:
    """Return what a checkpoint and its export record of their run, so that evaluations can use it.

    These are the options on which a model's prompts, pixels and completions depend: the format of
    prompts, limits, and the sampling of validation, by name, as values of JSON. They have their
    resolved values, and templates their text.
    pixel_limits: the limits of its image processor, see models/load.py.
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
