"""Calls that hang, and long ones that do not, with stand-ins for Ray's waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trigon.distributed import worker_group
from trigon.distributed.cluster import WorkerHandle
from trigon.distributed.worker import Worker
from trigon.distributed.worker_group import WorkerGroup

pytestmark = pytest.mark.faults

NUM_RANKS = 24
ANSWERS = 5  # the only rank that does


@pytest.mark.extended
def test_the_ranks_that_do_not_answer_are_waited_for_together(monkeypatch):
    waited = []

    def wait(references, *, num_returns, timeout):
        assert num_returns == len(references) == NUM_RANKS
        waited.append(timeout)
        return [ANSWERS], [each for each in references if each != ANSWERS]

    def get(reference, timeout=0.0):
        waited.append(timeout)
        if reference != ANSWERS:
            raise worker_group.ray.exceptions.GetTimeoutError
        return SimpleNamespace(stack="the stack\n", memory_bytes=2**30, max_memory_bytes=2**31)

    monkeypatch.setattr(worker_group.ray, "wait", wait)
    monkeypatch.setattr(worker_group.ray, "get", get)
    handles = [
        WorkerHandle(
            rank,
            "host",
            1,
            SimpleNamespace(heartbeat=SimpleNamespace(remote=lambda request, rank=rank: rank)),
            is_local=False,
        )
        for rank in range(NUM_RANKS)
    ]
    text = str(WorkerGroup(handles, "cpu", 60.0)._deadline_error(handles, "update", 60.0))
    assert sum(waited) < 10  # the watchdog kills the run a minute after the deadline of the call
    assert text.count("does not respond") == NUM_RANKS - 1
    assert "rank 5 on host (process 1), last seen with 1.0 GiB (at most 2.0 GiB) is in\nthe stack\n" in text


class Finished:
    """Reports a further completion every half minute, for some time. See HeartbeatListener."""

    def __init__(self, clock, until):
        self.clock, self.until, self.num_received = clock, until, 0

    def request(self, rank):
        return None

    def receive(self, rank, heartbeat):
        num_finished = min(self.clock(), self.until) // 30
        before, self.num_received = self.num_received, num_finished
        return num_finished > before


@pytest.mark.parametrize("until", [0.0, 600.0])
def test_a_call_that_samples_for_a_long_time_ends_only_without_progress(monkeypatch, until):
    """As with algorithm.max_staleness above 1, where one call may take several steps."""
    now = [0.0]
    heartbeat = SimpleNamespace(stack="the stack\n", memory_bytes=2**30, max_memory_bytes=2**31)

    def wait(references, *, num_returns, timeout):
        return [each for each in references if each == "heartbeat"], ["generate"]

    monkeypatch.setattr(worker_group.ray, "wait", wait)
    monkeypatch.setattr(worker_group.ray, "get", lambda reference: heartbeat)
    monkeypatch.setattr(worker_group, "time", SimpleNamespace(monotonic=lambda: now[0]))
    actor = SimpleNamespace(
        generate=SimpleNamespace(remote=lambda *arguments: "generate"),
        heartbeat=SimpleNamespace(remote=lambda request: "heartbeat"),
    )
    group = WorkerGroup([WorkerHandle(0, "host", 1, actor, is_local=False)], "cpu", 60.0)
    listener = Finished(lambda: now[0], until)
    call = group.call(Worker.generate, SimpleNamespace(), 1, per_rank=[None], phase="rollout", listener=listener)
    while not call.poll():
        now[0] += 1.0
    assert until + 60 <= now[0] <= until + 65
    assert ("rollout made no progress for 60 s" if until else "was not done after 60 s") in str(call.error)
