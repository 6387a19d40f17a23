"""Runs that hang end with the name of the phase and all stacks, and leave no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from support.hangs import HANGS
from support.processes import descendants, is_running, wait_until
from support.runs import CONFIG, NO_VALIDATION, log_of, make_run, num_lines, overrides_of, start, wait_for

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files, which Linux has"),
]

LIMIT = 15  # seconds; longer than any part of a step here, on a busy machine as well
OPTIONS = (
    f"trainer.worker_timeout_seconds={LIMIT}",
    "trainer.save_freq=1",
    *NO_VALIDATION,
)

# A run whose rollout engine hangs in the third step.
SCRIPT = (
    HANGS
    + """
import sys
from pathlib import Path
import trigon
from trigon.rollout import transformers as module

class Engine(module.TransformersEngine):
    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        if prompts[0].draw == 3:  # the save of step 2 may not be complete, that of step 1 was
            globals()[sys.argv[1]]()
        return super().generate(prompts, sampling, on_progress=on_progress, on_group=on_group)

module.TransformersEngine = Engine
from trigon.tools.cli.main import main
sys.exit(main(["train", *sys.argv[2:]]))
"""
)


@pytest.mark.extended
@pytest.mark.long(but=["hang_in_python-1"])
@pytest.mark.parametrize(
    ("function", "status"),
    [("hang_in_python", 1), ("hang_in_c", 1), ("hang_in_c_with_the_interpreter_lock", -signal.SIGKILL)],
)
def test_one_worker_that_hangs_while_it_samples_ends_and_the_same_command_continues(made, tmp_path, function, status):
    folder, script = tmp_path / "run", tmp_path / "run.py"
    script.write_text(SCRIPT)
    arguments = [str(CONFIG), *overrides_of(made, folder, steps=4), *OPTIONS, "worker.rollout.name=transformers"]
    with log_of(folder).open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), function, *arguments], stdout=log, stderr=subprocess.STDOUT, text=True
        )
    wait_for(lambda: num_lines(folder) >= 1, process, folder)
    wait_until(lambda: "rewards" in str(found := descendants(process.pid)) or found == {})
    found = descendants(process.pid)
    assert process.wait(timeout=120) == status, log_of(folder).read_text()[-4000:]
    wait_until(lambda: not any(map(is_running, found)))
    text = log_of(folder).read_text()
    assert f"WorkerError: gen made no progress for {LIMIT} s" in text
    assert str(folder / "hang_stacks.txt") in text
    stacks = (folder / "hang_stacks.txt").read_text()
    assert f"in {'hang_in_python' if function == 'hang_in_python' else 'lock_twice'}" in stacks
    assert "trigon/rewards/worker.py" in stacks  # a reward worker, which waits
    assert list(folder.glob("global_step_*"))
    make_run(made, folder, *OPTIONS, "worker.rollout.name=transformers", steps=3)
    assert "resuming after step " in log_of(folder).read_text()


@pytest.mark.long
@pytest.mark.alone
def test_of_two_workers_one_that_is_stopped_is_named_with_the_stacks_of_all_others(made, tmp_path):
    folder = tmp_path / "run"
    process = start(made, folder, *OPTIONS, "trainer.n_gpus_per_node=2", steps=1000)
    wait_for(lambda: num_lines(folder) >= 1, process, folder)
    found = descendants(process.pid)
    worker = next(pid for pid, command in found.items() if command.startswith("ray::Worker"))
    os.kill(worker, signal.SIGSTOP)
    started = time.monotonic()
    assert process.wait(timeout=180) == 1, log_of(folder).read_text()[-4000:]
    assert time.monotonic() - started < LIMIT + 60
    wait_until(lambda: not any(map(is_running, found)))
    text = log_of(folder).read_text()
    assert f"was not done after {LIMIT} s (trainer.worker_timeout_seconds); ranks [" in text
    assert f"The stacks of all processes on this machine are in {folder / 'hang_stacks.txt'}" in text
    stacks = (folder / "hang_stacks.txt").read_text()
    assert stacks.count("it is STOPPED") == 1
    assert f"== process {worker}: ray::Worker" in stacks
    assert "in _write_stacks" in stacks  # the driver
    assert "trigon/rewards/worker.py" in stacks
