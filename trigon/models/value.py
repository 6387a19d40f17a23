"""Models that estimate the reward that is to come, for each token.

A ValueModel is the policy's model with a head of one output in place of the head over the
vocabulary; an ActorCritic is a policy with such a head beside its own, on the same hidden states.
Both take packed rows: prompts and images are shared by the completions of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trigon.models.dtypes import autocast_off
from trigon.models.logprobs import Predictions, target_and_source_positions, use_logprob_head
from trigon.models.lora import adapters_of
from trigon.models.policy import Policy
from trigon.models.routing import RouterLoad
from trigon.models.sequence_parallel import RowSlice
from trigon.types import NamedTensors, PackedGroups, TokenLogprobs

HEAD_NAME = "value_head"
"""The name of the head of an ActorCritic."""


class ValueHead(nn.Linear):
    """A head with one output, computed in float32 or wider. It starts at zero."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, 1, device=device, dtype=torch.float32)
        self.requires_grad_(True)

    def reset_parameters(self) -> None:
        """Set weight and bias to zero: every value is 0 until the first update."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return the values of states: [..., D] -> [...]."""
        with autocast_off(input.device):
            dtype = torch.promote_types(input.dtype, torch.float32)
            values = functional.linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
            return values[..., 0].clone()  # FSDP warns of outputs that are views

    @property
    def has_adapters(self) -> bool:
        """False; see checkpointing.Saved."""
        return False

    def saved_tensors(self) -> NamedTensors:
        """Iterate over its parameters, by their names in a checkpoint of a head alone."""
        yield from ((f"{HEAD_NAME}.{name}", part) for name, part in self.named_parameters())

    def clear_features(self) -> None:
        """Do nothing: a head does not see images."""


class ValueModel(Policy):
    """Computes the values of states under a model that load_model returned.

    The model's head is replaced by a ValueHead, under the same name. The temperature and the banned
    tokens of a Policy have no effect.
    """

    head_methods = ()
    head_dtype = torch.float32
    num_outputs = 1

    def _use_head(self, model: Any) -> None:
        weight = self.family.language_model(model).embed_tokens.weight
        model._tied_weights_keys = {}  # the embedding keeps its weight, the new head has its own
        model.lm_head = ValueHead(weight.shape[1], weight.device)

    def forward(  # type: ignore[override]
        self, packed: PackedGroups, *, run_dummy_vision: bool = False, with_next: bool = False
    ) -> Tensor:
        """Return the value of the state before each sampled token of a row: [S], in row order.

        Args: packed, run_dummy_vision: see Policy.forward.
            with_next: return [2, S]: the second row has the values of the states after each token.
        Returns: float32 (float64 for float64), on the model's device.
        """
        states, row = self.row_states(packed, run_dummy_vision=run_dummy_vision)
        return _row_values(self, self.model.lm_head, states, row, packed, with_next=with_next)

    def train_head(self) -> None:
        """Make the head trainable again after add_lora, which freezes all weights of the model."""
        self.model.lm_head.requires_grad_(True)

    def saved_tensors(self) -> NamedTensors:
        """See Policy. With LoRA the adapters and the head, which is trained in full."""
        yield from super().saved_tensors()
        if adapters_of(self.model):
            yield from ((f"lm_head.{name}", part) for name, part in self.model.lm_head.named_parameters())


class ActorCritic(Policy):
    """A policy with a value head on its trunk, which starts at zero.

    The head is no part of the policy's weights in a weight sync, an export and a checkpoint.
    """

    row_methods = (*Policy.row_methods, "values", "with_values")

    def _use_head(self, model: Any) -> None:
        use_logprob_head(model)
        weight = self.family.language_model(model).embed_tokens.weight
        self.value_head = ValueHead(weight.shape[1], weight.device)

    def values(self, packed: PackedGroups, *, run_dummy_vision: bool = False, with_next: bool = False) -> Tensor:
        """Return what ValueModel.forward does. Only the head gets a gradient, not the trunk."""
        with torch.no_grad():
            states, row = self.row_states(packed, run_dummy_vision=run_dummy_vision)
        return _row_values(self, self.value_head, states, row, packed, with_next=with_next)

    def with_values(
        self,
        packed: PackedGroups,
        *,
        entropy_gradient: bool = False,
        run_dummy_vision: bool = False,
        against: Predictions | None = None,
        trunk_gradient: float = 1.0,
        with_next: bool = False,
        router_load: bool = False,
    ) -> tuple[TokenLogprobs, Tensor]:
        """Return what Policy.forward and ValueModel.forward do, from one pass through the trunk.

        trunk_gradient: factor of the values' gradient where it goes from the head into the trunk.
        The head has all of it.
        """
        load = RouterLoad() if router_load else None
        states, row = self.row_states(packed, run_dummy_vision=run_dummy_vision, load=load)
        outputs = self.score_states(states, row, packed, entropy_gradient=entropy_gradient, against=against, load=load)
        scaled = _scale_gradient(states, trunk_gradient)
        return outputs, _row_values(self, self.value_head, scaled, row, packed, with_next=with_next)


def _row_values(
    model: Policy, head: nn.Module, states: Tensor, row: RowSlice, packed: PackedGroups, *, with_next: bool
) -> Tensor:
    """Return the values of a row's sampled tokens; see ValueModel.forward."""
    targets, sources = target_and_source_positions(packed.spans)

    def values(places: Tensor) -> Tensor:
        own, held = model.states_at(places, states, row)
        return model.of_row([head(own)], held, len(places))[0]

    before = values(sources)
    return torch.stack([before, values(targets)]) if with_next else before


def _scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return the same values, whose gradient is multiplied by a factor on its way back."""
    if not tensor.requires_grad:
        return tensor
    scaled = tensor.view_as(tensor)
    scaled.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return scaled
