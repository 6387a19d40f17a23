"""Saves and exports killed after each call that changes a file, in turn, and then without power.

In a single process, and in a driver and two ranks.
"""

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from support.faulty_disk import FaultyDisk, run_with

pytestmark = pytest.mark.faults

# What the library calls a call, and the system calls.
KINDS = {
    "open": ("open", "openat", "creat"),
    "write": ("write", "pwrite64", "writev", "pwritev", "sendfile", "copy_file_range"),
    "fsync": ("fsync", "fdatasync"),
    "rename": ("rename", "renameat", "renameat2"),
    "mkdir": ("mkdir", "mkdirat"),
    "remove": ("unlink", "unlinkat", "rmdir"),
    "truncate": ("truncate", "ftruncate", "fallocate"),
    "chmod": ("chmod", "fchmod", "fchmodat"),
    "link": ("link", "linkat", "symlink", "symlinkat"),
}
TRACED = ",".join(name for names in KINDS.values() for name in names)


@pytest.fixture
def folder(tmp_path):
    """Return a folder in memory if there is one: flushing is free there."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="trigon-tests-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def killed_everywhere(folder, tmp_path, tiny_model):
    """Return a function that runs a module of tests/support/, and returns its report.

    scenario: of support.crash_points.
    """

    def run(*scenario, module="support.crash_points", limits=()):
        top, work = folder / "top", tmp_path / "work"
        top.mkdir()
        work.mkdir()
        disk = FaultyDisk(top / "now", work)
        model = tiny_model("qwen2")
        return json.loads(run_with(disk, module, *scenario, *map(str, (model, top, work, *limits)), seconds=900))

    return run


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["save", "background"])
def test_a_save_that_ends_after_any_call_leaves_the_old_checkpoint_or_the_new_one(killed_everywhere, scenario):
    report = killed_everywhere(scenario)
    print(report)
    assert set(report["outcomes"]) == {"old", "new"}
    assert report["calls"].keys() >= {"open", "write", "fsync", "rename", "mkdir", "remove"}
    assert report["attempts"]["after a call"] == sum(report["calls"].values()) > 50


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["export", "merge"])
def test_an_export_that_ends_after_any_call_is_complete_or_absent_and_can_be_made_again(killed_everywhere, scenario):
    report = killed_everywhere(scenario)
    print(report)
    assert set(report["outcomes"]) >= {"absent", "new"}
    assert report["attempts"]["after a call"] == sum(report["calls"].values()) > 30


@pytest.mark.extended
def test_the_library_sees_every_call_that_strace_sees(folder, tmp_path):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    top, work = folder / "top", tmp_path / "work"
    top.mkdir()
    work.mkdir()
    trace = tmp_path / "trace"
    command = [strace, "-f", "-y", "--seccomp-bpf", "-s", "4000", "-e", f"trace={TRACED}", "-o", str(trace)]
    output = run_with(
        FaultyDisk(top / "now", work), "support.crash_points", "once", "-", str(top), str(work), prefix=command
    )
    seen = Counter(name for name, _, _ in json.loads(output))
    traced = Counter()
    for line in trace.read_text().splitlines():
        call = re.match(r"\d+ +(\w+)\((.*)", line)
        if call is None:
            continue
        name = next(name for name, calls in KINDS.items() if call[1] in calls)
        # Not the contents of a write: the library's own log has the same paths.
        arguments = call[2].split('"')[0] if name == "write" else call[2]
        changes = name != "open" or "O_CREAT" in arguments or "O_TRUNC" in arguments
        traced[name] += changes and str(top / "now") in arguments
    assert seen == traced
    assert seen["write"] > 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("most_of_rank", "most_of_driver"), [(4, 4), (1000, 60)], ids=["some calls", "each call of a rank"]
)
def test_a_save_of_two_ranks_of_which_one_is_killed_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    killed_everywhere, most_of_rank, most_of_driver
):
    report = killed_everywhere(module="support.crash_ranks", limits=(most_of_rank, most_of_driver))
    print(report)
    driver, *ranks = report.values()
    assert set(driver["outcomes"]) == {"old", "new"}
    for rank in ranks:
        assert set(rank["outcomes"]) == {"old"}, "only the driver publishes"
        assert sum(rank["outcomes"].values()) == min(rank["places"], most_of_rank)
        assert rank["calls"].keys() >= {"open", "write", "fsync"}, "each rank writes shards"
        assert rank["attempts"]["it alone"] > 0
        assert rank["attempts"]["without power"] > 0
