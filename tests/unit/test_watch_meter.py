"""The memory of a run, measured with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from trigon.assemble.watchers import make_watch_settings, open_watchers
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.distributed.cluster import object_store_metrics
from trigon.metrics import Max, Min
from trigon.report.watch.meter import MemoryMeter, measure_worker
from trigon.system.host_memory import count_usable_bytes

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")

HOLD = "kept = bytearray(b'x') * (int(__import__('sys').argv[1]) << 20); print(flush=True); input()"


def start(mebibytes: int) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(mebibytes)], **pipes)
    process.stdout.readline()
    return process


def test_each_process_counts_once_and_in_its_part():
    with MemoryMeter() as meter:  # this process has other children
        before = meter.measure()["perf/memory_children_gb"].value
    processes = [start(mebibytes) for mebibytes in (64, 96, 128)]
    rewards, worker, other = (process.pid for process in processes)
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
    assert other


def test_the_least_that_was_left_in_a_step_is_what_counts(monkeypatch):
    left = iter([8 << 30, 3 << 30, 6 << 30, 6 << 30])
    monkeypatch.setattr("trigon.report.watch.meter.count_usable_bytes", lambda: next(left, 6 << 30))
    monkeypatch.setattr("trigon.report.watch.meter.SECONDS", 1000.0)
    with MemoryMeter() as meter:
        meter._read_free()
        assert meter.measure()["perf/memory_free_gb"] == Min(3.0)
        assert meter.left_gb == 6.0  # now
        assert meter.measure()["perf/memory_free_gb"] == Min(6.0)


def test_a_thread_reads_what_is_left_and_ends_with_the_meter(monkeypatch):
    seen = threading.Event()

    def read() -> int:
        if threading.current_thread().name == "memory":
            seen.set()
        return 1 << 30

    monkeypatch.setattr("trigon.report.watch.meter.count_usable_bytes", read)
    monkeypatch.setattr("trigon.report.watch.meter.SECONDS", 0.01)
    with MemoryMeter():
        assert seen.wait(10)
    assert all(thread.name != "memory" for thread in threading.enumerate())


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


@pytest.mark.parametrize("level", ["off", "warn", "stop"])
def test_ray_is_asked_only_where_memory_is_watched(monkeypatch, level):
    monkeypatch.setattr("trigon.distributed.cluster.object_store_metrics", lambda: {"asked": Max(1.0)})
    config = Config(trainer={"watch": {"memory": level}, "max_steps": 3})
    workers = SimpleNamespace(local_process_ids=list)
    plan = make_plan(config, num_train_prompts=1000)
    with open_watchers(config, plan, [SimpleNamespace(process_ids=())], workers, save_bytes=0) as watch:
        assert ("asked" in watch.observe(1, {}).metrics) is (level != "off")


def test_the_watchers_are_told_what_a_save_copies_on_a_machine():
    config = Config(trainer={"n_gpus_per_node": 4, "max_steps": 3})
    settings = make_watch_settings(config, make_plan(config, num_train_prompts=1000), save_bytes=3 << 30)
    assert (settings.save_gb, settings.num_workers) == (3.0, 4)


def test_of_several_workers_the_largest_counts_and_the_least_that_is_left():
    measured = measure_worker()
    assert isinstance(measured["perf/memory_worker_gb"], Max)
    assert isinstance(measured["perf/memory_free_gb"], Min)
    assert measured["perf/memory_worker_gb"].value * 2**30 >= 0.9 * os.sysconf("SC_PAGE_SIZE") * int(
        Path("/proc/self/statm").read_text().split()[1]
    )
