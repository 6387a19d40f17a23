"""From a configuration to the settings of each part: pure functions, no files and no devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trigon.algorithms.importance import Correction
from trigon.algorithms.kl import AdaptiveKl
from trigon.algorithms.losses import LossSettings
from trigon.batch import GroupFilter
from trigon.config.schema import Config
from trigon.data.videos import FrameSampling
from trigon.loop import Intervals
from trigon.models.lora import LoraSettings
from trigon.train_groups import AdvantageSettings
from trigon.training.step import LossTerms
from trigon.types import SamplingParams



DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


EXACT_PARITY_TOLERANCE = 1e-3
"""Mean |log-prob difference| tolerated where both engines compute in float32; they agree to about 1e-5."""


ROUNDED_PARITY_TOLERANCE = 0.1
"""The same where either computes in 16 bits; healthy runs lie near 0.01."""


def run_folder(config: Config) -> Path:
    """Return the folder of a run: its checkpoints, metrics and rollouts."""
    trainer = config.trainer
    return Path(trainer.save_checkpoint_path or Path("checkpoints") / trainer.project_name / trainer.experiment_name)


def model_path(config: Config) -> str:
    """Return the model to start from; config/checks.py has refused a configuration without one."""
    path = config.worker.actor.model.model_path
    assert path is not None
    return path


def video_sampling(config: Config) -> FrameSampling:
    """Return which frames of a video are shown."""
    return FrameSampling(fps=config.data.video_fps, max_frames=config.data.max_video_frames)


def data_workers(config: Config) -> int:
    """Return how many threads build prompts: as configured, but no more than there are cores."""
    return min(config.data.filter_overlong_prompts_workers, os.cpu_count() or 1)


def lora_settings(config: Config) -> LoraSettings:
    """Return which adapters are trained."""
    lora = config.worker.actor.model.lora
    return LoraSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
    )


def needs_reference(config: Config) -> bool:
    """Tell whether any term needs a reference policy: a KL with a coefficient of 0 is none."""
    return not config.algorithm.disable_kl and config.algorithm.kl_coef > 0


def kl_is_in_reward(config: Config) -> bool:
    """Tell whether the KL is taken from the reward, rather than added to the loss."""
    return needs_reference(config) and not config.algorithm.use_kl_loss


def kl_is_full(config: Config) -> bool:
    """Tell whether the KL is that of whole distributions, which log-probabilities of sampled tokens cannot give."""
    return needs_reference(config) and config.algorithm.kl_penalty == "full"


def loss_terms(config: Config) -> LossTerms:
    """Return which loss an update minimises."""
    actor, algorithm = config.worker.actor, config.algorithm
    return LossTerms(
        policy=LossSettings(
            kind=actor.loss_type,
            clip_low=actor.clip_ratio_low,
            clip_high=actor.clip_ratio_high,
            clip_dual=actor.clip_ratio_dual,
            cap=1.0 + actor.clip_ratio_high if actor.cispo_cap is None else actor.cispo_cap,
            tau_positive=actor.tau_positive,
            tau_negative=actor.tau_negative,
        ),
        averaging=actor.loss_avg_mode,
        fixed_length=actor.loss_fixed_length or config.data.max_response_length,
        kl_estimator=algorithm.kl_penalty if needs_reference(config) and algorithm.use_kl_loss else None,
        kl_coefficient=algorithm.kl_coef,
        entropy_coefficient=actor.entropy_coeff,
        correction=correction(config),
    )


def correction(config: Config) -> Correction | None:
    """Return what is done where engine and trainer disagree."""
    algorithm = config.algorithm
    if algorithm.mismatch_correction == "off":
        return None
    return Correction(
        kind=algorithm.mismatch_correction,
        level=algorithm.mismatch_level,
        low=algorithm.mismatch_low,
        high=algorithm.mismatch_high,
    )


def group_filter(config: Config) -> GroupFilter | None:
    """Return which groups are learned from; None: all."""
    algorithm, data = config.algorithm, config.data
    if not algorithm.online_filtering:
        return None
    return GroupFilter(
        key=algorithm.filter_key,
        low=algorithm.filter_low,
        high=algorithm.filter_high,
        prompts_per_round=data.mini_rollout_batch_size or data.rollout_batch_size,
        max_rounds=max(0, config.trainer.max_try_make_batch),
        keep_surplus=algorithm.filter_surplus == "keep",
    )


def advantage_settings(config: Config) -> AdvantageSettings:
    """Return how rewards become advantages."""
    algorithm = config.algorithm
    return AdvantageSettings(
        estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        weights=algorithm.reward_weights or None,
        kl_in_reward=algorithm.kl_penalty if kl_is_in_reward(config) else None,
        mask_overlong=algorithm.overlong_filtering,
    )


def initial_kl(config: Config) -> AdaptiveKl:
    """Return the coefficient of a KL in the reward, fixed or adaptive."""
    algorithm = config.algorithm
    horizon = algorithm.kl_horizon if algorithm.kl_type == "adaptive" else 0.0
    return AdaptiveKl(coefficient=algorithm.kl_coef, target=algorithm.kl_target, horizon=horizon)


def parity_tolerance(config: Config) -> float:
    """Return how far rollout engine and trainer may differ before the run stops."""
    rollout, fsdp = config.worker.rollout, config.worker.actor.fsdp
    if rollout.parity_tolerance is not None:
        return rollout.parity_tolerance
    exact = rollout.dtype == fsdp.mp_param_dtype == (fsdp.torch_dtype or "fp32") == "fp32"
    return EXACT_PARITY_TOLERANCE if exact else ROUNDED_PARITY_TOLERANCE


def sampling_params(config: Config) -> SamplingParams:
    """Return how training samples."""
    rollout = config.worker.rollout
    return SamplingParams(
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed,
    )


def validation_sampling_params(config: Config) -> SamplingParams:
    """Return how validation samples: as training, but for what val_override_config says."""
    override = config.worker.rollout.val_override_config
    training = sampling_params(config)
    return SamplingParams(
        n=training.n if override.n is None else override.n,
        temperature=training.temperature if override.temperature is None else override.temperature,
        top_p=training.top_p if override.top_p is None else override.top_p,
        top_k=training.top_k if override.top_k is None else override.top_k,
        max_tokens=training.max_tokens if override.max_tokens is None else override.max_tokens,
        ignore_eos=training.ignore_eos if override.ignore_eos is None else override.ignore_eos,
        seed=training.seed if override.seed is None else override.seed,
    )


def intervals(config: Config, *, can_validate: bool) -> Intervals:
    """Return when to validate, save and show answers."""
    trainer = config.trainer
    return Intervals(
        validate_first=trainer.val_before_train and can_validate,
        validate_only=trainer.val_only,
        validate_every=max(trainer.val_freq, 0) if can_validate else 0,
        validate_last=can_validate,
        save_every=max(trainer.save_freq, 0),
        generations_shown=trainer.val_generations_to_log,
    )
