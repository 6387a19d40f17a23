"""The time and the bytes of activations that are kept in host memory, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.plans import LENGTHS, SETTINGS
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.tools.plan.hardware import ACCELERATORS, Cluster
from trigon.tools.plan.planner import Place, Planner

KEPT = {
    "trainer.n_gpus_per_node": 8,
    "trainer.device": "cuda",
    "trainer.auto_micro_batch": False,
    "worker.actor.model.freeze_vision_tower": True,
}
OFFLOADED = KEPT | {"worker.actor.model.enable_activation_offload": True}


def timing_of(changes, *, host_rate=64e9):
    accelerator = replace(ACCELERATORS["H100-80G"], host_rate=host_rate)
    config = with_options(Config(), SETTINGS | changes)
    planner = Planner(config, Place(Cluster(1, 8, accelerator), "cuda", None), None, LENGTHS, None)
    timing = planner.step(1.0)[1]
    assert timing is not None
    return timing


def test_inputs_of_layers_go_to_host_memory_and_back():
    # 28 layers of width 3,584 in bfloat16, for each token of the rows of one of eight GPUs.
    inputs = 512 * (434 + 5 * 290) / 8 * 28 * 3584 * 2
    assert timing_of(OFFLOADED).bytes().offload - timing_of(KEPT).bytes().offload == pytest.approx(2 * inputs)
    trained = {"worker.actor.model.freeze_vision_tower": False}
    blocks = 512 * 324 * 4 / 8 * 32 * 1280 * 2  # patches of the 32 blocks of the tower
    assert timing_of(OFFLOADED | trained).bytes().offload - timing_of(KEPT | trained).bytes().offload == pytest.approx(
        2 * (inputs + blocks)
    )


def test_copies_take_no_time_as_long_as_computing_takes_longer():
    assert timing_of(OFFLOADED).phases() == timing_of(KEPT).phases()


def test_slow_copies_decide_how_long_a_pass_takes():
    kept, slow = timing_of(KEPT).phases(), timing_of(OFFLOADED, host_rate=1e9).phases()
    flops, rows = timing_of(KEPT).flops.computed, timing_of(KEPT)._ledger
    layers = rows.updates * rows.update_rows * 4 * (28 + 32 + 1) * 0.5e-3
    computing = flops / 8 / (0.35 * 989e12)
    copying = 512 * (434 + 5 * 290) / 8 * 28 * 3584 * 2 / 0.7e9
    assert copying > 0.75 * computing  # of the backward, which has the larger part
    optimizer = kept["update_actor"] - computing - layers
    assert slow["update_actor"] == pytest.approx(2 * copying + layers + optimizer, rel=1e-2)
