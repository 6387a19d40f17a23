"""Checks of the options of the critic, of algorithm.adv_estimator=gae."""

from __future__ import annotations

from collections.abc import Callable

from trigon.config.batch_sizes import resolve_prompts_per_critic_update, resolve_prompts_per_step
from trigon.config.critic import find_contradictions
from trigon.config.plan import (
    critic_warmup,
    has_critic,
    join_with_or,
    num_workers,
    shares_trunk,
    suggest_batch_sizes,
    too_long_critic_warmup,
)
from trigon.config.schema import Config, CriticConfig


def _check_batch_sizes(config: Config) -> list[str]:
    per_step, per_update = resolve_prompts_per_step(config), resolve_prompts_per_critic_update(config)
    if not has_critic(config) or shares_trunk(config) or per_step % per_update == 0:
        return []
    steps, updates = suggest_batch_sizes(per_step, per_update)
    return [
        f"data.rollout_batch_size ({per_step} prompts per step) is not a multiple of worker.critic.global_batch_size "
        f"({per_update} prompts per update of the critic); the nearest valid values: data.rollout_batch_size="
        f"{join_with_or(steps)}, or worker.critic.global_batch_size={join_with_or(updates)}"
    ]


def _check_formats(config: Config) -> list[str]:
    if not has_critic(config) or shares_trunk(config):
        return []
    fsdp, strategy = config.worker.critic.fsdp, config.worker.critic.optim.strategy
    if fsdp.mp_param_dtype == "fp16":
        return ["worker.critic.fsdp.mp_param_dtype is fp16, which gradients underflow; set it to bf16 or fp32"]
    if config.worker.critic.model.lora.rank > 0 or fsdp.torch_dtype in (None, "fp32"):
        return []
    if fsdp.torch_dtype == "fp16" or strategy == "adamw":
        return [
            f"worker.critic.fsdp.torch_dtype is {fsdp.torch_dtype} with worker.critic.optim.strategy={strategy}, which "
            "rounds almost every update to nothing; set worker.critic.fsdp.torch_dtype=bf16 "
            "worker.critic.optim.strategy=adamw_bf16, or worker.critic.fsdp.torch_dtype=fp32"
        ]
    return []


def _check_sharding(config: Config) -> list[str]:
    if not has_critic(config) or shares_trunk(config):
        return []
    fsdp, workers = config.worker.critic.fsdp, num_workers(config)
    problems = []
    if 0 < fsdp.fsdp_size < workers and workers % fsdp.fsdp_size:
        problems.append(
            f"worker.critic.fsdp.fsdp_size is {fsdp.fsdp_size}, but there are {workers} workers, which it must divide; "
            "set it to -1 for all"
        )
    return problems


def _check_warmup(config: Config) -> list[str]:
    steps = config.trainer.max_steps
    if steps is None or critic_warmup(config) < steps:
        return []
    return [too_long_critic_warmup(config, steps)]


def _check_shared_trunk(config: Config) -> list[str]:
    if not shares_trunk(config):
        return []
    return [
        f"{found} does not go with worker.critic.share_trunk=true: policy and critic are one model, which is updated "
        "once with both losses, so that the actor's value applies; leave it out, or set worker.critic.share_trunk=false"
        for found in find_contradictions(config)
    ]


CRITIC_CHECKS: tuple[Callable[[Config], list[str]], ...] = (
    _check_batch_sizes,
    _check_formats,
    _check_sharding,
    _check_warmup,
    _check_shared_trunk,
)
"""Checks across options of the critic."""


def warn_of_critic(config: Config) -> list[str]:
    """Return warnings about options of a critic that have no effect."""
    algorithm, critic = config.algorithm, config.worker.critic
    if algorithm.adv_estimator == "gae":
        if critic.share_trunk or critic.vf_coef == CriticConfig().vf_coef:
            return []
        return ["worker.critic.vf_coef has no effect without worker.critic.share_trunk=true: the critic has its model"]
    options = [
        ("algorithm.lam", algorithm.lam != 1),
        ("algorithm.lam_critic", algorithm.lam_critic is not None),
        ("algorithm.lam_alpha", algorithm.lam_alpha is not None),
        ("algorithm.bootstrap_cut=true", algorithm.bootstrap_cut),
        ("worker.critic", critic != CriticConfig()),
        ("trainer.critic_warmup", config.trainer.critic_warmup != 0),
    ]
    return [f"{name} has no effect without algorithm.adv_estimator=gae" for name, is_set in options if is_set]
