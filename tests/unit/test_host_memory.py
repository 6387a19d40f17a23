"""The memory that a process may still use, and that all like it may use together."""

from pathlib import Path

import pytest

from trigon.system.machine import count_total_bytes, count_usable_bytes

GIB = 2**30
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1000 kB\nMemAvailable:   {32 * 2**20} kB\n"


def usable(tmp_path: Path, memberships: str, **files: object) -> int | None:
    """Return the number for a process in these control groups of a machine with 32 GiB available.

    files: path below the mount, with __ in place of /, -> its text.
    """
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "cgroup").write_text(memberships)
    for name, text in files.items():
        file = tmp_path / "mount" / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return count_usable_bytes(meminfo=tmp_path / "meminfo", memberships=tmp_path / "cgroup", mount=tmp_path / "mount")


JOB = {"job__memory.max": 8 * GIB, "job__memory.current": 3 * GIB}
STAT = {"job__memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}"}


@pytest.mark.parametrize(
    ("memberships", "files", "expected"),
    [
        ("0::/\n", {}, 32 * GIB),
        ("0::/job\n", {"job__memory.max": "max", "job__memory.current": 5}, 32 * GIB),
        ("0::/job/task\n", JOB, 5 * GIB),
        ("0::/job/task\n", JOB | STAT, 6 * GIB),
        ("0::/job\n", {"job__memory.max": GIB, "job__memory.current": 2 * GIB}, 0),
    ],
    ids=["no group", "no limit", "less what is used", "files that can be freed count as free", "above its limit"],
)
def test_the_limit_of_a_control_group_of_version_2_counts(tmp_path, memberships, files, expected):
    assert usable(tmp_path, memberships, **files) == expected
    assert count_usable_bytes(meminfo=tmp_path / "missing") is None


@pytest.mark.parametrize(("limit", "expected"), [(8 * GIB, 6 * GIB), (2**63 - 4096, 32 * GIB)])
def test_the_limit_of_a_control_group_of_version_1_counts(tmp_path, limit, expected):
    files = {
        "memory__job__memory.limit_in_bytes": limit,
        "memory__job__memory.usage_in_bytes": 3 * GIB,
        "memory__job__memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
    }
    assert usable(tmp_path, "4:memory:/job\n7:cpu,cpuacct:/job\n", **files) == expected


@pytest.mark.parametrize(
    ("memberships", "limit"),
    [("0::/job/task\n", "job/memory.max"), ("4:memory:/job\n", "memory/job/memory.limit_in_bytes")],
)
def test_all_host_memory_is_what_the_control_group_allows(tmp_path, memberships, limit):
    (tmp_path / "cgroup").write_text(memberships)
    (tmp_path / "meminfo").write_text(MEMINFO)
    paths = {"meminfo": tmp_path / "meminfo", "memberships": tmp_path / "cgroup", "mount": tmp_path / "mount"}
    assert count_total_bytes(**paths) == 64 * GIB
    file = tmp_path / "mount" / limit
    file.parent.mkdir(parents=True)
    for text, expected in (("max" if limit.endswith("max") else "9223372036854771712", 64 * GIB), ("1000", 1000)):
        file.write_text(f"{text}\n")
        assert count_total_bytes(**paths) == expected
    assert count_total_bytes(**{**paths, "meminfo": tmp_path / "absent"}) is None
