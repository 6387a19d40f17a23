"""Makes what watches a run: the rules and the memory meter, and the watchdog of hangs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trigon.config.files import hub_names
from trigon.config.names import GROUP_ESTIMATORS
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.metrics import Metrics
from trigon.report.console import Console
from trigon.report.memory_growth import MemoryGrowth, MemoryMeter
from trigon.report.watch import Watch
from trigon.rewards.pool import RewardPool
from trigon.rollout.restart import RESTART
from trigon.system.hangs import FOLLOWS, START, HangWatch, Watchdog
from trigon.system.processes import Started

if TYPE_CHECKING:
    from trigon.assemble.pools import Workers

SLOW_SECONDS = 3600.0
"""The least limit of the start, of loading and of saving, as of the calls of workers."""

EXPORT = "export"
"""The phase of the export after the last step. It has no limit, since it reports no progress."""

_STARTING = (START, "scan ", "load model", "start rollout engine", "measure memory")
_SLOW = (*_STARTING, RESTART, "save_checkpoint")
_WORKERS_SECONDS = 60.0  # longer than the deadlines of calls, whose errors name the rank
_MIN_UNWIND_SECONDS, _MAX_UNWIND_SECONDS = 10.0, 120.0


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
            groups_compared=config.group_size > 1 and config.algorithm.adv_estimator in GROUP_ESTIMATORS,
            completions_end=not config.worker.rollout.ignore_eos,
            memory=MemoryGrowth(plan.total_steps, num_workers=config.workers_per_machine, save_gb=save_bytes / 2**30),
            meter=meter,
        )


def open_hang_watch(config: Config, folder: Path, console: Console, others: Sequence[Started] = ()) -> HangWatch:
    """Start the watchdog of a run. folder: of the run. others: as for Watchdog."""
    if not hasattr(os, "memfd_create"):  # not Linux
        console.warn("this system has no memory files: trainer.worker_timeout_seconds is for calls of workers only")
        return HangWatch()
    limit = config.trainer.worker_timeout_seconds
    return Watchdog(
        folder,
        partial(limit_of, config, bool(hub_names(config))),
        option="trainer.worker_timeout_seconds",
        unwind_seconds=min(max(limit, _MIN_UNWIND_SECONDS), _MAX_UNWIND_SECONDS),
        same_command=config.trainer.same_command,
        others=others,
    )


def limit_of(config: Config, reads_hub: bool, name: str) -> float | None:
    """Return the seconds without progress after which a phase hangs; None: no limit.

    What follows a phase has the limit of the phase; after an export, the limit of a step.
    reads_hub: a download has no limit.
    """
    if name == EXPORT:
        return None
    name = name.removeprefix(FOLLOWS)
    if reads_hub and name.startswith(_STARTING):
        return None
    limit = config.trainer.worker_timeout_seconds
    limit = max(limit, SLOW_SECONDS) if name.startswith(_SLOW) else limit
    return limit + (_WORKERS_SECONDS if config.has_workers else 0.0)
