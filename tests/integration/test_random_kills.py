"""Runs whose processes are killed at random moments have the numbers of an uninterrupted one.

The driver, a worker, Ray's node manager and a reward process are killed in turn, and the same
command is started again until the run is done. Then no process and no file of any start is left.

TRIGON_TEST_KILLS=20 makes 20 kills with one worker, and 10 with two.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from support.engines import tensors_in
from support.processes import adopting_orphans, descendants, is_running, reap_adopted
from support.runs import comparable, lines, log_of, rollouts, start, stored_images
from support.tensors import assert_equal_tensors

pytestmark = [pytest.mark.faults, pytest.mark.alone, pytest.mark.timeout(1800), pytest.mark.long]

STEPS = 8
MANY = int(os.environ.get("TRIGON_TEST_KILLS", "4" if settings.get_current_profile_name() == "faults" else "2"))
NUM_KILLS = {1: MANY, 2: max(2, MANY // 2)}
TARGETS = {
    1: {"driver": "trigon.trainer.main", "reward process": "rewards.worker"},
    2: {
        "driver": "trigon.trainer.main",
        "worker": "ray::",
        "node manager": "raylet/raylet",
        "reward process": "rewards.worker",
    },
}
"""Number of workers -> what is killed, with a part of its command line."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return an empty folder for temporary files, with a short name: Ray has sockets in it."""
    with tempfile.TemporaryDirectory(prefix="k") as folder:
        yield Path(folder)


def begin(made: Path, folder: Path, num_workers: int, temporary: Path) -> subprocess.Popen[str]:
    environment = {"TMPDIR": str(temporary)}
    return start(made, folder, f"trainer.n_gpus_per_node={num_workers}", steps=STEPS, environment=environment)


def kill_one(process: subprocess.Popen[str], part: str, source: random.Random) -> bool:
    """Kill one of the processes of a run whose command line has this part, if there is one."""
    everyone = descendants(process.pid) | {process.pid: "trigon.trainer.main"}
    found = sorted(pid for pid, command in everyone.items() if part in command)
    if not found:
        return False
    os.kill(source.choice(found), signal.SIGKILL)
    return True


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the last checkpoint."""
    return tensors_in(folder / f"global_step_{STEPS}" / "actor" / "weights")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_whose_processes_are_killed_at_random_equals_an_uninterrupted_one(made, tmp_path, temporary, num_workers):
    seed = random.randrange(10**6) if MANY > 2 else 1
    print(f"seed {seed}")  # shown if the test fails
    source = random.Random(seed)
    shared_memory = set(os.listdir("/dev/shm"))
    reference = tmp_path / "uninterrupted"
    started = time.monotonic()
    assert begin(made, reference, num_workers, temporary).wait(timeout=300) == 0, log_of(reference).read_text()[-4000:]
    duration = time.monotonic() - started

    kills: list[str] = []
    with adopting_orphans():
        number = 0
        while len(kills) < NUM_KILLS[num_workers]:
            number += 1
            folder = tmp_path / f"killed_{number}"
            while True:  # until the run is done
                process = begin(made, folder, num_workers, temporary)
                try:
                    process.wait(timeout=source.uniform(0.1, 1.0) * duration)
                except subprocess.TimeoutExpired:
                    if len(kills) < NUM_KILLS[num_workers]:
                        name = list(TARGETS[num_workers])[len(kills) % len(TARGETS[num_workers])]
                        if kill_one(process, TARGETS[num_workers][name], source):
                            kills.append(name)
                status = process.wait(timeout=300)
                if status == 0:
                    break
                assert kills, log_of(folder).read_text()[-4000:]
                assert status in (1, -signal.SIGKILL), log_of(folder).read_text()[-4000:]
            assert comparable(lines(folder)) == comparable(lines(reference))
            assert rollouts(folder) == rollouts(reference)
            assert stored_images(folder) == stored_images(reference)
            assert_equal_tensors(weights_in(folder), weights_in(reference))
            deadline = time.monotonic() + 30
            while (left := descendants(os.getpid())) and time.monotonic() < deadline:
                reap_adopted(process.pid)
                time.sleep(0.2)
            assert left == {}
            assert sorted(str(path) for path in temporary.rglob("*")) == []
            assert sorted(path.name for path in folder.glob(".*")) == []
        assert set(os.listdir("/dev/shm")) <= shared_memory  # other tests may remove some of it
    assert {name: kills.count(name) for name in TARGETS[num_workers]} == {
        name: len(kills[index :: len(TARGETS[num_workers])]) for index, name in enumerate(TARGETS[num_workers])
    }
    assert not is_running(process.pid)
