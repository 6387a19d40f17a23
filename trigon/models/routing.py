"""The routers of MoE layers in a packed row: which experts each token uses.

A router scores all experts for each token and chooses the best few. A pass over a row may ask for
more than transformers' routers return:

- **Router replay** (R3, arXiv:2510.11370): each token uses the experts that the rollout engine has
  recorded for it. Their weights still come from the router, with gradient.
- **The load of the experts**, for a load-balancing loss.

The MLPs of transformers take no keyword arguments. What a pass asks for is therefore handed to a
router when its layer begins, also where the layer is computed again under gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trigon.models.dtypes import autocast_off
from trigon.models.families import ModelFamily
from trigon.types import NO_RECORD


@dataclass(slots=True, eq=False)
class RouterLoad:
    """What the routers of a pass over a row have chosen, by the number of the layer; filled by it.

    assignments: [E] float32, how many tokens use each expert. probabilities: [E] float32, the sum
    of the probabilities of each expert over the tokens, with gradient.
    """

    assignments: dict[int, Tensor] = field(default_factory=dict)
    probabilities: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class RowRouting:
    """What a pass over a row asks of the routers. On the device of the row.

    recorded: [T, layers, k] int64, the experts of each token in each decoder layer, NO_RECORD where
    the router chooses; None: it chooses for all tokens.
    counted: [T] float32, 1 for the tokens that count for the load, 0 for others.
    load: collects it; None: nothing does.
    """

    recorded: Tensor | None
    counted: Tensor
    load: RouterLoad | None


def use_row_routing(model: Any, family: ModelFamily) -> None:
    """Make the routers of a model do what a row's RowRouting says.

    Their parameters do not change. Without metadata of a row they compute what transformers does.
    """
    for number, router in routers_of(model, family).items():
        kind: Any = type(router)
        router.__class__ = _with_routing(kind)
        router.layer_number, router.row_routing = number, None
        layer: nn.Module = family.language_model(model).layers[number]
        layer.register_forward_pre_hook(_hand_over, with_kwargs=True)


def routers_of(model: Any, family: ModelFamily) -> dict[int, Any]:
    """Return the routers of a model by the numbers of their layers; empty without experts."""
    if family.experts == "none":
        return {}
    layers = family.language_model(model).layers
    return {number: layer.mlp.gate for number, layer in enumerate(layers) if hasattr(layer.mlp, "gate")}


class ExpertRecorder:
    """Records the experts that the routers of a model choose in each forward."""

    def __init__(self, model: Any, family: ModelFamily) -> None:
        """Watch the routers of a model, which must have some."""
        self._num_layers = len(family.language_model(model).layers)
        self._experts: dict[int, Tensor] = {}  # by the number of the layer
        for number, router in routers_of(model, family).items():
            router.register_forward_hook(partial(self._note, number))

    def take(self) -> Tensor:
        """Return the experts that the last forward used: [tokens, layers, k] int16 on the CPU.

        The entries of dense layers are 0.
        """
        chosen = next(iter(self._experts.values()))
        experts = torch.zeros(len(chosen), self._num_layers, chosen.shape[1], dtype=torch.int16)
        for number, of_layer in self._experts.items():
            experts[:, number] = of_layer.to("cpu", torch.int16)
        return experts

    def _note(self, number: int, router: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        self._experts[number] = outputs[2]


def _hand_over(layer: Any, _: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
    metadata: Any = arguments.get("attention_metadata")  # an AttentionMetadata
    layer.mlp.gate.row_routing = None if metadata is None else metadata.routing


@cache
def _with_routing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of transformers' router that does what row_routing says."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = kind.forward(self, hidden_states)
        routing: RowRouting | None = self.row_routing
        if routing is None:
            return logits, weights, experts
        if routing.recorded is not None:
            recorded = routing.recorded[:, self.layer_number]
            experts = torch.where(recorded == NO_RECORD, experts, recorded)
            weights = _weights(logits, experts, normalized=getattr(self, "norm_topk_prob", True))
        if routing.load is not None:
            _add_load(routing.load, self.layer_number, logits, experts, routing.counted)
        return logits, weights, experts

    return type(kind.__name__, (kind,), {"forward": forward})


def _weights(logits: Tensor, experts: Tensor, *, normalized: bool) -> Tensor:
    """Return the weights of the experts of each token as transformers' routers compute them.

    Args: logits: [T, E]. experts: [T, k]. Returns: [T, k] in the dtype of the logits.
    """
    weights = functional.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)


def _add_load(load: RouterLoad, number: int, logits: Tensor, experts: Tensor, counted: Tensor) -> None:
    # A layer that is computed again does the same, and changes nothing.
    probabilities = functional.softmax(logits, dim=-1, dtype=torch.float32)
    with autocast_off(logits.device):  # the product would be in 16 bits
        load.probabilities.setdefault(number, counted @ probabilities)
    # Sums of ones are exact in any order.
    each = counted[:, None].expand_as(experts).flatten()
    load.assignments.setdefault(number, torch.zeros_like(probabilities[0]).scatter_add(0, experts.flatten(), each))
