"""How many CPUs this process may use: what its affinity and its control groups allow.

os.cpu_count() is the number of CPUs of the machine. In a container, or under a batch scheduler, a
process usually gets fewer; one thread for each CPU of the machine would then be slower than one for
each CPU that it gets.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from trigon.cgroups import MEMBERSHIPS, MOUNT, cgroup_folders, read_limit


def count_usable_cpus(*, memberships: Path = MEMBERSHIPS, mount: Path = MOUNT) -> int:
    """Return the number of CPUs that this process may use, at least 1.

    The smallest of its CPU affinity (os.sched_getaffinity) and the CPU time limits of its control
    groups and of those above them (cpu.max in version 2, cpu.cfs_quota_us in version 1). A limit of
    a fraction of a CPU is rounded up.

    Args:
        memberships, mount: see trigon.cgroups.
    """
    # sched_getaffinity does not exist on macOS and Windows.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(limit) for limit in _cgroup_limits(memberships, mount))]))


def _cgroup_limits(memberships: Path, mount: Path) -> Iterator[float]:
    """Yield the limits of all control groups that apply, in CPUs."""
    for folder, version in cgroup_folders("cpu", memberships, mount):
        limit = _limit_v2(folder) if version == 2 else _limit_v1(folder)
        if limit is not None:
            yield limit


def _limit_v2(folder: Path) -> float | None:
    """Return the limit of a control group of version 2, None if it has none."""
    numbers = read_limit(folder / "cpu.max").split()  # "150000 100000", or "max 100000"
    return None if len(numbers) != 2 or numbers[0] == "max" else int(numbers[0]) / int(numbers[1])


def _limit_v1(folder: Path) -> float | None:
    """Return the limit of a control group of version 1, None if it has none."""
    quota, period = read_limit(folder / "cpu.cfs_quota_us"), read_limit(folder / "cpu.cfs_period_us")
    return None if not quota or not period or int(quota) <= 0 else int(quota) / int(period)  # -1: no limit
