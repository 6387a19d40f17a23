"""Watchers in real runs: what each looks for is caused, and the run ends with its message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fake_runs import saved_steps
from support.runs import CONFIG, lines, log_of, overrides_of, start
from trigon.report.run import read_metrics

pytestmark = pytest.mark.faults

CONSTANT = """
REWARD_TYPE = "sequential"

def compute_score(reward_input):
    return {"overall": 0.5}
"""

LEAK = """
REWARD_TYPE = "sequential"
KEPT = []

def compute_score(reward_input):
    KEPT.append(bytearray(b"x") * (MEBIBYTES << 20))
    return {"overall": sum(map(ord, reward_input["response"])) % 7 / 7}
"""


NO_MEMORY_LASTS = """
import sys
from trigon.report import memory_growth

memory_growth.STEPS_TO_STOP = 1_000_000
from trigon.tools.cli.main import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def launch(made: Path, folder: Path, reward: str, *overrides: str, steps: int) -> subprocess.Popen[str]:
    folder.parent.mkdir(exist_ok=True)
    file = folder.parent / f"{folder.name}_reward.py"
    file.write_text(reward)
    return start(made, folder, f"worker.reward.reward_function={file}:compute_score", *overrides, steps=steps)


def stopped(process: subprocess.Popen[str], folder: Path, watcher: str) -> tuple[str, int]:
    """Return the message of a run that this watcher stops, and its last step."""
    assert process.wait(timeout=580) == 1, log_of(folder).read_text()[-3000:]
    log = log_of(folder).read_text()
    assert "Traceback" not in log
    [message] = [line for line in log.splitlines() if f"{watcher} stopped the run" in line]
    return message, lines(folder)[-1]["step"]


@pytest.mark.long
def test_a_constant_reward_stops_a_run_and_the_same_command_with_another_reward_continues(made, tmp_path):
    folder = tmp_path / "run"
    options = ("trainer.watch.level=stop", "trainer.val_freq=-1", "trainer.save_limit=-1")
    message, last = stopped(launch(made, folder, CONSTANT, *options, steps=14), folder, "equal_rewards")
    assert last == 10
    assert "since step 1: group/equal_rewards_fraction is 1" in message
    assert "There is no checkpoint from before step 1" in message
    assert saved_steps(folder) == [2, 4, 6, 8]
    assert [line["metrics"].get("watch/equal_rewards") for line in lines(folder)] == [None] * 10 + [1.0]

    # With the usual reward.
    process = start(made, folder, *options, "trainer.accept_changes=worker.reward.reward_function", steps=10)
    assert process.wait(timeout=580) == 0, log_of(folder).read_text()[-3000:]
    assert saved_steps(folder) == [2, 4, 6, 8, 10]
    assert "watch/equal_rewards" not in lines(folder)[-1]["metrics"]


@pytest.mark.long
def test_a_reward_function_that_leaks_saves_and_stops_the_run(made, tmp_path):
    folder = tmp_path / "run"
    # 24 MiB a step, in two workers; however much this machine has left, it is too little.
    script, reward = tmp_path / "run.py", tmp_path / "reward.py"
    script.write_text(NO_MEMORY_LASTS)
    reward.write_text(LEAK.replace("(MEBIBYTES << 20)", "(3 << 19)"))
    options = (f"worker.reward.reward_function={reward}:compute_score", "worker.reward.num_cpus=2")
    options += ("trainer.val_freq=-1", "trainer.save_freq=-1", "trainer.watch.ignore=equal_rewards")
    command = [sys.executable, str(script), str(CONFIG), *overrides_of(made, folder, steps=60), *options]
    with log_of(folder).open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
    message, last = stopped(process, folder, "memory")
    assert "perf/memory_reward_workers_gb by" in message
    assert saved_steps(folder) == [last]
    grown = [line.metrics["perf/memory_reward_workers_gb"] for line in read_metrics(folder) if line.step > 0]
    assert grown[-1] - grown[-9] > 0.1
    assert "the same command continues after it" in message


@pytest.fixture
def memory_limit() -> Iterator[Path]:
    """Return a memory control group of this test, in which processes can be put."""
    for mount, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(mount) / f"trigon_test_{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            yield group / limit
            while pids := (group / "cgroup.procs").read_text().split():  # only after a failure
                for pid in pids:
                    os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.1)
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("no memory control group can be made here: that takes root, and a writable /sys/fs/cgroup")


@pytest.mark.long
def test_a_leak_in_a_control_group_stops_before_the_kernel_kills(made, tmp_path, memory_limit):
    folder = tmp_path / "run"
    # 96 MiB a step: without the watcher the kernel kills a process within about 25 steps.
    leak = LEAK.replace("MEBIBYTES", "6")
    options = ("trainer.val_freq=-1", "trainer.val_before_train=false", "worker.rollout.name=transformers")
    options += ("trainer.save_freq=-1",)
    process = launch(made, folder, leak, *options, steps=100)
    memory_limit.write_text(str(3 << 30))
    (memory_limit.parent / "cgroup.procs").write_text(str(process.pid))
    message, last = stopped(process, folder, "memory")
    assert "at this rate the kernel kills the run in" in message
    assert saved_steps(folder) == [last]
    left = read_metrics(folder)[-1].metrics["perf/memory_free_gb"]
    assert 0.1 < left < 5 * 0.12
