"""The CPUs and the host memory that a process may use, within its control groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from trigon.assemble.options import count_image_threads
from trigon.config.schema import Config
from trigon.system.machine import count_total_bytes, count_usable_bytes, count_usable_cpus

AFFINITY = len(os.sched_getaffinity(0))
GIB = 2**30


def machine(root: Path, memberships: str, files: Mapping[str, object]) -> Path:
    """Make /proc and the control groups of a process on a machine with 32 of 64 GiB available.

    files: path below /sys/fs/cgroup -> its text. Returns: root.
    """
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(memberships)
    (proc / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemFree: 1000 kB\nMemAvailable:   {32 * 2**20} kB\n")
    for name, text in files.items():
        file = root / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


V1 = "7:memory:/job\n4:cpu,cpuacct:/job\n0::/\n"


def quota(folder: str, quota: int) -> dict[str, int]:
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": 100000}


@pytest.mark.parametrize(
    ("memberships", "files", "expected"),
    [
        ("0::/job/task\n", {"job/task/cpu.max": "100000 100000"}, 1),
        ("0::/job/task\n", {"job/task/cpu.max": "50000 100000"}, 1),
        ("0::/job/task\n", {"job/task/cpu.max": "5000000 100000"}, min(AFFINITY, 50)),
        ("0::/job\n", {"job/cpu.max": "150000 100000"}, min(AFFINITY, 2)),  # a fraction is rounded up
        ("0::/job/task\n", {"job/task/cpu.max": "max 100000", "job/cpu.max": "100000 100000"}, 1),
        ("0::/docker/0123abcd\n", {"cpu.max": "100000 100000"}, 1),  # sees its own group as the root
        (V1, quota("cpu,cpuacct/job", 100000), 1),
        (V1, quota("cpu/job", 100000), 1),
        (V1, quota("cpu/job", -1), AFFINITY),
        ("0::/\n", {}, AFFINITY),
    ],
)
def test_the_cpu_time_limit_of_a_control_group_counts(tmp_path, memberships, files, expected):
    assert count_usable_cpus(root=machine(tmp_path, memberships, files)) == expected


JOB = {"job/memory.max": 8 * GIB, "job/memory.current": 3 * GIB}
STAT = {"job/memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}"}
V1_JOB = {
    "memory/job/memory.limit_in_bytes": 8 * GIB,
    "memory/job/memory.usage_in_bytes": 3 * GIB,
    "memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
}


@pytest.mark.parametrize(
    ("memberships", "files", "usable", "total"),
    [
        pytest.param("0::/\n", {}, 32 * GIB, 64 * GIB, id="no group"),
        pytest.param("0::/job\n", JOB | {"job/memory.max": "max"}, 32 * GIB, 64 * GIB, id="no limit"),
        pytest.param("0::/job/task\n", JOB, 5 * GIB, 8 * GIB, id="less what is used"),
        pytest.param("0::/job/task\n", JOB | STAT, 6 * GIB, 8 * GIB, id="files that can be freed count as free"),
        pytest.param("0::/job\n", JOB | {"job/memory.max": GIB}, 0, GIB, id="above its limit"),
        pytest.param(V1, V1_JOB, 6 * GIB, 8 * GIB, id="version 1"),
        pytest.param(
            V1,
            V1_JOB | {"memory/job/memory.limit_in_bytes": 2**63 - 4096},
            32 * GIB,
            64 * GIB,
            id="version 1 without a limit",
        ),
    ],
)
def test_the_memory_limit_of_a_control_group_counts(tmp_path, memberships, files, usable, total):
    root = machine(tmp_path, memberships, files)
    assert (count_usable_bytes(root=root), count_total_bytes(root=root)) == (usable, total)


def test_without_proc_the_affinity_counts_and_the_memory_is_not_known(tmp_path):
    assert count_usable_cpus(root=tmp_path) == AFFINITY
    assert count_usable_bytes(root=tmp_path) is count_total_bytes(root=tmp_path) is None


@pytest.mark.parametrize(
    ("cpus", "configured", "workers", "expected"),
    [(128, 16, 8, 16), (128, 4, 8, 4), (64, 16, 8, 8), (4, 16, 8, 1)],
)
def test_a_worker_processes_images_in_its_share_of_the_usable_cpus(cpus, configured, workers, expected):
    config = Config(data={"filter_overlong_prompts_workers": configured}, trainer={"n_gpus_per_node": workers})
    assert count_image_threads(config, usable_cpus=cpus) == expected
