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
from typing import Literal

_MEMBERSHIPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def count_usable_cpus(*, memberships: Path = _MEMBERSHIPS, mount: Path = _MOUNT) -> int:
    """Return the number of CPUs that this process may use, at least 1.

    The smallest of its CPU affinity (os.sched_getaffinity) and the CPU time limits of its control
    groups and of those above them (cpu.max in version 2, cpu.cfs_quota_us in version 1). A limit of
    a fraction of a CPU is rounded up.

    Args:
        memberships: the file with the control groups of this process.
        mount: the folder in which control groups are mounted.
    """
    # sched_getaffinity does not exist on macOS and Windows.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(limit) for limit in _cgroup_limits(memberships, mount))]))


def _cgroup_limits(memberships: Path, mount: Path) -> Iterator[float]:
    """Return the limits of all control groups that apply, in CPUs."""
    for version, folder in cgroup_folders("cpu", memberships=memberships, mount=mount):
        limit = _limit_v2(folder) if version == 2 else _limit_v1(folder)
        if limit is not None:
            yield limit


def cgroup_folders(
    controller: str, *, memberships: Path = _MEMBERSHIPS, mount: Path = _MOUNT
) -> Iterator[tuple[Literal[1, 2], Path]]:
    """Yield the folders of the control groups of this process, and of those above them.

    controller: of version 1 of control groups, such as "cpu"; version 2 has one group for all.
    memberships, mount: see count_usable_cpus. Yields: the version, and a folder that may not exist.
    """
    try:
        lines = memberships.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux, or /proc is not mounted
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)  # "0::/user.slice" in version 2, "4:cpu,cpuacct:/user" in 1
        if controllers == "":
            hierarchies = [mount]
        elif controller in controllers.split(","):
            hierarchies = [mount / controllers, mount / controller]
        else:
            continue
        # A container may see its own group as the root of the mount: then the path of the group,
        # as the host names it, does not exist there. The root is always among the parents.
        path = Path(group.lstrip("/"))
        for hierarchy in hierarchies:
            for folder in (path, *path.parents):
                yield (2 if controllers == "" else 1), hierarchy / folder


def _limit_v2(folder: Path) -> float | None:
    """Return the limit of a control group of version 2, None if it has none."""
    numbers = read_control(folder / "cpu.max").split()  # "150000 100000", or "max 100000"
    return None if len(numbers) != 2 or numbers[0] == "max" else int(numbers[0]) / int(numbers[1])


def _limit_v1(folder: Path) -> float | None:
    """Return the limit of a control group of version 1, None if it has none."""
    quota, period = read_control(folder / "cpu.cfs_quota_us"), read_control(folder / "cpu.cfs_period_us")
    return None if not quota or not period or int(quota) <= 0 else int(quota) / int(period)  # -1: no limit


def read_control(file: Path) -> str:
    """Return what a file of a control group says; "" if there is none."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:  # the group has no such limit, or is not visible here
        return ""
