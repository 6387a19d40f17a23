"""The error of a call that hangs on many ranks, with stand-ins for Ray's waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trigon.distributed import worker_group
from trigon.distributed.cluster import WorkerHandle
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
