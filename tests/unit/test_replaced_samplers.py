"""Starting a replica in place of a lost one, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from trigon.assemble.pools import _PoolStart, place_pools
from trigon.config.schema import Config
from trigon.distributed.preflight import SAME_EVERYWHERE, NodeReport
from trigon.errors import ConfigError

pytestmark = pytest.mark.faults


class Start(_PoolStart):
    """Starts replicas whose nodes report a problem."""

    def start_checked(self, replica):
        versions = dict.fromkeys(SAME_EVERYWHERE, "1")
        return SimpleNamespace(workers=[f"worker of {replica}"]), [NodeReport("host", versions, "the disk is full")]


def test_the_workers_of_a_replica_whose_node_cannot_be_used_are_ended():
    """Otherwise the next attempt would wait for their place until its time limit."""
    ended = []
    config = Config.model_validate({"worker": {"hybrid_engine": False}})
    reserved = SimpleNamespace(end=ended.append)
    starts = Start(config, Path(), place_pools(config)[1], "cpu", "run", True, reserved)
    with pytest.raises(ConfigError, match="the disk is full"):
        starts.start(1)
    assert ended == [["worker of 1"]]
