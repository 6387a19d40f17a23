"""What this machine has for this process: CPUs, host memory, GPU memory, the loopback interface.

os.cpu_count() and /proc/meminfo describe the machine. In a container, or under a batch scheduler, a
process usually gets less: one thread for each CPU of the machine would then be slower than one for
each CPU that it gets, and a process that uses all memory is killed. Imports torch only where the
GPU is asked for.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from trigon.errors import ConfigError
from trigon.metrics import Max, Metrics, Min
from trigon.system.terminal import format_bytes

_ROOT = Path("/")  # another folder in tests, with files of /proc and /sys in it


def count_usable_cpus(*, root: Path = _ROOT) -> int:
    """Return the number of CPUs that this process may use, at least 1.

    The smallest of its CPU affinity (os.sched_getaffinity) and the CPU time limits of its control
    groups and of those above them (cpu.max in version 2, cpu.cfs_quota_us in version 1). A limit of
    a fraction of a CPU is rounded up.
    """
    # sched_getaffinity does not exist on macOS and Windows.
    counts = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for version, folder in _cgroup_folders("cpu", root):
        if version == 2:  # "150000 100000", or "max 100000"
            quota, _, period = _read_control(folder / "cpu.max").partition(" ")
        else:  # -1: no limit
            quota, period = _read_control(folder / "cpu.cfs_quota_us"), _read_control(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            counts.append(math.ceil(int(quota) / int(period)))
    return max(1, min(counts))


def _cgroup_folders(controller: str, root: Path) -> Iterator[tuple[Literal[1, 2], Path]]:
    """Yield the folders of the control groups of this process, and of those above them.

    controller: a controller of version 1 of control groups, such as "cpu"; version 2 has one group
    for all. Yields: the version, and a folder that may not exist.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
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


def _read_control(file: Path) -> str:
    """Return what a file of a control group says; "" if there is none."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:  # the group has no such limit, or is not visible here
        return ""


def _read_meminfo(meminfo: Path, name: str) -> int:
    """Return an entry of a file in the format of Linux's /proc/meminfo, in bytes.

    Raises: OSError if the file cannot be read, KeyError if it has no such entry.
    """
    entry = re.search(rf"^{name}:\s+(\d+) kB$", meminfo.read_text(encoding="ascii"), re.MULTILINE)
    if entry is None:
        raise KeyError(name)
    return int(entry[1]) * 1024


def count_usable_bytes(*, root: Path = _ROOT) -> int | None:
    """Return the bytes of host memory that this process may still allocate; None: unknown.

    The smallest of what the machine has available and what the limits of its control groups, and of
    those above them, leave (memory.max in version 2, memory.limit_in_bytes in version 1). Cached
    files, which the kernel drops when memory is needed, do not count as used.
    """
    return _least_bytes("MemAvailable", root)


def count_total_bytes(*, root: Path = _ROOT) -> int | None:
    """Return the bytes of host memory that processes like this one may use together; None: unknown.

    The smallest of the machine's memory and of the limits of this process's control groups.
    """
    return _least_bytes("MemTotal", root)


def _least_bytes(entry: Literal["MemAvailable", "MemTotal"], root: Path) -> int | None:
    """Return an entry of /proc/meminfo, or the least that a control group allows or has left."""
    try:
        counts = [_read_meminfo(root / "proc/meminfo", entry)]
    except (OSError, KeyError):  # not Linux, or /proc is not mounted
        return None
    for version, folder in _cgroup_folders("memory", root):
        limit, used, cached = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit_bytes, used_bytes = _read_control(folder / limit), _read_control(folder / used)
        if not limit_bytes.isdigit():  # "max": no limit
            continue
        if entry == "MemTotal":
            counts.append(int(limit_bytes))
        elif used_bytes.isdigit():
            reclaimable = re.search(rf"^{cached} (\d+)$", _read_control(folder / "memory.stat"), re.MULTILINE)
            counts.append(int(limit_bytes) - int(used_bytes) + (int(reclaimable[1]) if reclaimable else 0))
    return max(0, min(counts))


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
    to be measured while it is awake too. The least of several measurements counts.
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


LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915  # Linux ioctl: get the IPv4 address of a network interface


def loopback_variables() -> dict[str, str]:
    """Return the environment variables by which gloo and NCCL listen on the loopback interface.

    By default gloo listens on the address that the host name resolves to, and NCCL on the first
    interface that is not the loopback. GPUs of one machine exchange tensors through NVLink, PCIe or
    shared memory all the same.
    """
    interface = find_interface(LOOPBACK)
    assert interface is not None, f"no network interface has the address {LOOPBACK}"
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has this IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                ifreq = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(ifreq[20:24]) == address:
                return name
    return None
