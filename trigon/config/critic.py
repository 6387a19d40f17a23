"""The critic's options in the place of the policy's.

What reads the options of worker.actor to load, shard and train a model thereby does so for the
critic as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from trigon.config.batch_sizes import resolve_prompts_per_critic_update
from trigon.config.schema import (
    Config,
    CriticConfig,
    CriticFsdpConfig,
    CriticLoraConfig,
    CriticOffloadConfig,
    CriticOptimConfig,
    FsdpConfig,
    LoraConfig,
    OffloadConfig,
    OptimConfig,
    Section,
)

_BATCHES = (
    "global_batch_size",
    "micro_batch_size_per_device_for_update",
    "micro_batch_size_per_device_for_experience",
    "ppo_epochs",
)


def with_critic_as_actor(config: Config) -> Config:
    """Return the configuration with the model, optimizer, formats and batches of the critic.

    Its worker.actor has the values of worker.critic, and keeps its own kernels. With a shared trunk
    it keeps model, formats and batches as well: the critic has a loss and an optimizer only.
    """
    actor, critic = config.worker.actor, config.worker.critic
    of_head: dict[str, Any] = {
        "max_grad_norm": critic.max_grad_norm,
        "loss_avg_mode": critic.loss_avg_mode,
        "optim": _optim(critic.optim),
    }
    if critic.share_trunk:
        return _with_actor(config, of_head)
    model = actor.model.model_copy(
        update={
            "model_path": resolve_critic_path(config),
            "override_config": resolve_critic_override(config),
            "enable_gradient_checkpointing": critic.model.enable_gradient_checkpointing,
            "enable_activation_offload": critic.model.enable_activation_offload,
            "trust_remote_code": critic.model.trust_remote_code,
            "freeze_vision_tower": critic.model.freeze_vision_tower,
            "lora": _lora(critic.model.lora),
        }
    )
    return _with_actor(
        config,
        of_head
        | {
            "global_batch_size": resolve_prompts_per_critic_update(config),
            "micro_batch_size_per_device_for_update": critic.micro_batch_size_per_device_for_update,
            "micro_batch_size_per_device_for_experience": critic.micro_batch_size_per_device_for_experience,
            "ppo_epochs": critic.ppo_epochs,
            "model": model,
            "fsdp": _fsdp(critic.fsdp),
            "offload": _offload(critic.offload),
        },
    )


def resolve_critic_path(config: Config) -> str | None:
    """Return the model that the critic starts from. Default: the policy's."""
    return config.worker.critic.model.model_path or config.worker.actor.model.model_path


def resolve_critic_override(config: Config) -> dict[str, Any]:
    """Return the values to set in the critic's config. Default: the policy's, of its own model."""
    critic = config.worker.critic.model
    if critic.override_config or critic.model_path is not None:
        return critic.override_config
    return config.worker.actor.model.override_config


def find_contradictions(config: Config) -> list[str]:
    """Return the options of a critic with a shared trunk that contradict the actor's, which apply.

    Each as "worker.critic.x=1 (worker.actor.x=2)"; those that have their defaults are left out.
    """
    return [
        f"worker.critic.{name}={json.dumps(value)} (worker.actor.{name}={json.dumps(applies)})"
        for name, value, applies, is_default in _unlike_actor(config)
        if not is_default
    ]


def warn_of_overruled(config: Config, names: Collection[str]) -> list[str]:
    """Return warnings about options of a critic with a shared trunk that are set to their defaults.

    The actor's apply. names: of the options that were set on purpose; in a file they may be a copy
    of all defaults.
    """
    return [
        f"worker.critic.{name}={json.dumps(value)} has no effect: with worker.critic.share_trunk=true "
        f"worker.actor.{name}={json.dumps(applies)} applies"
        for name, value, applies, is_default in _unlike_actor(config)
        if is_default and f"worker.critic.{name}" in names
    ]


def _unlike_actor(config: Config) -> Iterator[tuple[str, Any, Any, bool]]:
    """Yield each option of the critic that a shared trunk takes from the actor, and that differs.

    As (name below worker.critic, its value, the actor's, whether its value is the default).
    """
    actor, critic, defaults = config.worker.actor, config.worker.critic, CriticConfig()
    sections: tuple[tuple[str, Section, Section, Section], ...] = (
        ("", critic, actor, defaults),
        ("model.", critic.model, actor.model, defaults.model),
        ("model.lora.", critic.model.lora, actor.model.lora, defaults.model.lora),
        ("fsdp.", critic.fsdp, actor.fsdp, defaults.fsdp),
        ("offload.", critic.offload, actor.offload, defaults.offload),
    )
    for prefix, own, actors, default in sections:
        for name in sorted(_BATCHES if prefix == "" else type(default).model_fields.keys() - {"lora"}):
            value, applies = getattr(own, name), getattr(actors, name)
            if value != applies:
                yield f"{prefix}{name}", value, applies, value == getattr(default, name)


def as_critic(name: str) -> str:
    """Return the name of the critic's option for one of the actor's, also within a text."""
    return name.replace("worker.actor.", "worker.critic.")


def _with_actor(config: Config, changes: dict[str, Any]) -> Config:
    changed = config.worker.actor.model_copy(update=changes)
    return config.model_copy(update={"worker": config.worker.model_copy(update={"actor": changed})})


# Every key by its name, so that one that nothing reads is found by a test.


def _lora(lora: CriticLoraConfig) -> LoraConfig:
    return LoraConfig(
        rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules, exclude_modules=lora.exclude_modules
    )


def _optim(optim: CriticOptimConfig) -> OptimConfig:
    return OptimConfig(
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        strategy=optim.strategy,
        lr_warmup_ratio=optim.lr_warmup_ratio,
        lr_warmup_steps=optim.lr_warmup_steps,
        min_lr_ratio=optim.min_lr_ratio,
        lr_scheduler_type=optim.lr_scheduler_type,
    )


def _fsdp(fsdp: CriticFsdpConfig) -> FsdpConfig:
    return FsdpConfig(
        torch_dtype=fsdp.torch_dtype,
        mp_param_dtype=fsdp.mp_param_dtype,
        mp_reduce_dtype=fsdp.mp_reduce_dtype,
        enable_full_shard=fsdp.enable_full_shard,
        fsdp_size=fsdp.fsdp_size,
        enable_cpu_offload=fsdp.enable_cpu_offload,
    )


def _offload(offload: CriticOffloadConfig) -> OffloadConfig:
    return OffloadConfig(offload_params=offload.offload_params, offload_optimizer=offload.offload_optimizer)
