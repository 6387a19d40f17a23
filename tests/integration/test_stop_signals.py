"""Signals to all processes of a run at once: it saves, ends, and leaves no process.

The next run has the numbers of one that was not interrupted.
"""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from support.processes import is_running, signal_all, wait_until
from support.runs import (
    CONFIG,
    STEPS,
    comparable,
    finish,
    lines,
    log_of,
    num_lines,
    overrides_of,
    rollouts,
    start,
    status_of,
    stored_images,
    wait_for,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

ONE, TWO = (), ("trainer.n_gpus_per_node=2",)


def has(folder: Path, pattern: str) -> Callable[[], bool]:
    """Return whether a file has been written since this call: not by the run before."""
    before = modified(folder, pattern)
    return lambda: bool(modified(folder, pattern) - before)


def modified(folder: Path, pattern: str) -> set[tuple[Path, int]]:
    found = set()
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # renamed meanwhile
            found.add((path, path.stat().st_mtime_ns))
    return found


def saved_steps(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*")}


def stop(
    process: subprocess.Popen[str], folder: Path, moment: Callable[[], bool], number: signal.Signals = signal.SIGTERM
) -> str:
    """Send a signal to all processes at a moment, and return what the run wrote since it started.

    Asserts that the exit status is the signal's, and that no process is left.
    """
    wait_for(moment, process, folder)
    found = signal_all(process.pid, number)
    assert status_of(process, folder) == 128 + number, log_of(folder).read_text()[-4000:]
    wait_until(lambda: not any(map(is_running, found)))
    text = log_of(folder).read_text().rpartition("loading libraries")[2]
    assert "Traceback" not in text
    return text


@pytest.mark.long
@pytest.mark.parametrize("options", [ONE, TWO], ids=["one worker", "two workers"])
def test_a_run_that_is_stopped_at_any_moment_saves_and_resumes_as_if_uninterrupted(made, tmp_path, options):
    """Stop a run in its start, and in each part of a step; then compare it with another one."""
    folder, expected = tmp_path / "run", tmp_path / "uninterrupted"
    finish(start(made, expected, *options), expected)
    options = (*options, "trainer.save_freq=-1")
    hasty = (*options, "trainer.grace_seconds=0.01")  # too short for any step

    process = start(made, folder, *options)
    text = stop(process, folder, (folder / "run.lock").exists)
    assert "SIGTERM: stopped at once" in text
    assert saved_steps(folder) == set()

    process = start(made, folder, *hasty)  # samples step 3: step 2 is saved
    text = stop(process, folder, lambda: num_lines(folder) >= 3)
    step = max(saved_steps(folder))
    announced = (f"stopping before the end of step {step + 1}", f"the update of step {step}", f"saving step {step}")
    assert any(words in text for words in announced)  # by the moment at which the signal arrived
    assert f"the same command resumes after step {step}" in text

    process = start(made, folder, *options, "trainer.grace_seconds=null")  # in an update: the step is saved
    text = stop(process, folder, has(folder, f"rollouts/step_{step + 1:06d}*"), signal.SIGHUP)
    assert "SIGHUP: finishing and saving the current step" in text
    assert max(saved_steps(folder)) > step
    step = max(saved_steps(folder))

    process = start(made, folder, *options[:-1], "trainer.save_freq=1", "trainer.grace_seconds=0.01")
    stop(process, folder, has(folder, ".saving_*"))  # in a save, which is completed
    assert max(saved_steps(folder)) > step
    assert not any(folder.glob(".saving_*"))

    finish(start(made, folder, *options), folder)
    assert comparable(lines(folder)) == comparable(lines(expected))
    assert rollouts(folder) == rollouts(expected)
    assert stored_images(folder) == stored_images(expected)


@pytest.mark.long
@pytest.mark.parametrize("options", [ONE, TWO], ids=["one worker", "two workers"])
def test_a_long_step_is_left_while_it_is_sampled_and_the_step_before_it_saved(made, tmp_path, options):
    folder, reward = tmp_path / "run", tmp_path / "reward.py"
    # From the third step on, a step would take hours.
    reward.write_text(f"""
import time
from pathlib import Path
REWARD_TYPE = "sequential"
def compute_score(reward_input):
    if Path({str(tmp_path / "slow")!r}).exists():
        Path({str(tmp_path / "called")!r}).touch()
        time.sleep(600)
    return {{"overall": sum(map(ord, reward_input["response"])) % 7 / 7}}
""")
    options = (
        *options,
        f"worker.reward.reward_function={reward}:compute_score",
        "worker.reward.timeout_seconds=1000",
        "trainer.save_freq=-1",
        "trainer.val_freq=-1",
        "trainer.val_before_train=false",
    )
    process = start(made, folder, *options)
    wait_for(lambda: num_lines(folder) >= 2, process, folder)
    (tmp_path / "slow").touch()
    wait_for((tmp_path / "called").exists, process, folder)
    made_steps = num_lines(folder)
    started = time.monotonic()
    stop(process, folder, lambda: True)
    assert time.monotonic() - started < 60
    assert saved_steps(folder) == {made_steps}
    assert f"the same command resumes after step {made_steps}" in log_of(folder).read_text()


@pytest.mark.long
@pytest.mark.parametrize("options", [ONE, TWO], ids=["one worker", "two workers"])
def test_a_second_signal_stops_at_once_and_leaves_no_process_and_no_half_written_checkpoint(made, tmp_path, options):
    folder = tmp_path / "run"
    sizes = ("data.rollout_batch_size=100", "worker.rollout.n=256")  # a step of minutes
    process = start(made, folder, *options, *sizes, "trainer.val_before_train=false", "trainer.grace_seconds=null")
    wait_for(lambda: "gen  " in log_of(folder).read_text(), process, folder)
    found = signal_all(process.pid, signal.SIGTERM)
    time.sleep(1.5)  # later than a repetition of the first signal
    assert process.poll() is None
    started = time.monotonic()
    signal_all(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert time.monotonic() - started < 40
    wait_until(lambda: not any(map(is_running, found)))
    text = log_of(folder).read_text()
    assert "SIGTERM: finishing and saving the current step" in text
    assert "stopped at once" in text
    assert "Traceback" not in text
    assert not any(folder.glob("global_step_*"))
    assert not any(folder.glob(".saving_*"))


@pytest.mark.long
def test_a_run_whose_terminal_is_closed_saves(made, tmp_path):
    folder = tmp_path / "run"
    overrides = [*overrides_of(made, folder, steps=STEPS), "trainer.save_freq=-1"]
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "trigon", "train", str(CONFIG), *overrides],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(terminal)
    deadline = time.monotonic() + 300
    while num_lines(folder) < 2:
        assert time.monotonic() < deadline
        os.read(screen, 1 << 16)
    os.close(screen)  # a write to the terminal is an error from here on, and its session gets SIGHUP
    assert process.wait(timeout=120) == 129
    assert 1 <= max(saved_steps(folder)) < STEPS


def take_terminal() -> None:
    """Make standard input the terminal of this session. Runs in a child before it is executed."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
