"""A weight transfer whose other member has died ends with an error in the process that waits."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from trigon.distributed.weight_transfer import TransferAddress, TransferGroup, TransferMember
from trigon.errors import TransferError

WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def make_group(store, rank, *, device="cpu", seconds):
    return TransferGroup(store, rank, 2, torch.device(device), timeout_seconds=seconds, bucket_bytes=1024)


@pytest.mark.parametrize("of_user", [None, "0"])
def test_a_group_of_nccl_is_made_without_a_watchdog_whatever_the_user_has_set(monkeypatch, of_user):
    # The CPU build of torch has no ProcessGroupNCCL. It reads the variable in its constructor.
    monkeypatch.delenv(WAIT, raising=False)
    if of_user is not None:
        monkeypatch.setenv(WAIT, of_user)
    made = []

    def make_nccl(store, rank, size, timeout):
        made.append((rank, size, timeout.total_seconds(), os.environ[WAIT]))
        return SimpleNamespace()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", make_nccl, raising=False)
    make_group(dist.HashStore(), 1, device="cuda", seconds=50)
    assert made == [(1, 2, 50.0, "1")]
    assert os.environ.get(WAIT) == of_user  # other groups of the process are made as ever


def test_a_broadcast_to_a_member_that_does_not_answer_raises_after_its_time_limit():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        learner, sampler = threads.map(partial(make_group, store, seconds=0.5), range(2))
    began = time.monotonic()
    with pytest.raises(TransferError, match="a member of the weight transfer has failed"):
        next(iter(sampler.weights().read()))  # the learner sends nothing
    assert 0.4 < time.monotonic() - began < 5
    learner.abort()
    sampler.abort()


def test_a_member_that_is_told_to_leave_before_it_connects_raises_what_a_lost_member_does():
    member = TransferMember(torch.device("cpu"))
    host, port = member.listen("127.0.0.1")
    member.leave()
    with pytest.raises(TransferError, match="has ended before"):
        member.join(TransferAddress(host, port, 2), 0, timeout_seconds=5)
