"""The number of CPUs that a process may use."""

import os

import pytest

from trigon.assemble.options import count_image_threads
from trigon.config.schema import Config
from trigon.system.machine import count_usable_cpus

AFFINITY = len(os.sched_getaffinity(0))


def usable(tmp_path, memberships, **limits):
    """Return the number for a process in these control groups.

    limits: file, with __ in place of /, -> its text.
    """
    (tmp_path / "cgroup").write_text(memberships)
    for name, text in limits.items():
        file = tmp_path / "mount" / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return count_usable_cpus(memberships=tmp_path / "cgroup", mount=tmp_path / "mount")


V1 = "7:memory:/job\n4:cpu,cpuacct:/job\n0::/\n"


@pytest.mark.parametrize(
    ("memberships", "limits", "expected"),
    [
        ("0::/job/task\n", {"job__task__cpu.max": "100000 100000\n"}, 1),
        ("0::/job/task\n", {"job__task__cpu.max": "50000 100000\n"}, 1),
        ("0::/job/task\n", {"job__task__cpu.max": "5000000 100000\n"}, min(AFFINITY, 50)),
        ("0::/job\n", {"job__cpu.max": "150000 100000\n"}, min(AFFINITY, 2)),  # a fraction is rounded up
        ("0::/job/task\n", {"job__task__cpu.max": "max 100000\n", "job__cpu.max": "100000 100000\n"}, 1),
        ("0::/docker/0123abcd\n", {"cpu.max": "100000 100000\n"}, 1),  # sees its own group as the root
        (V1, {"cpu,cpuacct__job__cpu.cfs_quota_us": "100000\n", "cpu,cpuacct__job__cpu.cfs_period_us": "100000\n"}, 1),
        (V1, {"cpu__job__cpu.cfs_quota_us": "100000\n", "cpu__job__cpu.cfs_period_us": "100000\n"}, 1),
        (V1, {"cpu__job__cpu.cfs_quota_us": "-1\n", "cpu__job__cpu.cfs_period_us": "100000\n"}, AFFINITY),
    ],
)
def test_the_limit_of_a_control_group_counts(tmp_path, memberships, limits, expected):
    assert usable(tmp_path, memberships, **limits) == expected


def test_without_control_groups_the_affinity_counts(tmp_path):
    assert count_usable_cpus(memberships=tmp_path / "missing", mount=tmp_path) == AFFINITY
    assert usable(tmp_path, "0::/\n") == AFFINITY


@pytest.mark.parametrize(
    ("cpus", "configured", "workers", "expected"),
    [(128, 16, 8, 16), (128, 4, 8, 4), (64, 16, 8, 8), (4, 16, 8, 1)],
)
def test_a_worker_processes_images_in_its_share_of_the_usable_cpus(cpus, configured, workers, expected):
    config = Config(data={"filter_overlong_prompts_workers": configured}, trainer={"n_gpus_per_node": workers})
    assert count_image_threads(config, usable_cpus=cpus) == expected
