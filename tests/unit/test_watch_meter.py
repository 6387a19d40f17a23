"""The memory of a run, measured with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trigon.metrics import Max, Min
from trigon.system.host_memory import count_usable_bytes
from trigon.watch.meter import MemoryMeter, measure_worker

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")

HOLD = "kept = bytearray(b'x') * (int(__import__('sys').argv[1]) << 20); print(flush=True); input()"


def start(mebibytes: int) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(mebibytes)], **pipes)
    process.stdout.readline()
    return process


def test_each_process_counts_once_and_in_its_part():
    processes = [start(mebibytes) for mebibytes in (64, 96, 128)]
    rewards, worker, other = (process.pid for process in processes)
    try:
        with MemoryMeter(reward_workers=lambda: [rewards], workers=lambda: [worker]) as meter:
            measured = {key: metric.value for key, metric in meter.measure().items()}
    finally:
        for process in processes:
            process.communicate("\n")
    assert 64 / 1024 < measured["perf/memory_reward_workers_gb"] < 90 / 1024
    assert 128 / 1024 < measured["perf/memory_children_gb"] < 160 / 1024
    assert measured["perf/memory_driver_gb"] > 0.01
    assert 0 < measured["perf/memory_free_gb"] <= count_usable_bytes() / 2**30 + 1
    assert other


def test_the_least_that_was_left_in_a_step_is_what_counts(monkeypatch):
    left = iter([8 << 30, 3 << 30, 6 << 30, 6 << 30])
    monkeypatch.setattr("trigon.watch.meter.count_usable_bytes", lambda: next(left, 6 << 30))
    monkeypatch.setattr("trigon.watch.meter.SECONDS", 1000.0)
    with MemoryMeter() as meter:
        meter._read_free()
        assert meter.measure()["perf/memory_free_gb"] == Min(3.0)
        assert meter.measure()["perf/memory_free_gb"] == Min(6.0)


def test_a_thread_reads_what_is_left_and_ends_with_the_meter(monkeypatch):
    seen = threading.Event()

    def read() -> int:
        if threading.current_thread().name == "memory":
            seen.set()
        return 1 << 30

    monkeypatch.setattr("trigon.watch.meter.count_usable_bytes", read)
    monkeypatch.setattr("trigon.watch.meter.SECONDS", 0.01)
    with MemoryMeter():
        assert seen.wait(10)
    assert all(thread.name != "memory" for thread in threading.enumerate())


def test_of_several_workers_the_largest_counts_and_the_least_that_is_left():
    measured = measure_worker()
    assert isinstance(measured["perf/memory_worker_gb"], Max)
    assert isinstance(measured["perf/memory_free_gb"], Min)
    assert measured["perf/memory_worker_gb"].value * 2**30 >= 0.9 * os.sysconf("SC_PAGE_SIZE") * int(
        Path("/proc/self/statm").read_text().split()[1]
    )
