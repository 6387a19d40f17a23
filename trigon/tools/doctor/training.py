"""The checks of the trainer's memory and of the host's waits during an update."""

from __future__ import annotations

from trigon.config.names import OptimizerStrategy
from trigon.tools.doctor.result import Findings, Setting, Tolerances, bytes_text

RELATIVE_TOLERANCE = 0.05
"""Of measured and computed bytes: the allocator rounds up, and there is a step count per tensor."""


def check_optimizer_memory(setting: Setting) -> Findings:
    """Measure the states and the temporaries of both optimizers, and compare them with arithmetic.

    On the tensors of a few layers and of the embedding of Qwen2.5-VL-3B.
    """
    compared = Tolerances(setting)
    for strategy in ("adamw", "adamw_bf16"):
        _compare_optimizer(compared, setting, strategy)
    return compared.findings()


def check_update(setting: Setting) -> Findings:
    """Measure updates of few and of many micro-batches.

    The host waits for the GPU about equally often in both: a wait in each micro-batch would leave
    the GPU idle.
    """
    from trigon.tools.doctor.updates import measure_updates

    return measure_updates(setting)


def _compare_optimizer(compared: Tolerances, setting: Setting, strategy: OptimizerStrategy) -> None:
    import torch
    from torch import nn

    from trigon.config.schema import OptimConfig
    from trigon.tools.doctor.random_models import MODELS
    from trigon.training.memory import memory_of
    from trigon.training.optim import make_optimizer, state_bytes, update_bytes

    device = torch.device(setting.device)
    shape = MODELS["3b" if setting.device == "cuda" else "tiny"]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    layer = [(width, width), (width, inner), (inner, width), (width,)]
    dtype = torch.bfloat16 if strategy == "adamw_bf16" else torch.float32
    # The largest comes last: its temporaries are then added to the states of all others.
    sizes = [*(layer * 4), (shape["vocab_size"], width)]
    parameters = [nn.Parameter(torch.zeros(size, device=device, dtype=dtype)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(parameters, OptimConfig(strategy=strategy, lr=1e-3))
    weights = sum(parameter.nbytes for parameter in parameters)
    states = sum(state_bytes(parameter, strategy) for parameter in parameters)
    temporaries = update_bytes(parameters, strategy)
    memory = memory_of(device, shared_by=1)
    first, second = memory.peak_bytes(optimizer.step), memory.peak_bytes(optimizer.step)
    compared.figures[f"{strategy}: weights"] = bytes_text(weights)
    compared.figures[f"{strategy}: first update"] = f"{bytes_text(first)}, computed {bytes_text(states + temporaries)}"
    compared.figures[f"{strategy}: further updates"] = f"{bytes_text(second)}, computed {bytes_text(temporaries)}"
    error = abs(first - (states + temporaries)) / (states + temporaries)
    compared.at_most(f"{strategy}: error of the first", error, RELATIVE_TOLERANCE)
    # Of the weights, since computed bytes may be 0.
    compared.at_most(f"{strategy}: error of the others", abs(second - temporaries) / weights, RELATIVE_TOLERANCE)
