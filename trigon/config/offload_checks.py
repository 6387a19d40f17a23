"""Checks of what moves to host memory: weights by FSDP, and activations."""

from __future__ import annotations

from collections.abc import Callable

from trigon.config.plan import has_critic, num_workers, shares_trunk
from trigon.config.schema import Config, CriticModelConfig, ModelConfig


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


OFFLOAD_CHECKS: tuple[Callable[[Config], list[str]], ...] = (_check_activation_offload,)


def warn_of_cpu_offload(config: Config) -> list[str]:
    """Return warnings about weights that stay on the device, since a single worker has them."""
    names = ["actor"]
    if has_critic(config) and not shares_trunk(config):
        names.append("critic")
    return [
        f"worker.{name}.fsdp.enable_cpu_offload=true has no effect with a single worker, which shards nothing; "
        f"worker.{name}.offload.offload_params=true and worker.{name}.offload.offload_optimizer=true move weights and "
        "optimizer states to host memory while completions are sampled"
        for name in names
        if getattr(config.worker, name).fsdp.enable_cpu_offload and num_workers(config) == 1
    ]
