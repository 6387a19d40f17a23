"""The memory of this machine and of the GPU of this process: what is free, and what may be used.

/proc/meminfo describes the machine. In a container, or under a batch scheduler, a process that uses
all of it is killed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from trigon.errors import ConfigError
from trigon.metrics import Max, Metrics, Min
from trigon.system.cpus import cgroup_folders, read_control
from trigon.system.terminal import format_bytes

_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def read_meminfo(meminfo: Path, name: str) -> int:
    """Return an entry of a file in the format of Linux's /proc/meminfo, in bytes.

    Raises: OSError if the file cannot be read, KeyError if it has no such entry.
    """
    entry = re.search(rf"^{name}:\s+(\d+) kB$", meminfo.read_text(encoding="ascii"), re.MULTILINE)
    if entry is None:
        raise KeyError(name)
    return int(entry[1]) * 1024


def count_usable_bytes(
    *, meminfo: Path = _MEMINFO, memberships: Path = _MEMBERSHIPS, mount: Path = _MOUNT
) -> int | None:
    """Return the bytes of host memory that this process may still allocate; None: unknown.

    The smallest of what the machine has available and what the limits of its control groups, and of
    those above them, leave (memory.max in version 2, memory.limit_in_bytes in version 1). Cached
    files, which the kernel drops when memory is needed, do not count as used.

    Args:
        meminfo: file in the format of Linux's /proc/meminfo.
        memberships, mount: see trigon.system.cpus.
    """
    try:
        available = read_meminfo(meminfo, "MemAvailable")
    except (OSError, KeyError):  # not Linux, or /proc is not mounted
        return None
    return max(0, min([available, *_left_in_cgroups(memberships, mount)]))


def count_total_bytes(
    *, meminfo: Path = _MEMINFO, memberships: Path = _MEMBERSHIPS, mount: Path = _MOUNT
) -> int | None:
    """Return the bytes of host memory that processes like this one may use together; None: unknown.

    The smallest of the machine's memory and of the limits of this process's control groups.
    Args: see count_usable_bytes.
    """
    try:
        total = read_meminfo(meminfo, "MemTotal")
    except (OSError, KeyError):  # not Linux, or /proc is not mounted
        return None
    limits = (
        read_control(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        for version, folder in cgroup_folders("memory", memberships=memberships, mount=mount)
    )
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def _left_in_cgroups(memberships: Path, mount: Path) -> Iterator[int]:
    """Yield what each control group with a limit leaves."""
    for version, folder in cgroup_folders("memory", memberships=memberships, mount=mount):
        limit, used, cached = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit_bytes, used_bytes = read_control(folder / limit), read_control(folder / used)
        if limit_bytes.isdigit() and used_bytes.isdigit():  # "max": no limit
            reclaimable = re.search(rf"^{cached} (\d+)$", read_control(folder / "memory.stat"), re.MULTILINE)
            yield int(limit_bytes) - int(used_bytes) + (int(reclaimable[1]) if reclaimable else 0)


def gpu_memory_metrics() -> Metrics:
    """Return the largest memory of torch's allocator so far; {} in a process that uses no GPU.

    Memory that vLLM has given back for its sleep counts as allocated.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {
        "perf/max_memory_allocated_gb": Max(torch.cuda.max_memory_allocated() / 2**30),
        "perf/max_memory_reserved_gb": Max(torch.cuda.max_memory_reserved() / 2**30),
    }


def gpu_memory_now() -> Metrics:
    """Return the GPU memory of tensors now, and what further ones may take.

    {} in a process that uses no GPU.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {"perf/gpu_memory_allocated_gb": Max(torch.cuda.memory_allocated() / 2**30), **gpu_memory_left()}


def gpu_memory_left() -> Metrics:
    """Return the GPU memory that further tensors may take now; {} in a process that uses no GPU.

    What torch's allocator keeps for later counts as free. So does vLLM's share while vLLM sleeps:
    to be measured while it is awake too. Of several measurements the least counts.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    free, _ = torch.cuda.mem_get_info()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return {"perf/gpu_memory_free_gb": Min((free + kept) / 2**30)}


def require_free_memory(fraction: float) -> None:
    """Raise ConfigError unless vLLM finds this fraction of the GPU's memory free.

    To be called before anything is loaded: vLLM would refuse it after minutes of loading.
    """
    import torch

    free, total = torch.cuda.mem_get_info()
    if free < fraction * total:
        raise ConfigError(
            f"the GPU of this process ({torch.cuda.get_device_name()}) has {format_bytes(free)} of "
            f"{format_bytes(total)} free, and vLLM is to take {fraction:.0%} of all "
            "(worker.rollout.gpu_memory_utilization): another process uses it, which nvidia-smi shows"
        )
