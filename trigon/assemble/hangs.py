"""The watchdog of a run: which part of it may take how long without progress."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trigon.assemble.hub import hub_names
from trigon.config.schema import Config
from trigon.report.console import Console
from trigon.rollout.restart import RESTART
from trigon.system.processes import Started
from trigon.system.watchdog import FOLLOWS, START, HangWatch, Watchdog

SLOW_SECONDS = 3600.0
"""The least limit of the start, of loading and of saving, as of the calls of workers."""

_STARTING = (START, "scan ", "load model", "start rollout engine", "measure memory")
_SLOW = (*_STARTING, RESTART, "save_checkpoint")

EXPORT = "export"
"""The phase of the export after the last step. It has no limit, since it reports no progress."""

_WORKERS_SECONDS = 60.0  # longer than the deadlines of calls, whose errors name the rank
_MIN_UNWIND_SECONDS, _MAX_UNWIND_SECONDS = 10.0, 120.0


def open_hang_watch(config: Config, folder: Path, console: Console, others: Sequence[Started] = ()) -> HangWatch:
    """Start the watchdog of a run. folder: of the run. others: see Watchdog."""
    if not hasattr(os, "memfd_create"):
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

    What follows a phase has the limit of the phase; of an export, that of a step. reads_hub: a
    download has no limit.
    """
    if name == EXPORT:
        return None
    name = name.removeprefix(FOLLOWS)
    if reads_hub and name.startswith(_STARTING):
        return None
    limit = config.trainer.worker_timeout_seconds
    limit = max(limit, SLOW_SECONDS) if name.startswith(_SLOW) else limit
    return limit + (_WORKERS_SECONDS if config.has_workers else 0.0)
