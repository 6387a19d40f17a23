"""The sizes of a model's parts, from which the memory of a run follows: parameters by FSDP unit.

They are exact: the model is created on the meta device, which has no memory, from its config.json
alone. Does not depend on configuration, optimizers and devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from trigon.config.schema import LoraConfig
from trigon.models.dimensions import Dimensions, dimensions_of
from trigon.models.lora import adapter_sizes
from trigon.models.policy import Policy
from trigon.models.tensor_parallel import tensor_parallel_sizes

# Their norms keep other tensors than activations.py counts.
_NOT_COUNTED = ("gemma", "gemma3_text")


@dataclass(frozen=True, slots=True)
class UnitSize:
    """The number of weights in a part of a model. adapters: those of LoRA, in float32."""

    frozen: int
    trained: int
    adapters: int

    @property
    def total(self) -> int:
        """All weights."""
        return self.frozen + self.trained + self.adapters


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a policy.

    model_type: of its config. layers: units that FSDP gathers one by one: decoder layers, vision
    blocks and mergers. head, embedding: units as well; None if they share a weight. root:
    everything else, and a weight that they share. largest: weights of the largest tensor.
    key_values: keys and values of a token in the KV cache, over all layers. key_heads: of a layer.
    tensor_parallel_sizes: see tensor_parallel.py. tied: the head is the embedding. trains_vision:
    the vision tower has gradients. dimensions: None for a family whose passes are not counted.
    critic: the sizes of the run's critic; None without one. value_head: weights of a value head on
    the policy's trunk, in float32, which are no part of the units.
    """

    model_type: str
    layers: tuple[UnitSize, ...]
    head: UnitSize | None
    embedding: UnitSize | None
    root: UnitSize
    largest: int
    key_values: int
    key_heads: int
    tensor_parallel_sizes: tuple[int, ...]
    tied: bool
    trains_vision: bool
    dimensions: Dimensions | None
    critic: ModelSize | None = None
    value_head: int = 0

    @property
    def all(self) -> UnitSize:
        """The sum over all units."""
        units = [unit for unit in (*self.layers, self.head, self.embedding, self.root) if unit is not None]
        return UnitSize(
            frozen=sum(unit.frozen for unit in units),
            trained=sum(unit.trained for unit in units),
            adapters=sum(unit.adapters for unit in units),
        )

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA's adapters are trained instead of the weights."""
        return self.all.adapters > 0


def model_size(policy: Policy, lora: LoraConfig | None) -> ModelSize:
    """Return the sizes of a policy without adapters, on any device.

    lora: count the adapters that these settings would add; None: all weights that are not frozen
    are trained. Adding them would take seconds.
    Raises: ModelError if the settings do not fit the model.
    """
    config = policy.model.config
    text = config.get_text_config()
    units = [*policy.layers(), *policy.mergers()]
    ends = [] if policy.has_tied_head else [policy.head, policy.embedding]
    in_units = {parameter for unit in (*units, *ends) for parameter in unit.parameters()}
    adapters: dict[nn.Parameter, int] | None = None
    if lora is not None:
        sizes = adapter_sizes(policy.model, lora)
        adapters = {policy.model.get_submodule(name).weight: number for name, number in sizes.items()}
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    parts = [part for module in policy.family.vision_modules(policy.model) for part in module.parameters()]
    return ModelSize(
        model_type=str(config.model_type),
        layers=tuple(_unit_size(unit.parameters(), adapters) for unit in units),
        head=None if policy.has_tied_head else _unit_size(policy.head.parameters(), adapters),
        embedding=None if policy.has_tied_head else _unit_size(policy.embedding.parameters(), adapters),
        root=_unit_size((part for part in policy.parameters() if part not in in_units), adapters),
        largest=max(parameter.numel() for parameter in policy.parameters()),
        key_values=2 * _attention_layers(text) * text.num_key_value_heads * head_dim,
        key_heads=text.num_key_value_heads,
        tensor_parallel_sizes=tensor_parallel_sizes(config),
        tied=policy.has_tied_head,
        trains_vision=any(part.requires_grad if adapters is None else part in adapters for part in parts),
        dimensions=None if text.model_type in _NOT_COUNTED else dimensions_of(config),
    )


def _attention_layers(text: Any) -> int:
    """Return the number of layers with keys and values; linear attention has none."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return sum(kind != "linear_attention" for kind in kinds)


def _unit_size(parameters: Iterable[nn.Parameter], adapters: Mapping[nn.Parameter, int] | None) -> UnitSize:
    """Return the size of a unit. adapters: weights of each parameter's adapter; None: no LoRA."""
    frozen = trained = of_adapters = 0
    for parameter in parameters:
        if adapters is None and parameter.requires_grad:
            trained += parameter.numel()
        else:
            frozen += parameter.numel()
        of_adapters += 0 if adapters is None else adapters.get(parameter, 0)
    return UnitSize(frozen=frozen, trained=trained, adapters=of_adapters)
