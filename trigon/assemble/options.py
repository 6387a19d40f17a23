"""Makes the settings of each part from the configuration. Pure functions: no files, no devices."""

from __future__ import annotations

from trigon.algorithms.gae import GaeSettings
from trigon.algorithms.importance import Correction
from trigon.algorithms.kl import AdaptiveKl
from trigon.algorithms.losses import LossSettings
from trigon.config.batch_sizes import resolve_group_size
from trigon.config.defaults import (
    resolve_cispo_cap,
    resolve_loss_fixed_length,
    resolve_mismatch_correction,
    resolve_prompts_per_round,
    resolve_val_before_train,
)
from trigon.config.plan import Plan, shares_trunk, workers_per_machine
from trigon.config.schema import Config
from trigon.data.videos import FrameSampling
from trigon.loop import Intervals
from trigon.models.lora import LoraSettings
from trigon.rollout.buffer import BufferSettings
from trigon.rollout.filtering import GroupFilter
from trigon.system.cpus import count_usable_cpus
from trigon.training.step import LossTerms
from trigon.training.train_groups import AdvantageSettings
from trigon.training.value_terms import ValueTerms
from trigon.types import SamplingParams

"""The torch dtype of each value of an option of type Dtype."""


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
    return min(config.data.filter_overlong_prompts_workers, max(1, usable_cpus // workers_per_machine(config)))


# -- the KL term --------------------------------------------------------------------------------


def needs_reference(config: Config) -> bool:
    """Return whether a KL term with a coefficient above 0 needs a reference policy."""
    return not config.trainer.val_only and not config.algorithm.disable_kl and config.algorithm.kl_coef > 0


def kl_is_in_reward(config: Config) -> bool:
    """Return whether the KL is subtracted from the reward rather than added to the loss."""
    return needs_reference(config) and not config.algorithm.use_kl_loss


def kl_is_full(config: Config) -> bool:
    """Return whether the KL is computed exactly, over the whole vocabulary.

    The log-probabilities of the sampled tokens do not suffice for it.
    """
    return needs_reference(config) and config.algorithm.kl_penalty == "full"


def needs_old_logprobs(config: Config, plan: Plan) -> bool:
    """Return whether the trainer computes log-probabilities before the first update of a step.

    Several updates need them for their ratios, and a sampled KL in the reward for its estimate.
    """
    return plan.updates_per_step > 1 or (kl_is_in_reward(config) and not kl_is_full(config))


# -- settings, in the order in which a step uses them -------------------------------------------


def make_intervals(config: Config, *, can_validate: bool) -> Intervals:
    """Return when to validate, save and show completions.

    can_validate: there are validation prompts.
    """
    trainer = config.trainer
    return Intervals(
        validate_first=resolve_val_before_train(config) and can_validate,
        validate_only=trainer.val_only,
        validate_every=max(trainer.val_freq, 0) if can_validate else 0,
        validate_last=can_validate,
        save_every=max(trainer.save_freq, 0),
        generations_shown=trainer.val_generations_to_log,
        train_samples_every=max(trainer.train_samples_freq, 0),
        token_groups=trainer.rollout_tokens,
    )


def make_frame_sampling(config: Config) -> FrameSampling:
    """Return which frames of a video become part of the prompt."""
    return FrameSampling(fps=config.data.video_fps, max_frames=config.data.max_video_frames)


def make_sampling_params(config: Config) -> SamplingParams:
    """Return the sampling parameters of training."""
    rollout = config.worker.rollout
    return SamplingParams(
        n=resolve_group_size(config),
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
    override = config.worker.rollout.val_override_config
    training = make_sampling_params(config)
    return SamplingParams(
        n=training.n if override.n is None else override.n,
        temperature=training.temperature if override.temperature is None else override.temperature,
        top_p=training.top_p if override.top_p is None else override.top_p,
        top_k=training.top_k if override.top_k is None else override.top_k,
        max_tokens=training.max_tokens if override.max_tokens is None else override.max_tokens,
        ignore_eos=training.ignore_eos if override.ignore_eos is None else override.ignore_eos,
        seed=training.seed if override.seed is None else override.seed,
    )


def max_completion_tokens(config: Config) -> int:
    """Return the most tokens of a completion: of training, or with val_only of validation."""
    make = make_validation_sampling_params if config.trainer.val_only else make_sampling_params
    return make(config).max_tokens


def make_group_filter(config: Config) -> GroupFilter | None:
    """Return the filter of online_filtering; None: all groups are trained on."""
    algorithm = config.algorithm
    if not algorithm.online_filtering:
        return None
    return GroupFilter(
        key=algorithm.filter_key,
        low=algorithm.filter_low,
        high=algorithm.filter_high,
        prompts_per_round=resolve_prompts_per_round(config),
        max_rounds=max(0, config.trainer.max_try_make_batch),
        keep_surplus=algorithm.filter_surplus == "keep",
    )


def make_buffer_settings(config: Config, plan: Plan) -> BufferSettings:
    """Return when groups are sampled, and which are learned from."""
    rollout = config.worker.rollout
    return BufferSettings(
        groups_per_step=plan.prompts_per_step,
        total_steps=plan.total_steps,
        max_staleness=config.algorithm.max_staleness,
        on_sync=rollout.partial,
        oversampling=rollout.oversampling,
        max_carried_steps=rollout.max_carried_steps,
        group_filter=make_group_filter(config),
        has_pools=not config.worker.hybrid_engine,
    )


def make_advantage_settings(config: Config) -> AdvantageSettings:
    """Return how advantages are computed from rewards."""
    algorithm = config.algorithm
    return AdvantageSettings(
        estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        weights=algorithm.reward_weights or None,
        kl_in_reward=algorithm.kl_penalty if kl_is_in_reward(config) else None,
        mask_overlong=algorithm.overlong_filtering,
        gae=make_gae_settings(config) if algorithm.adv_estimator == "gae" else GaeSettings(),
    )


def make_gae_settings(config: Config) -> GaeSettings:
    """Return how rewards and values become advantages."""
    algorithm = config.algorithm
    return GaeSettings(
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        lam_critic=algorithm.lam_critic,
        lam_alpha=algorithm.lam_alpha,
        bootstraps_cut=algorithm.bootstrap_cut,
    )


def make_initial_kl(config: Config) -> AdaptiveKl:
    """Return the coefficient of a KL in the reward at the first step. horizon 0: it stays fixed."""
    algorithm = config.algorithm
    horizon = algorithm.kl_horizon if algorithm.kl_type == "adaptive" else 0.0
    return AdaptiveKl(coefficient=algorithm.kl_coef, target=algorithm.kl_target, horizon=horizon)


def make_loss_terms(config: Config) -> LossTerms:
    """Return the terms of the loss."""
    actor, algorithm = config.worker.actor, config.algorithm
    return LossTerms(
        policy=LossSettings(
            kind=actor.loss_type,
            clip_low=actor.clip_ratio_low,
            clip_high=actor.clip_ratio_high,
            clip_dual=actor.clip_ratio_dual,
            cap=resolve_cispo_cap(config),
            tau_positive=actor.tau_positive,
            tau_negative=actor.tau_negative,
        ),
        averaging=actor.loss_avg_mode,
        fixed_length=resolve_loss_fixed_length(config),
        kl_estimator=algorithm.kl_penalty if needs_reference(config) and algorithm.use_kl_loss else None,
        kl_coefficient=algorithm.kl_coef,
        entropy_coefficient=actor.entropy_coeff,
        correction=make_correction(config),
        values=make_value_terms(config) if shares_trunk(config) else None,
        value_coefficient=config.worker.critic.vf_coef if shares_trunk(config) else 0.0,
    )


def make_value_terms(config: Config) -> ValueTerms:
    """Return the loss of the critic."""
    critic = config.worker.critic
    return ValueTerms(clip=critic.cliprange_value, averaging=critic.loss_avg_mode)


def make_correction(config: Config) -> Correction | None:
    """Return the importance-sampling correction of the train-inference mismatch; None: off."""
    algorithm, kind = config.algorithm, resolve_mismatch_correction(config)
    if kind == "off":
        return None
    return Correction(
        kind=kind,
        level=algorithm.mismatch_level,
        low=algorithm.mismatch_low,
        high=algorithm.mismatch_high,
    )


def make_lora_settings(config: Config) -> LoraSettings:
    """Return the settings of the LoRA adapters."""
    lora = config.worker.actor.model.lora
    return LoraSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
    )
