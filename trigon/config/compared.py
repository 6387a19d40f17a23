"""The options on which a run's numbers depend: a checkpoint is compared with them on resuming.

Options that change a result by rounding only are not among them: the number of workers, memory,
kernels, token budgets of passes. Nor is what says how long a run is, or what it writes. Files are
compared by content, elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from trigon.config.options import options
from trigon.config.plan import find_unknown_sizes, with_critic_as_actor
from trigon.config.schema import Config
from trigon.system.suggestions import nearest_key

_MAX_NAME = 100
_MAX_UNKNOWN = 10  # problems, each of which takes time to find the nearest name

ALL = "all"
"""Stands in trainer.accept_changes for every name."""


def compared_options(config: Config) -> dict[str, Any]:
    """Return the value of each option on which numbers depend, as JSON, by its name.

    An option without effect in this configuration is left out, and one whose default follows from
    others has the value that it stands for. Sizes that follow from the data are left out as long as
    they are null (see fill_batch_sizes).
    """
    values = {**_data(config), **_algorithm(config), **_actor(config), **_rollout(config), **_episodes(config)}
    if config.algorithm.adv_estimator == "gae":
        values |= _critic(config)
    for name in find_unknown_sizes(config):
        values.pop(name, None)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def is_accepted(name: str, accepted: Collection[str]) -> bool:
    """Return whether a change of an option is accepted. accepted: as trainer.accept_changes."""
    return name in accepted or ALL in accepted


def find_unknown_names(config: Config) -> list[str]:
    """Return a problem for each name in trainer.accept_changes that is no option."""
    known = [*(option.name for option in options().values()), ALL]
    unknown = [name[:_MAX_NAME] for name in config.trainer.accept_changes if name not in known]
    return [
        f"trainer.accept_changes has {name!r}, which is not the name of an option; did you mean "
        f"{nearest_key(name, known)}?"
        for name in unknown[:_MAX_UNKNOWN]
    ]


def _data(config: Config) -> dict[str, Any]:
    data = config.data
    return {
        "data.prompt_key": data.prompt_key,
        "data.answer_key": data.answer_key,
        "data.image_key": data.image_key,
        "data.video_key": data.video_key,
        "data.video_fps": data.video_fps,
        "data.max_video_frames": data.max_video_frames,
        "data.max_response_length": data.max_response_length,
        "data.rollout_batch_size": data.rollout_batch_size,
        "data.system_prompt": data.system_prompt,
        "data.allow_special_tokens": data.allow_special_tokens,
        "data.shuffle": data.shuffle,
        "data.seed": data.seed,
        "data.min_pixels": data.min_pixels,
        "data.max_pixels": data.max_pixels,
    }


def _algorithm(config: Config) -> dict[str, Any]:
    algorithm = config.algorithm
    values: dict[str, Any] = {
        "algorithm.adv_estimator": algorithm.adv_estimator,
        "algorithm.disable_kl": algorithm.disable_kl,
        "algorithm.online_filtering": algorithm.online_filtering,
        "algorithm.overlong_filtering": algorithm.overlong_filtering,
        "algorithm.mismatch_correction": config.mismatch_correction,
    }
    if algorithm.adv_estimator == "reinforce_plus_plus":
        values["algorithm.gamma"] = algorithm.gamma
    if algorithm.adv_estimator == "gdpo":
        values["algorithm.reward_weights"] = dict(algorithm.reward_weights)
    if not algorithm.disable_kl:
        values |= {
            "algorithm.kl_coef": algorithm.kl_coef,
            "algorithm.kl_penalty": algorithm.kl_penalty,
            "algorithm.use_kl_loss": algorithm.use_kl_loss,
            "worker.ref.fsdp.torch_dtype": config.worker.ref.dtype,
        }
        if not algorithm.use_kl_loss:
            values["algorithm.kl_type"] = algorithm.kl_type
            if algorithm.kl_type == "adaptive":
                values |= {
                    "algorithm.kl_horizon": algorithm.kl_horizon,
                    "algorithm.kl_target": algorithm.kl_target,
                }
    if algorithm.online_filtering:
        values |= {
            "algorithm.filter_key": algorithm.filter_key,
            "algorithm.filter_low": algorithm.filter_low,
            "algorithm.filter_high": algorithm.filter_high,
            "algorithm.filter_surplus": algorithm.filter_surplus,
            "data.mini_rollout_batch_size": config.prompts_per_round,
            "trainer.max_try_make_batch": max(0, config.trainer.max_try_make_batch),
        }
    if algorithm.max_staleness > 0:
        values["algorithm.max_staleness"] = algorithm.max_staleness
    if values["algorithm.mismatch_correction"] != "off":
        values |= {
            "algorithm.mismatch_level": algorithm.mismatch_level,
            "algorithm.mismatch_low": algorithm.mismatch_low,
            "algorithm.mismatch_high": algorithm.mismatch_high,
        }
    return values


def _actor(config: Config) -> dict[str, Any]:
    actor, model, optim, lora = (
        config.worker.actor,
        config.worker.actor.model,
        config.worker.actor.optim,
        config.worker.actor.model.lora,
    )
    values: dict[str, Any] = {
        "worker.actor.global_batch_size": actor.global_batch_size,
        "worker.actor.ppo_epochs": actor.ppo_epochs,
        "worker.actor.max_grad_norm": actor.max_grad_norm,
        "worker.actor.entropy_coeff": actor.entropy_coeff,
        "worker.actor.loss_type": actor.loss_type,
        "worker.actor.loss_avg_mode": actor.loss_avg_mode,
        "worker.actor.model.override_config": json.dumps(model.override_config, sort_keys=True, default=str),
        "worker.actor.model.freeze_vision_tower": model.freeze_vision_tower,
        "worker.actor.model.lora.rank": lora.rank,
        "worker.actor.optim.lr": optim.lr,
        "worker.actor.optim.betas": optim.betas,
        "worker.actor.optim.weight_decay": optim.weight_decay,
        "worker.actor.optim.strategy": optim.strategy,
        "worker.actor.optim.lr_scheduler_type": optim.lr_scheduler_type,
        "worker.actor.optim.lr_warmup_steps": optim.lr_warmup_steps,
        "worker.actor.fsdp.torch_dtype": config.worker.actor.weight_dtype,
        "worker.actor.fsdp.mp_param_dtype": actor.fsdp.mp_param_dtype,
    }
    if actor.loss_type == "sapo":
        values |= {"worker.actor.tau_positive": actor.tau_positive, "worker.actor.tau_negative": actor.tau_negative}
    else:
        values |= {
            "worker.actor.clip_ratio_low": actor.clip_ratio_low,
            "worker.actor.clip_ratio_high": actor.clip_ratio_high,
            "worker.actor.clip_ratio_dual": actor.clip_ratio_dual,
        }
    if actor.loss_type == "cispo":
        values["worker.actor.cispo_cap"] = config.worker.actor.max_cispo_weight
    if actor.loss_avg_mode == "seq_fixed":
        values["worker.actor.loss_fixed_length"] = config.loss_fixed_length
    if lora.rank > 0:
        values |= {
            "worker.actor.model.lora.alpha": lora.alpha,
            "worker.actor.model.lora.target_modules": lora.target_modules,
            "worker.actor.model.lora.exclude_modules": lora.exclude_modules,
        }
    if optim.lr_warmup_steps is None:
        values["worker.actor.optim.lr_warmup_ratio"] = optim.lr_warmup_ratio
    if optim.lr_scheduler_type == "cosine":
        values["worker.actor.optim.min_lr_ratio"] = optim.min_lr_ratio or 0.0
    return values


_OF_POLICY_LOSS = ("entropy_coeff", "loss_type", "tau_positive", "tau_negative", "cispo_cap", "loss_fixed_length")


def _critic(config: Config) -> dict[str, Any]:
    """Return the options of gae and its critic, which are those of a policy but for the loss.

    A critic with a shared trunk has those of its optimizer.
    """
    algorithm, critic = config.algorithm, config.worker.critic
    of_model = {
        name.replace("worker.actor.", "worker.critic."): value
        for name, value in _actor(with_critic_as_actor(config)).items()
        if not name.startswith("worker.actor.clip_ratio") and name.rpartition(".")[2] not in _OF_POLICY_LOSS
    }
    if critic.share_trunk:
        of_head = ("worker.critic.optim.", "worker.critic.max_grad_norm", "worker.critic.loss_avg_mode")
        of_model = {name: value for name, value in of_model.items() if name.startswith(of_head)}
        of_model["worker.critic.vf_coef"] = critic.vf_coef
    return {
        "algorithm.gamma": algorithm.gamma,
        "algorithm.lam": algorithm.lam,
        "algorithm.lam_critic": algorithm.lam_critic,
        "algorithm.lam_alpha": algorithm.lam_alpha,
        "algorithm.bootstrap_cut": algorithm.bootstrap_cut,
        "trainer.critic_warmup": config.trainer.critic_warmup,
        "worker.critic.share_trunk": critic.share_trunk,
        "worker.critic.cliprange_value": critic.cliprange_value,
        **of_model,
    }


def _rollout(config: Config) -> dict[str, Any]:
    rollout, override = config.worker.rollout, config.worker.rollout.val_override_config
    prefix = "worker.rollout.val_override_config."
    oversampling: dict[str, Any] = {"worker.rollout.oversampling": rollout.oversampling}
    if rollout.oversampling > 0:
        oversampling["worker.rollout.max_carried_steps"] = rollout.max_carried_steps
    if config.algorithm.max_staleness > 1:
        oversampling["worker.rollout.partial"] = rollout.partial
    return {
        **oversampling,
        "worker.rollout.name": rollout.name,
        "worker.rollout.n": config.group_size,
        "worker.rollout.temperature": rollout.temperature,
        "worker.rollout.top_p": rollout.top_p,
        "worker.rollout.top_k": rollout.top_k,
        "worker.rollout.seed": rollout.seed,
        "worker.rollout.ignore_eos": rollout.ignore_eos,
        "worker.rollout.dtype": rollout.dtype,
        f"{prefix}n": override.n,
        f"{prefix}temperature": override.temperature,
        f"{prefix}top_p": override.top_p,
        f"{prefix}top_k": override.top_k,
        f"{prefix}seed": override.seed,
        f"{prefix}ignore_eos": override.ignore_eos,
        f"{prefix}max_tokens": override.max_tokens,
        "worker.reward.skip_special_tokens": config.worker.reward.skip_special_tokens,
    }


def _episodes(config: Config) -> dict[str, Any]:
    """Return the options of episodes. The code of environments and tools is compared elsewhere."""
    rollout = config.worker.rollout
    if not config.worker.rollout.has_episodes:
        return {}
    values: dict[str, Any] = {
        "worker.rollout.observation_role": config.worker.rollout.role_of_observations,
        "worker.rollout.max_turns": rollout.max_turns,
        "worker.rollout.max_turn_tokens": rollout.max_turn_tokens,
    }
    if rollout.tools:
        values["worker.rollout.tool_format"] = rollout.tool_format
    return values


def schedule_depends_on_length(config: Config) -> bool:
    """Return whether the learning rate at a step depends on how many steps the run has."""
    models = [config, *([with_critic_as_actor(config)] if config.algorithm.adv_estimator == "gae" else [])]
    return any(_optim_depends_on_length(each) for each in models)


def _optim_depends_on_length(config: Config) -> bool:
    optim = config.worker.actor.optim
    warms_up_by_share = optim.lr_warmup_steps is None and optim.lr_warmup_ratio > 0
    return warms_up_by_share or optim.lr_scheduler_type != "constant"
