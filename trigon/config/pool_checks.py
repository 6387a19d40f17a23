"""Checks of separate pools of workers: those that learn, and those that sample."""

from __future__ import annotations

from collections.abc import Callable

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


def _check_max_staleness(config: Config) -> list[str]:
    staleness = config.algorithm.max_staleness
    if staleness == 0:
        return []
    if config.worker.hybrid_engine:
        return [
            f"algorithm.max_staleness is {staleness}, but the workers sample and learn in turns, so that every batch "
            f"has the newest weights; set {_SEPARATE}, or max_staleness=0"
        ]
    return []


def _check_partial(config: Config) -> list[str]:
    partial = config.worker.rollout.partial
    if partial == "finish" or (not config.worker.hybrid_engine and config.algorithm.max_staleness > 1):
        return []
    return [
        f"worker.rollout.partial={partial} needs {_SEPARATE} and algorithm.max_staleness above 1: otherwise all "
        "completions have ended when new weights arrive. Set max_staleness=2, or partial=finish"
    ]


POOL_CHECKS: tuple[Callable[[Config], list[str]], ...] = (
    _check_max_staleness,
    _check_partial,
)


def warn_of_pools(config: Config) -> list[str]:
    """Return warnings about options that have no effect."""
    rollout = config.worker.rollout
    if not config.worker.hybrid_engine:
        return []
    sizes = {"nnodes": rollout.nnodes, "n_gpus_per_node": rollout.n_gpus_per_node}
    return [f"worker.rollout.{key} has no effect without {_SEPARATE}" for key, size in sizes.items() if size != 1]
