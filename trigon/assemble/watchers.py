"""Makes what watches a run: the rules and the memory meter, and the watchdog of hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trigon.config.batch_sizes import resolve_group_size
from trigon.config.names import GROUP_ESTIMATORS
from trigon.config.plan import Plan, workers_per_machine
from trigon.config.schema import Config
from trigon.metrics import Metrics
from trigon.report.memory import MemoryGrowth, MemoryMeter
from trigon.report.watch import Watch
from trigon.rewards.pool import RewardPool

if TYPE_CHECKING:
    from trigon.assemble.pools import Workers


@contextmanager
def open_watchers(
    config: Config, plan: Plan, rewards: Sequence[RewardPool], workers: Workers | None, *, save_bytes: int
) -> Iterator[Watch]:
    """Yield the rules of a run, which measure the memory of all of its processes in the context.

    save_bytes: host memory into which a save copies the state, on one machine.
    """
    watch = config.trainer.watch
    object_store: Callable[[], Metrics] = dict
    if workers is not None and watch.level != "off" and "memory" not in watch.ignore:
        from trigon.distributed.cluster import object_store_metrics as object_store  # asks Ray in each step
    with MemoryMeter(
        reward_workers=lambda: [pid for pool in rewards for pid in pool.process_ids],
        workers=tuple if workers is None else workers.local_process_ids,
        object_store=object_store,
    ) as meter:
        yield Watch(
            watch,
            groups_compared=resolve_group_size(config) > 1 and config.algorithm.adv_estimator in GROUP_ESTIMATORS,
            completions_end=not config.worker.rollout.ignore_eos,
            memory=MemoryGrowth(plan.total_steps, num_workers=workers_per_machine(config), save_gb=save_bytes / 2**30),
            meter=meter,
        )
