"""Checks of what moves to host memory: weights by FSDP, and activations."""

from __future__ import annotations

from collections.abc import Callable

from trigon.config.plan import has_critic, num_workers
from trigon.config.schema import Config, CriticModelConfig, ModelConfig


def _check_cpu_offload(config: Config) -> list[str]:
    if not config.worker.actor.fsdp.enable_cpu_offload or num_workers(config) > 1:
        return []
    return [
        "worker.actor.fsdp.enable_cpu_offload is true, but a single worker does not shard the model and cannot "
        "keep its weights in host memory; set it to false, and worker.actor.offload.offload_params=true to move "
        "them there while completions are sampled"
    ]


def _check_activation_offload(config: Config) -> list[str]:
    models: dict[str, ModelConfig | CriticModelConfig] = {"worker.actor.model": config.worker.actor.model}
    if has_critic(config):
        models["worker.critic.model"] = config.worker.critic.model
    return [
        f"{name}.enable_activation_offload is true without {name}.enable_gradient_checkpointing: what moves to host "
        "memory are the inputs of the layers that gradient checkpointing computes again, and without it all "
        "activations would have to move, which takes longer than computing them; set both to true"
        for name, model in models.items()
        if model.enable_activation_offload and not model.enable_gradient_checkpointing
    ]


OFFLOAD_CHECKS: tuple[Callable[[Config], list[str]], ...] = (_check_cpu_offload, _check_activation_offload)
