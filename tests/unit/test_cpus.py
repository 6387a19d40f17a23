"""The number of CPUs that a process may use."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trigon.assemble.options import count_image_threads
from trigon.config.schema import Config
from trigon.system.cpus import count_usable_cpus

PACKAGE = Path(__file__).parents[2] / "trigon"
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100000 100000", 1), ("50000 100000", 1), ("5000000 100000", min(AFFINITY, 50)), ("max 100000", AFFINITY)],
)
def test_the_limit_of_a_control_group_of_version_2_counts(tmp_path, text, expected):
    assert usable(tmp_path, "0::/job/task\n", **{"job__task__cpu.max": f"{text}\n"}) == expected


@pytest.mark.skipif(AFFINITY < 2, reason="needs two CPUs")
def test_a_fraction_of_a_cpu_is_rounded_up(tmp_path):
    assert usable(tmp_path, "0::/job\n", **{"job__cpu.max": "150000 100000\n"}) == 2


def test_the_limit_of_a_group_above_counts(tmp_path):
    limits = {"job__task__cpu.max": "max 100000\n", "job__cpu.max": "100000 100000\n"}
    assert usable(tmp_path, "0::/job/task\n", **limits) == 1


def test_the_limit_of_a_container_that_sees_its_own_group_as_the_root_counts(tmp_path):
    assert usable(tmp_path, "0::/docker/0123abcd\n", **{"cpu.max": "100000 100000\n"}) == 1


@pytest.mark.parametrize(("quota", "expected"), [("100000", 1), ("-1", AFFINITY)])
@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_the_limit_of_a_control_group_of_version_1_counts(tmp_path, folder, quota, expected):
    limits = {f"{folder}__job__cpu.cfs_quota_us": f"{quota}\n", f"{folder}__job__cpu.cfs_period_us": "100000\n"}
    assert usable(tmp_path, "7:memory:/job\n4:cpu,cpuacct:/job\n0::/\n", **limits) == expected


def test_without_control_groups_the_affinity_counts(tmp_path):
    assert count_usable_cpus(memberships=tmp_path / "missing", mount=tmp_path) == AFFINITY
    assert usable(tmp_path, "0::/\n") == AFFINITY


def run_on_one_cpu(script: str) -> str:
    """Return the output of a Python process that may use a single CPU."""
    pinned = f"import os\nos.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})\n{script}"
    return subprocess.run([sys.executable, "-c", pinned], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.extended
@pytest.mark.skipif(AFFINITY < 2, reason="a machine with one CPU does not tell the two apart")
def test_threads_that_build_prompts_are_no_more_than_the_usable_cpus():
    script = (
        "from trigon.assemble.options import count_data_threads\nfrom trigon.config.schema import Config\n"
        "print(count_data_threads(Config(data={'filter_overlong_prompts_workers': 16})))"
    )
    assert run_on_one_cpu(script) == "1"


@pytest.mark.parametrize(
    ("cpus", "configured", "workers", "expected"),
    [(128, 16, 8, 16), (128, 4, 8, 4), (64, 16, 8, 8), (12, 16, 8, 1), (4, 16, 8, 1), (6, 16, 2, 3)],
)
def test_a_worker_processes_images_in_its_share_of_the_usable_cpus(cpus, configured, workers, expected):
    config = Config(data={"filter_overlong_prompts_workers": configured}, trainer={"n_gpus_per_node": workers})
    assert count_image_threads(config, usable_cpus=cpus) == expected


def test_no_other_module_counts_cpus():
    """os.cpu_count() ignores affinity and control groups."""
    counting = {"cpu_count", "process_cpu_count", "sched_getaffinity"}
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in counting
    }
    assert found == {"system/cpus.py"}
