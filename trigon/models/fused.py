"""Fewer and larger kernels for what is neither attention nor a matrix product, in a model that is loaded already.

Two ways, each for those who want it: torch.compile of the norms and MLPs of a layer, and liger-kernel's functions for
RMS norms, with or without an offset of one, and for MLPs with a SiLU gate. Refuses to know families; changes no class,
only the modules of one model, and neither the names nor the places of weights.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trigon.errors import ModelError

_FORWARDS_AT_MOST = 64


def compile_parts(layer: nn.Module) -> None:
    """Compile a layer's norms, and its MLP unless that has experts: for any number of tokens, at their first call.

    In place: what is put into them later, adapters or shards, stays in effect.
    """
    # Not the layer as a whole: recomputed under gradient checkpointing, it may meet another of its compiled versions
    # than in the forward (pytorch #166926), and experts cannot be compiled. These parts have one input, and keep the
    # same tensors for the backward in all their versions.
    # Each version counts by the code of forward, which is that of all norms of a model: of 2 and of 3 dimensions, with
    # and without gradient, adapters or autocast. Above its limit torch goes on uncompiled.
    dynamo: Any = torch._dynamo
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _FORWARDS_AT_MOST)
    norms = [module for module in layer.modules() if type(module).__name__.endswith("Norm")]
    mlps = [
        child
        for name, child in layer.named_children()
        if "att" not in name
        and any(isinstance(inner, nn.Linear) for inner in child.modules())
        and not any("experts" in inner for inner, _ in child.named_modules())
    ]
    for part in (*norms, *mlps):
        inside: Any = part
        inside.forward = torch.compile(inside.forward, dynamic=True)


def require_liger(device: torch.device) -> None:
    """Raises: ModelError unless liger-kernel is installed, and the device is one that it has kernels for."""
    if device.type != "cuda":
        raise ModelError(
            f"worker.actor.model.use_liger_kernel needs a GPU, but this run trains on {device.type!r}. Set it to "
            "false, or trainer.device=cuda on a machine that has one."
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise ModelError(
            "worker.actor.model.use_liger_kernel needs liger-kernel, which is not installed: run pip install "
            "liger-kernel, or set it to false."
        )


def use_liger(model: nn.Module) -> int:
    """Let a model's RMS norms and gated MLPs compute by liger-kernel from now on, and return how many do.

    Adapters that are put into an MLP later stay in effect. Raises: ModelError if the model has none of either.
    """
    from liger_kernel.transformers.functional import liger_rms_norm, liger_swiglu

    count = 0
    for module in model.modules():
        kind = type(module).__name__
        part: Any = module
        if kind.endswith("RMSNorm") and getattr(part, "weight", None) is not None:
            # Gemma's weights are what is added to one, and are multiplied in float32.
            offset, casting = (1.0, "gemma") if kind.startswith("Gemma") else (0.0, "llama")
            part.forward = partial(_rms_norm, part, liger_rms_norm, offset=offset, casting=casting)
            count += 1
        elif all(hasattr(part, name) for name in ("gate_proj", "up_proj", "down_proj")) and _is_silu(part):
            part.forward = partial(_gated_mlp, part, liger_swiglu)
            count += 1
    if count == 0:
        raise ModelError(
            f"A {type(model).__name__} has neither RMS norms nor MLPs with a SiLU gate, so liger-kernel has "
            "nothing to do. Set worker.actor.model.use_liger_kernel=false."
        )
    return count


def _is_silu(mlp: Any) -> bool:
    # Experts, which are stacked, have such attributes too, but no layers behind them.
    layers = all(isinstance(getattr(mlp, name), nn.Module) for name in ("gate_proj", "up_proj", "down_proj"))
    activation = getattr(mlp, "act_fn", None)
    return layers and (isinstance(activation, nn.SiLU) or type(activation).__name__ in ("SiLUActivation", "SiLU"))


def _rms_norm(norm: Any, function: Any, states: Tensor, *, offset: float, casting: str) -> Tensor:
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    # Not in place: that would overwrite the gradient that reaches the norm, which others may hold.
    output: Tensor = function(states, norm.weight, epsilon, offset, casting, False)
    return output


def _gated_mlp(mlp: Any, function: Any, states: Tensor) -> Tensor:
    output: Tensor = mlp.down_proj(function(mlp.gate_proj(states), mlp.up_proj(states)))
    return output
