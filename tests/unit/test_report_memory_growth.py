"""The memory of a run: measured with real processes, and its growth on made series."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from trigon.config.schema import WatchConfig
from trigon.distributed.cluster import object_store_metrics
from trigon.metrics import Max, Min
from trigon.report.memory_growth import (
    HOST,
    LEAST_STEPS,
    WARM_UP_STEPS,
    WORKER,
    Growth,
    MemoryGrowth,
    MemoryMeter,
    fit_slope,
    measure_worker,
)
from trigon.report.watch import Watch
from trigon.system.machine import count_usable_bytes

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
    monkeypatch.setattr("trigon.report.memory_growth.count_usable_bytes", lambda: next(left, 6 << 30))
    monkeypatch.setattr("trigon.report.memory_growth.SECONDS", 1000.0)
    with MemoryMeter() as meter:
        meter._read_left()
        assert meter.measure()["perf/memory_free_gb"] == Min(3.0)
        assert meter.left_gb == 6.0  # now
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


def memory_steps(growth_gb: list[float], *, free_gb: float = 100.0, noise=0.01):
    """Return what is found in each step: None, or the growth and whether it stops."""
    rng = random.Random(1)
    memory, used, said = MemoryGrowth(10_000), 0.0, []
    for step, grown in enumerate(growth_gb, 1):
        used += grown
        measured = {"perf/memory_driver_gb": 10.0 + used + rng.uniform(-noise, noise), HOST.left: free_gb - used}
        memory.add(step, measured)
        said.append(memory.find())
    return said


@pytest.mark.faults
@pytest.mark.parametrize(
    ("growth", "free_gb", "noise"),
    [
        pytest.param([0.0] * 300, 0.5, 0.3, id="flat and noisy"),
        pytest.param([5.0] * WARM_UP_STEPS + [0.0] * 200, 100.0, 0.01, id="warm-up"),
        # Without the warm-up the eighth step would stop: 23 GiB left, and 5 GiB more at each step.
        pytest.param([5.0] * 7 + [0.0] * 50, 58.0, 0.01, id="end of the warm-up"),
        pytest.param([0.0] * 50 + [20.0] + [0.0] * 100, 100.0, 0.01, id="jump"),
        pytest.param([0.02] * 100, 1000.0, 0.005, id="50,000 steps left"),
    ],
)
def test_memory_that_reaches_no_limit_gives_no_alarm(growth, free_gb, noise):
    assert set(memory_steps(growth, free_gb=free_gb, noise=noise)) == {None}


def test_leaks_stop_before_nothing_is_left_and_slow_ones_warn():
    said = memory_steps([2.0] * 60, free_gb=50.0)
    stopped = next(step for step, found in enumerate(said, 1) if found is not None and found[1])
    growth, _ = said[stopped - 1]
    assert 50.0 - 2.0 * stopped > 0
    assert stopped >= WARM_UP_STEPS + LEAST_STEPS
    assert growth.steps_left == pytest.approx((50.0 - 2.0 * stopped) / 2.0, rel=0.05)
    assert "perf/memory_driver_gb" in growth.describe()
    # One that begins late is found by its own slope.
    said = memory_steps([0.0] * 100 + [3.0] * 40, free_gb=130.0)
    assert next(step for step, found in enumerate(said, 1) if found is not None and found[1]) < 100 + 130 / 3
    slow = [each for each in memory_steps([0.02] * 100, free_gb=20.0, noise=0.005) if each is not None]
    assert slow
    assert not any(must_stop for _, must_stop in slow)
    jumps = [0.5 if step % 20 == 0 else 0.0 for step in range(150)]  # as of validations, three in a window
    assert not any(found and found[1] for found in memory_steps(jumps))


def first_stop(watch: Watch, steps, *, saving: bool = False):
    """Return the first step that stops, and what was said in each step until then."""
    said = {}
    for step, metrics in enumerate(steps, 1):
        watch.begin_step(saving=saving)
        said[step] = watch.observe(step, {key: Max(value) for key, value in metrics.items()})
        if said[step].stop is not None:
            return step, said
    raise AssertionError


def test_the_memory_that_a_save_needs_has_to_be_left_when_the_run_stops():
    """2 GiB more at each step, of 50; at its end 5 GiB more are left than the least of a step."""

    def stop_step(**settings) -> tuple[int, Growth]:
        memory = MemoryGrowth(10_000, **settings)
        for step in range(1, 60):
            left = 50.0 - 2.0 * step
            memory.add(step, {HOST.used[0]: 2.0 * step, HOST.left: left}, left_now_gb=left + 5.0)
            if (found := memory.find()) is not None and found[1]:
                return step, found[0]
        raise AssertionError

    step, growth = stop_step(save_gb=20.0)
    assert 0 < 55.0 - 2.0 * step - 20.0 <= 10.0
    assert growth.steps_left == pytest.approx((55.0 - 2.0 * step - 20.0) / 2.0)
    assert "20.00 GiB" in growth.describe()
    without, _growth = stop_step()
    assert 50.0 - 2.0 * without == 10.0
    # A save that fits into the room between the least of a step and its end changes nothing.
    assert stop_step(save_gb=4.0)[0] == without


@pytest.mark.parametrize(("saving", "stops_after"), [(True, 20), (False, 13)])
def test_the_copies_of_a_save_in_progress_are_not_subtracted_again(saving, stops_after):
    meter = SimpleNamespace(measure=dict, left_gb=25.0)
    watch = Watch(WatchConfig(), memory=MemoryGrowth(10_000, save_gb=10.0), meter=meter)
    steps = [{WORKER: float(step), HOST.left: 25.0 - step} for step in range(1, 60)]
    # 5 steps before nothing is left; or the first step that can stop, since it is then too late.
    assert first_stop(watch, steps, saving=saving)[0] == stops_after


@pytest.mark.parametrize("workers", [8, 1])
def test_workers_that_grow_alike_reach_the_limit_of_their_machine_together(workers):
    steps = [{WORKER: 0.125 * step, HOST.left: 20.0 - 0.125 * workers * step} for step in range(1, 200)]
    watch = Watch(WatchConfig(), memory=MemoryGrowth(10_000, num_workers=workers))
    stop, said = first_stop(watch, steps)
    assert 20.0 - 0.125 * workers * stop == 5 * 0.125 * workers
    assert ("8 workers" in said[stop].stop.text) is (workers == 8)


def test_the_slope_by_hand_and_with_outliers():
    # Pairs of (0, 0), (1, 1), (2, 3), (3, 3): slopes 1, 1.5, 1, 2, 1, 0.
    assert fit_slope([0, 1, 2, 3], [0, 1, 3, 3], confidence=0.95) == (1.0, 0.0, 2.0)
    ys = [3.0 + 0.5 * x for x in range(20)]
    ys[3] = ys[11] = 1000.0
    assert fit_slope(range(20), ys) == pytest.approx((0.5, 0.5, 0.5))
