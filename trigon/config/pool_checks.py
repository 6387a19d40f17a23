"""Checks of separate pools of workers: those that learn, and those that sample."""

from __future__ import annotations

from collections.abc import Callable

from trigon.config.episode_checks import has_episodes
from trigon.config.plan import join_with_or, num_samplers
from trigon.config.schema import Config

_SEPARATE = "worker.hybrid_engine=false"


def describe_samplers(config: Config) -> tuple[str, str]:
    """Return how many workers sample, and the divisors of their number, as text."""
    trainer, rollout, size = config.trainer, config.worker.rollout, num_samplers(config)
    divisors = join_with_or([number for number in range(1, size + 1) if size % number == 0])
    if config.worker.hybrid_engine:
        keys, nodes, per_node = "trainer.nnodes x trainer.n_gpus_per_node", trainer.nnodes, trainer.n_gpus_per_node
    else:
        keys, nodes, per_node = (
            "worker.rollout.nnodes x worker.rollout.n_gpus_per_node",
            rollout.nnodes,
            rollout.n_gpus_per_node,
        )
    return f"there are {nodes} x {per_node} = {size} workers ({keys})", divisors


def _check_engine(config: Config) -> list[str]:
    if config.worker.hybrid_engine or config.worker.rollout.name == "vllm":
        return []
    return [
        f"{_SEPARATE} needs worker.rollout.name=vllm, not {config.worker.rollout.name}, which loads no weights "
        "from other processes"
    ]


def _check_max_staleness(config: Config) -> list[str]:
    staleness = config.algorithm.max_staleness
    if staleness == 0:
        return []
    if config.worker.hybrid_engine:
        return [
            f"algorithm.max_staleness is {staleness}, but the workers sample and learn in turns, so that every batch "
            f"has the newest weights; set {_SEPARATE}, or max_staleness=0"
        ]
    if config.algorithm.online_filtering:
        return [
            f"algorithm.max_staleness={staleness} samples groups while others are learned from, which "
            "algorithm.online_filtering=true does not support; set one of them to 0 or false"
        ]
    return []


def _check_streaming(config: Config) -> list[str]:
    """Return what sampling further ahead than one batch cannot be combined with."""
    staleness, rollout = config.algorithm.max_staleness, config.worker.rollout
    if config.worker.hybrid_engine or staleness <= 1:
        if rollout.partial == "finish":
            return []
        return [
            f"worker.rollout.partial={rollout.partial} needs {_SEPARATE} and algorithm.max_staleness above 1: "
            "otherwise all completions have ended when new weights arrive. Set max_staleness=2, or partial=finish"
        ]
    conflicts = (
        (
            rollout.tensor_parallel_size > 1,
            f"with worker.rollout.tensor_parallel_size={rollout.tensor_parallel_size} the ranks of a replica would not "
            "stop after the same forward pass when new weights arrive; set it to 1",
        ),
        (
            has_episodes(config),
            "an environment, or tools, cannot be left and gone on with under other weights; leave them out",
        ),
        (
            config.algorithm.adv_estimator == "remax",
            "algorithm.adv_estimator=remax compares completions of the same weights; choose another estimator",
        ),
    )
    return [
        f"algorithm.max_staleness is {staleness}, which samples all the time, but {reason}, or max_staleness=1"
        for applies, reason in conflicts
        if applies
    ]


def _check_no_oversampling(config: Config) -> list[str]:
    if config.worker.hybrid_engine or config.worker.rollout.oversampling == 0:
        return []
    return [
        f"worker.rollout.oversampling is {config.worker.rollout.oversampling:g}, but it is for workers that sample and "
        f"learn in turns; set it to 0, or leave out {_SEPARATE}"
    ]


POOL_CHECKS: tuple[Callable[[Config], list[str]], ...] = (
    _check_engine,
    _check_max_staleness,
    _check_streaming,
    _check_no_oversampling,
)


def warn_of_pools(config: Config) -> list[str]:
    """Return warnings about options that have no effect."""
    rollout = config.worker.rollout
    if not config.worker.hybrid_engine:
        return []
    sizes = {"nnodes": rollout.nnodes, "n_gpus_per_node": rollout.n_gpus_per_node}
    return [f"worker.rollout.{key} has no effect without {_SEPARATE}" for key, size in sizes.items() if size != 1]
