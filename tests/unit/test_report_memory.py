"""The memory of a run, measured with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from trigon.config.schema import WatchConfig
from trigon.distributed.cluster import object_store_metrics
from trigon.metrics import Max, Min
from trigon.report.memory import MemoryMeter, measure_worker
from trigon.report.watch import MEMORY, MEMORY_LEFT, Watch
from trigon.system.host_memory import count_usable_bytes

needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")

HOLD = "kept = bytearray(b'x') * (int(__import__('sys').argv[1]) << 20); print(flush=True); input()"


def start(mebibytes: int) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(mebibytes)], **pipes)
    process.stdout.readline()
    return process


@needs_proc
def test_each_process_counts_once_and_in_its_part():
    with MemoryMeter() as meter:  # this process has other children
        before = meter.measure()["perf/memory_children_gb"].value
    processes = [start(mebibytes) for mebibytes in (64, 96, 128)]
    rewards, worker, _other = (process.pid for process in processes)
    try:
        with MemoryMeter(reward_workers=lambda: [rewards], workers=lambda: [worker]) as meter:
            measured = {key: metric.value for key, metric in meter.measure().items()}
    finally:
        for process in processes:
            process.communicate("\n")
    assert 64 / 1024 < measured["perf/memory_reward_workers_gb"] < 90 / 1024
    assert 128 / 1024 < measured["perf/memory_children_gb"] - before < 160 / 1024
    assert measured["perf/memory_driver_gb"] > 0.01
    assert 0 < measured["perf/memory_free_gb"] <= count_usable_bytes() / 2**30 + 1
    measured = measure_worker()  # of several workers the largest counts, and the least that is left
    assert isinstance(measured["perf/memory_worker_gb"], Max)
    assert isinstance(measured["perf/memory_free_gb"], Min)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert measured["perf/memory_worker_gb"].value * 2**30 >= 0.9 * os.sysconf("SC_PAGE_SIZE") * pages


def test_the_least_that_was_left_in_a_step_is_what_counts(monkeypatch):
    left = iter([8 << 30, 3 << 30, 6 << 30, 6 << 30])
    monkeypatch.setattr("trigon.report.memory.count_usable_bytes", lambda: next(left, 6 << 30))
    monkeypatch.setattr("trigon.report.memory.SECONDS", 1000.0)
    with MemoryMeter() as meter:
        meter._read_left()
        assert meter.measure()["perf/memory_free_gb"] == Min(3.0)
        assert meter.measure()["perf/memory_free_gb"] == Min(6.0)


@pytest.mark.parametrize(
    "error", [ray.exceptions.RaySystemError("Ray has failed"), RuntimeError("Failed to connect to GCS")]
)
def test_a_ray_that_does_not_answer_ends_no_step(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"object_store_memory": 4 << 30})
    monkeypatch.setattr(ray, "available_resources", lambda: {"object_store_memory": 3 << 30})
    assert object_store_metrics() == {"perf/object_store_used_gb": Max(1.0), "perf/object_store_free_gb": Min(3.0)}
    monkeypatch.setattr(ray, "available_resources", fail)
    assert object_store_metrics() == {}


@needs_proc
@pytest.mark.parametrize(("level", "stops"), [("warn", False), ("stop", True)])
def test_little_memory_in_three_steps_warns_or_saves_and_stops(level, stops):
    watch = Watch(WatchConfig(level=level), meter=SimpleNamespace(measure=lambda: {MEMORY_LEFT: Min(5.0)}))
    said = [watch.observe(step, {MEMORY_LEFT: Min(left)}) for step, left in enumerate((9, 0.9, 2, 0.8, 0.7, 0.6), 1)]
    assert [bool(each.new) for each in said] == [False] * 5 + [True]
    assert MEMORY in said[-1].metrics
    assert (said[-1].stop is not None and said[-1].stop.saves) is stops
    assert watch.state()["series"].get(MEMORY_LEFT) is None
