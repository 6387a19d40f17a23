"""Signals that arrive while Ray starts, with a stand-in for ray.init."""

from __future__ import annotations

import os
import signal

import pytest

from trigon.distributed import cluster
from trigon.errors import ConfigError

# In a process of its own: a signal goes to any thread that has it not blocked, also of xdist.
pytestmark = [pytest.mark.faults, pytest.mark.alone]


@pytest.mark.parametrize("fails", [False, True])
def test_a_sigterm_during_rays_start_is_handled_by_the_run_and_not_by_ray(monkeypatch, fails):
    received = []

    def start(**options):
        signal.signal(signal.SIGTERM, lambda number, frame: received.append("ray"))
        os.kill(os.getpid(), signal.SIGTERM)
        if fails:
            raise ConnectionError("no answer")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(cluster.ray, "init", start)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append("run"))
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
        signal.signal(signal.SIGTERM, before)
    assert received == ["run"]
