"""Runs that really hang, each in a process of its own: they end, and say where they hung."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.hangs import HANGS
from support.processes import descendants, is_running, wait_until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files, which Linux has"),
]

DRIVER = (
    HANGS
    + """
import subprocess, sys, threading
from pathlib import Path
from trigon.system.stopping import SameCommand
from trigon.system.processes import running_below
from trigon.system.hangs import Watchdog, register_stacks

def hang_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def hang_after_the_error():
    try:
        hang_in_python()
    finally:
        hang_in_c()

def make_progress():
    for _ in range(8):
        time.sleep(0.5)
        watchdog.beat()

if __name__ == "__main__":
    code = "from trigon.system.hangs import *; register_stacks(); print(1, flush=True); time.sleep(999)"
    command = [sys.executable, "-c", code]
    shell = ["sh", "-c", "sleep 998 & echo $!; wait"]
    other = subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    others = [other.pid, int(other.stdout.readline())]
    before = running_below()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    child.stdout.readline()
    threading.Thread(target=hang_in_python, name="other", daemon=True).start()
    same_command = SameCommand(Path("/runs/x"), finds_last=False)
    options = {"option": "the_option=2", "unwind_seconds": 3.0, "same_command": same_command, "others": before}
    with Watchdog(Path(sys.argv[1]), lambda name: 2.0, **options) as watchdog:
        print(child.pid, *others, flush=True)
        with watchdog.phase("update_actor"):
            globals()[sys.argv[2]]()
    print("ended", flush=True)
    child.kill()
"""
)


@contextmanager
def started(folder: Path, function: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a driver that calls this function; yield it, and the id of its child."""
    (folder / "driver.py").write_text(DRIVER)
    with subprocess.Popen(
        [sys.executable, str(folder / "driver.py"), str(folder), function],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        child, *others = map(int, process.stdout.readline().split())
        try:
            yield process, child
            process.wait()
            assert all(map(is_running, others))  # they ran before, and are not the run's
        finally:
            process.kill()
            for pid in (child, *others):
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.extended(cases=["hang_in_a_lock"])
@pytest.mark.parametrize("function", ["hang_in_python", "hang_in_a_lock"])
def test_a_hang_in_python_raises_an_error_with_the_place(tmp_path, function):
    with started(tmp_path, function) as (process, child):
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "WorkerError: update_actor made no progress for 2 s (the_option=2): the run hangs; the stacks of" in error
    assert f", in {function}\n" in error
    continuation = "the same command with trainer.load_checkpoint_path=/runs/x/global_step_... continues from the last"
    assert f"To continue: {continuation} checkpoint\n" in error
    stacks = (tmp_path / "hang_stacks.txt").read_text()
    assert f"in {function}" in stacks
    assert "in hang_in_python" in stacks  # the other thread
    assert f"== process {child}: " in stacks
    assert stacks.count("Current thread") == 2


@pytest.mark.extended
@pytest.mark.parametrize(
    ("function", "status"),
    [("hang_in_c", 1), ("hang_in_c_with_the_interpreter_lock", -signal.SIGKILL), ("hang_after_the_error", 1)],
)
def test_a_driver_that_cannot_take_the_error_is_killed_with_all_its_processes(tmp_path, function, status):
    with started(tmp_path, function) as (process, child):
        _, error = process.communicate(timeout=60)
        wait_until(lambda: not is_running(child))
    assert process.returncode == status
    assert "WorkerError: update_actor made no progress for 2 s; the stacks of all threads of its 2 processes" in error
    assert "It did not end within 3 s more: killing the run" in error
    assert (
        f"in {'hang_in_python' if function == 'hang_after_the_error' else 'lock_twice'}"
        in (tmp_path / "hang_stacks.txt").read_text()
    )


@pytest.mark.extended
def test_a_stopped_child_is_named(tmp_path):
    with started(tmp_path, "hang_in_python") as (process, child):
        os.kill(child, signal.SIGSTOP)
        _, error = process.communicate(timeout=60)
    assert f"process {child} (" in error
    assert ") is STOPPED" in error
    assert "it is STOPPED" in (tmp_path / "hang_stacks.txt").read_text()


@pytest.mark.extended
def test_progress_keeps_a_driver_alive_that_is_stopped_for_a_while(tmp_path):
    with started(tmp_path, "make_progress") as (process, _):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(process.pid, signal.SIGCONT)
        output, error = process.communicate(timeout=60)
    assert (process.returncode, output, error) == (0, "ended\n", "")
    assert not (tmp_path / "hang_stacks.txt").exists()


@pytest.mark.extended
def test_the_watching_process_outlives_signals_and_ends_with_the_driver(tmp_path):
    with started(tmp_path, "make_progress") as (process, _):
        [watching] = [pid for pid, command in descendants(process.pid).items() if "hangs import main" in command]
        time.sleep(1.0)  # it has its handlers
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(watching, number)
        time.sleep(0.5)
        assert is_running(watching)
        process.kill()
        process.wait()
        wait_until(lambda: not is_running(watching))


READ_TWICE = """
import os, subprocess
from trigon.system.hangs import dump_stacks, register_stacks

def outer():
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            for _ in range(2):
                text = dump_stacks([os.getpid(), other.pid])
                assert text.count("Current thread") == 1, text
                assert "in outer" in text
                assert f"== process {other.pid}: sleep 60\\nno Python stacks; state S" in text, text
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()
        assert "it has ended" in dump_stacks([other.pid])

register_stacks()
register_stacks()
outer()
"""


def test_the_stacks_of_a_process_are_read_again_and_another_program_has_none():
    done = subprocess.run([sys.executable, "-c", READ_TWICE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
