"""The memory that the parameters of a train engine need on this rank."""

from __future__ import annotations

from torch import nn

from trigon.config.names import OptimizerStrategy
from trigon.training.optim import on_this_rank, state_bytes
from trigon.training.protocol import Sizes


def sizes_of(trained: nn.Module, strategy: OptimizerStrategy, *, makes_updates: bool) -> Sizes:
    """Return the sizes of a module, some of whose parameters may be frozen, and of its updates."""
    parameters = list(trained.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    updated = list(map(on_this_rank, trainable)) if makes_updates else []
    return Sizes(
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in trainable),
        weight_bytes=sum(part.numel() * part.element_size() for part in map(on_this_rank, parameters)),
        gradient_bytes=sum(part.numel() * part.element_size() for part in updated),
        optimizer_bytes=sum(state_bytes(part, strategy) for part in updated),
    )
