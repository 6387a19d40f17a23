"""Fewer and larger kernels for norms and MLPs, in a model that is already loaded.

Two alternatives: torch.compile of the norms and MLPs of each layer, and the functions of
liger-kernel for RMS norms and for MLPs with a SiLU gate. Both replace the `forward` of single
modules, and change neither classes nor the names of weights. Modules are recognized by their
structure, not by family.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trigon.errors import ModelError
from trigon.models.kernels import compiled


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the norms of layers and their MLPs, except MoE, for any number of tokens.

    Compilation happens at the first call of each module. The forwards are replaced in place:
    adapters or shards that are added to the modules later remain effective.
    """
    # Not a layer as a unit: when it is recomputed under gradient checkpointing, another compiled
    # version than in the forward may be chosen (pytorch #166926), and MoE layers cannot be
    # compiled. Norms and MLPs have one input, and save the same tensors in all their versions. All
    # norms of a model share the code of their forward, so that their versions count together: for 2
    # and 3 dimensions, with and without gradient, adapters or autocast.
    for layer in layers:
        norms = [module for module in layer.modules() if type(module).__name__.endswith("Norm")]
        mlps = [
            child
            for name, child in layer.named_children()
            if "att" not in name
            and any(isinstance(inner, nn.Linear) for inner in child.modules())
            and not any("experts" in inner for inner, _ in child.named_modules())
        ]
        for part in (*norms, *mlps):
            module: Any = part
            module.forward = compiled(module.forward)


def require_liger(device: torch.device) -> None:
    """Check that liger-kernel can run.

    Raises: ModelError if it is not installed, or the device is not a GPU.
    """
    if device.type != "cuda":
        raise ModelError(
            f"worker.actor.model.use_liger_kernel needs a GPU, but this run trains on {device.type!r}. Set it to "
            "false, or set trainer.device=cuda on a machine with a GPU."
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise ModelError(
            "worker.actor.model.use_liger_kernel needs liger-kernel, which is not installed: run pip install "
            "liger-kernel, or set it to false."
        )


def use_liger(model: nn.Module) -> int:
    """Replace RMS norms and SiLU-gated MLPs by functions of liger-kernel.

    Adapters that are added to an MLP later remain effective.

    Returns: the number of modules replaced. Raises: ModelError if there is none.
    """
    from liger_kernel.transformers.functional import liger_rms_norm, liger_swiglu

    count = 0
    for module in model.modules():
        kind = type(module).__name__
        part: Any = module
        if kind.endswith("RMSNorm") and getattr(part, "weight", None) is not None:
            # These families scale by 1 + weight, in float32; Gemma 4 by the weight.
            casting = "gemma" if kind.startswith(("Gemma", "Qwen3_5", "Qwen3Next")) else "llama"
            offset = 1.0 if casting == "gemma" and not kind.startswith("Gemma4") else 0.0
            part.forward = partial(_rms_norm, part, liger_rms_norm, offset=offset, casting=casting)
            count += 1
        elif all(hasattr(part, name) for name in ("gate_proj", "up_proj", "down_proj")) and _is_silu(part):
            part.forward = partial(_gated_mlp, part, liger_swiglu)
            count += 1
    if count == 0:
        raise ModelError(
            f"A {type(model).__name__} has neither RMS norms nor MLPs with a SiLU gate, so liger-kernel cannot "
            "be used. Set worker.actor.model.use_liger_kernel=false."
        )
    return count


def _is_silu(mlp: Any) -> bool:
    # Stacked experts have attributes of these names too, but they are not modules.
    are_modules = all(isinstance(getattr(mlp, name), nn.Module) for name in ("gate_proj", "up_proj", "down_proj"))
    activation = getattr(mlp, "act_fn", None)
    return are_modules and (isinstance(activation, nn.SiLU) or type(activation).__name__ in ("SiLUActivation", "SiLU"))


def _rms_norm(norm: Any, function: Any, states: Tensor, *, offset: float, casting: str) -> Tensor:
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    # Not in place: that would overwrite the incoming gradient, to which other references may exist.
    output: Tensor = function(states, norm.weight, epsilon, offset, casting, False)
    return output


def _gated_mlp(mlp: Any, function: Any, states: Tensor) -> Tensor:
    output: Tensor = mlp.down_proj(function(mlp.gate_proj(states), mlp.up_proj(states)))
    return output
