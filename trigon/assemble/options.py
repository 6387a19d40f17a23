"""What parts of a run take from several sections of the configuration, and from the machine."""

from __future__ import annotations

from dataclasses import replace

from trigon.algorithms.kl import AdaptiveKl
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.rollout.buffer import BufferSettings
from trigon.rollout.filtering import GroupFilter
from trigon.run import Intervals
from trigon.system.cpus import count_usable_cpus
from trigon.types import SamplingParams

PIXEL_CACHE_BYTES = 4 * 2**30
"""Host memory of each worker's cache of processed images, by which a step processes each once."""


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


def make_intervals(config: Config, *, can_validate: bool) -> Intervals:
    """Return when to validate, save and show completions.

    can_validate: there are validation prompts.
    """
    trainer = config.trainer
    return Intervals(
        validate_first=config.validates_first and can_validate,
        validate_only=trainer.val_only,
        validate_every=max(trainer.val_freq, 0) if can_validate else 0,
        validate_last=can_validate,
        save_every=max(trainer.save_freq, 0),
        generations_shown=trainer.val_generations_to_log,
        train_samples_every=max(trainer.train_samples_freq, 0),
    )


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

    They are those of training, changed by val_override_config.
    """
    changed = config.worker.rollout.val_override_config.model_dump(exclude_none=True)
    return replace(make_sampling_params(config), with_baseline=False, **changed)


def max_completion_tokens(config: Config) -> int:
    """Return the most tokens of a completion: of training, or with val_only of validation."""
    make = make_validation_sampling_params if config.trainer.val_only else make_sampling_params
    return make(config).max_tokens


def make_buffer_settings(config: Config, plan: Plan) -> BufferSettings:
    """Return when groups are sampled, and which are learned from."""
    algorithm, rollout = config.algorithm, config.worker.rollout
    group_filter = GroupFilter(
        key=algorithm.filter_key,
        low=algorithm.filter_low,
        high=algorithm.filter_high,
        prompts_per_round=config.prompts_per_round,
        max_rounds=max(0, config.trainer.max_try_make_batch),
        keep_surplus=algorithm.filter_surplus == "keep",
    )
    return BufferSettings(
        groups_per_step=plan.prompts_per_step,
        total_steps=plan.total_steps,
        max_staleness=algorithm.max_staleness,
        on_sync=rollout.partial,
        oversampling=rollout.oversampling,
        max_carried_steps=rollout.max_carried_steps,
        group_filter=group_filter if algorithm.online_filtering else None,
        has_pools=not config.worker.hybrid_engine,
    )


def make_initial_kl(config: Config) -> AdaptiveKl:
    """Return the coefficient of a KL in the reward at the first step. horizon 0: it stays fixed."""
    algorithm = config.algorithm
    horizon = algorithm.kl_horizon if algorithm.kl_type == "adaptive" else 0.0
    return AdaptiveKl(coefficient=algorithm.kl_coef, target=algorithm.kl_target, horizon=horizon)
