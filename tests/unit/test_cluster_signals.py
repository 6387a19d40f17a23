"""What happens while Ray starts: signals, and errors; with a stand-in for ray.init."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from trigon.distributed import cluster
from trigon.errors import ConfigError, WorkerError

# In a process of its own: a signal goes to any thread that has it not blocked, also of xdist.
pytestmark = [pytest.mark.faults, pytest.mark.extended, pytest.mark.alone]


@pytest.mark.parametrize("fails", [False, True])
def test_a_sigterm_during_rays_start_is_handled_by_the_run_and_not_by_ray(monkeypatch, fails):
    received = []

    def start(**options):
        cluster.ray._private.utils.set_sigterm_handler(lambda number, frame: received.append("ray"))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # the other thread may get it, and then this one runs the handler at once
        if fails:
            raise ConnectionError("no answer")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(cluster.ray, "init", start)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append("run"))
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)  # has no signal blocked, unlike the main thread
    other.start()
    try:
        if fails:
            with (
                pytest.raises(ConfigError, match="no Ray cluster"),
                cluster.open_cluster(nodes=1, workers_per_node=1),
            ):
                pass
        else:
            with cluster.open_cluster(nodes=1, workers_per_node=1):
                assert received == ["run"]
    finally:
        ended.set()
        other.join()
        signal.signal(signal.SIGTERM, before)
    assert received == ["run"]


def test_a_local_cluster_that_does_not_start_in_time_is_an_error_of_one_sentence(monkeypatch):
    def start(**options):
        raise Exception("The current node timed out during startup. This could happen")  # as Ray does

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.ray, "init", start)
    with (
        pytest.raises(WorkerError, match=r"Ray did not start on this machine \(The current node timed out"),
        cluster.open_cluster(nodes=1, workers_per_node=1),
    ):
        pass
