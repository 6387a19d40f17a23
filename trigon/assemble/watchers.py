"""Makes the watchers of a run from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trigon.config.names import GROUP_ESTIMATORS
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.report.watch.meter import MemoryMeter
from trigon.report.watch.rules import Thresholds
from trigon.report.watch.watch import Watch, WatchSettings
from trigon.rewards.pool import RewardPool

if TYPE_CHECKING:
    from trigon.assemble.pools import Workers


@contextmanager
def open_watchers(
    config: Config, plan: Plan, rewards: Sequence[RewardPool], workers: Workers | None, *, save_bytes: int
) -> Iterator[Watch]:
    """Yield the watchers, which measure the memory of all processes of the run in the context.

    save_bytes: host memory into which a save copies the state, on one machine.
    """
    asks_ray = config.trainer.watch.memory != "off"
    with open_meter(rewards, workers, asks_ray=asks_ray) as meter:
        yield Watch(make_watch_settings(config, plan, save_bytes=save_bytes), meter)


def open_meter(rewards: Sequence[RewardPool], workers: Workers | None, *, asks_ray: bool) -> MemoryMeter:
    """Return what measures the memory of all processes of the run, until it is closed.

    asks_ray: Ray's object store is measured too, by a request to Ray in each step.
    """

    def reward_workers() -> Sequence[int]:
        return [process_id for pool in rewards for process_id in pool.process_ids]

    if workers is None:
        return MemoryMeter(reward_workers=reward_workers)
    if not asks_ray:
        return MemoryMeter(reward_workers=reward_workers, workers=workers.local_process_ids)
    from trigon.distributed.cluster import object_store_metrics

    return MemoryMeter(
        reward_workers=reward_workers, workers=workers.local_process_ids, object_store=object_store_metrics
    )


def make_watch_settings(config: Config, plan: Plan, *, save_bytes: int = 0) -> WatchSettings:
    """Return what the run's watchers are told. save_bytes: as for open_watchers."""
    watch, rollout = config.trainer.watch, config.worker.rollout
    return WatchSettings(
        levels={
            "loss": watch.loss,
            "kl": watch.kl,
            "entropy": watch.entropy,
            "length": watch.length,
            "equal_rewards": watch.equal_rewards,
            "reward_failures": watch.reward_failures,
            "mismatch": watch.mismatch,
            "validation": watch.validation,
            "critic": watch.critic,
            "memory": watch.memory,
        },
        thresholds=Thresholds(
            steps=watch.steps,
            equal_reward_steps=watch.equal_reward_steps,
            max_loss_growth=watch.max_loss_growth,
            max_kl=watch.max_kl,
            max_update_kl=watch.max_update_kl,
            min_entropy=watch.min_entropy,
            max_cut_fraction=watch.max_cut_fraction,
            min_length_fraction=watch.min_length_fraction,
            max_failed_fraction=watch.max_failed_fraction,
            max_mismatch_growth=watch.max_mismatch_growth,
            max_mismatch_kl=watch.max_mismatch_kl,
            max_validation_drop=watch.max_validation_drop,
            min_explained_variance=watch.min_explained_variance,
            critic_steps=watch.critic_steps,
            groups_compared=config.group_size > 1 and config.algorithm.adv_estimator in GROUP_ESTIMATORS,
            completions_end=not rollout.ignore_eos,
        ),
        memory_steps=watch.memory_steps,
        total_steps=plan.total_steps,
        num_workers=config.workers_per_machine,
        save_gb=save_bytes / 2**30,
    )
