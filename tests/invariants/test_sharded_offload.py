"""Offloading a sharded policy between phases changes nothing, although every tensor moves.

On the CPU a move to the CPU returns the tensor itself. Here it copies the tensor and fills the old
one with nan, as if that were memory of a GPU which another process has taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from support.engines import CONFIG, FULL_KL, make_engine, make_rollouts, to_train, weights_of
from trigon.metrics import Metrics
from trigon.training import local
from trigon.training.optim import STEP, on_this_rank
from trigon.training.parallel import Sharding

SHARDING = Sharding(
    full_shard=True, ranks_per_copy=None, param_dtype=torch.float32, reduce_dtype=torch.float32, cpu_offload=False
)


def moved(tensor: Tensor) -> Tensor:
    """Return a copy, and spoil the original."""
    copy = tensor.detach().clone()
    if tensor.is_floating_point():
        on_this_rank(tensor.detach()).fill_(torch.nan)
    return copy


def move_module(module: nn.Module, device: object) -> nn.Module:
    return module._apply(moved)


def move_states(optimizer: Any, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != STEP:
                state[key] = moved(value)


def train(model: Path, options: dict[str, Any], offload: bool) -> tuple[list[Metrics], dict[str, Tensor]]:
    """Return the metrics of three steps, each with a weight sync before it, and the weights."""
    torch.use_deterministic_algorithms(True)
    compared_with = (
        model if options.get("config", CONFIG).algorithm.kl_in_loss == "full" and "lora_rank" not in options else None
    )
    engine = make_engine(model, sharding=SHARDING, compared_with=compared_with, offload=offload, **options)
    metrics = []
    with patch.object(nn.Module, "to", move_module), patch.object(local, "move_states", move_states):
        engine.offload()
        for seed in (0, 20, 40):
            assert all(bool(tensor.isfinite().all()) for _, tensor in engine.weights().read())
            rollouts = make_rollouts(model, seed=seed)
            engine.logprobs(rollouts)
            metrics.append(engine.step(to_train(rollouts)))
    return metrics, weights_of(engine)


@pytest.mark.extended
@pytest.mark.long(but=["full kl, frozen"])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("qwen2_5_vl", {"checkpointing": True}, id="vision"),
        pytest.param("qwen3_vl", {"strategy": "adamw_bf16", "dtype": torch.bfloat16}, id="tied, bf16"),
        pytest.param("qwen2_5_vl", {"freeze": True, "config": FULL_KL}, id="full kl, frozen"),
        pytest.param("qwen2_5_vl", {"lora_rank": 2}, id="lora"),
    ],
)
def test_offloading_a_sharded_policy_changes_nothing(tiny_model, processes, model, options):
    kept = processes.run(train, tiny_model(model), options, False, ranks=2)
    offloaded = processes.run(train, tiny_model(model), options, True, ranks=2)
    for (metrics, weights), (expected_metrics, expected_weights) in zip(offloaded, kept, strict=True):
        assert metrics == expected_metrics
        assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)


@pytest.mark.extended
@pytest.mark.long(cases=["qwen2_5_vl"])
@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_moe"])
def test_offloading_the_inputs_of_layers_changes_nothing(tiny_model, processes, model):
    kept = processes.run(train, tiny_model(model), {"checkpointing": True}, False, ranks=2)
    offloaded = processes.run(train, tiny_model(model), {"offloads_activations": True}, False, ranks=2)
    for (metrics, weights), (expected_metrics, expected_weights) in zip(offloaded, kept, strict=True):
        assert metrics == expected_metrics
        assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
