"""The optimizer and its learning-rate schedule.

Does not depend on models, process groups and losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, assert_never, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trigon.names import LearningRateSchedule, OptimizerStrategy

LOW_BITS = "low_bits"
"""State of adamw_bf16: the bits by which a bfloat16 weight differs from its float32 value."""

COMPENSATION = "compensation"
"""State of adamw_bf16 in older checkpoints, in place of the low bits."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate as a function of the update's number, so that resuming needs no state.

    peak: learning rate after the warm-up.
    warmup_updates: the k-th update of the warm-up, counted from 1, has peak * k / warmup_updates;
    no update has a learning rate of 0.
    total_updates: update at which the cosine reaches its minimum.
    min_ratio: minimum of the cosine, as a fraction of peak.
    """

    peak: float
    shape: LearningRateSchedule
    warmup_updates: int
    total_updates: int
    min_ratio: float

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of the given update, counted from 1."""
        if update <= self.warmup_updates:
            return self.peak * update / self.warmup_updates
        match self.shape:
            case "constant":
                return self.peak
            case "cosine":
                span = max(self.total_updates - self.warmup_updates, 1)
                progress = min((update - self.warmup_updates) / span, 1.0)
                floor = self.peak * self.min_ratio
                return floor + (self.peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
            case _:
                assert_never(self.shape)


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    strategy: OptimizerStrategy,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> Optimizer:
    """Return AdamW over the trainable parameters.

    Matrices have weight decay; vectors (norms, biases) do not.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match strategy:
        case "adamw":
            # torch's default is the fastest on CUDA. On the CPU it is the for-loop; fused is far
            # faster.
            on_cpu = all(parameter.device.type == "cpu" for parameter in trainable)
            return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=on_cpu or None)
        case "adamw_bf16":
            return AdamWBf16(groups, learning_rate=learning_rate, betas=betas)
        case _:
            assert_never(strategy)


def on_this_rank(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, and any other tensor unchanged."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else cast(Tensor, local())


def state_bytes(parameter: Tensor, strategy: OptimizerStrategy) -> int:
    """Return the bytes of the optimizer states of one parameter."""
    match strategy:
        case "adamw":
            each = 2 * parameter.element_size()
        case "adamw_bf16":
            each = parameter.element_size() + 4 + (2 if parameter.dtype == torch.bfloat16 else 0)
        case _:
            assert_never(strategy)
    return parameter.numel() * each


def state_dtype(parameter: Tensor, key: str, strategy: OptimizerStrategy) -> torch.dtype:
    """Return the dtype of one optimizer state of a parameter. key: its name, such as "exp_avg"."""
    if strategy == "adamw_bf16" and key == "exp_avg_sq":
        return torch.float32
    return torch.int16 if key == LOW_BITS else parameter.dtype


class AdamWBf16(Optimizer):
    """AdamW that trains bfloat16 parameters as if they were float32.

    Each weight is a float32 number in two halves: the parameter holds it rounded to bfloat16, and
    the state "low_bits" (int16) what was rounded away, so that no update is lost. Weights are those
    of torch.optim.AdamW on float32 weights, bit for bit, if its first moment is rounded to bfloat16
    after each update. The second moment is in float32: with beta2 = 0.999 its increments are below
    the resolution of bfloat16. Memory: 2 (weight) + 2 (first moment) + 4 (second moment) + 2 (low
    bits) bytes per parameter, plus the gradient.

    Parameters in float32, such as adapters, have both moments in float32 and no low bits.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        epsilon: float = 1e-8,
    ) -> None:
        super().__init__(list(params), {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype == torch.bfloat16:
                state[LOW_BITS] = torch.zeros_like(parameter, dtype=torch.int16)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        # All operations are elementwise, so each rank updates its local shard. They are those of
        # torch.optim.AdamW(foreach=False), in its order, so that both round alike.
        gradient = on_this_rank(gradient).float()
        first, second = on_this_rank(state["exp_avg"]), on_this_rank(state["exp_avg_sq"])
        weight = _join(parameter, state)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        mean = first.float().lerp_(gradient, 1 - beta1)  # first itself, if it is in float32
        first.copy_(mean)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (second.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        weight.addcdiv_(mean, scale, value=-(group["lr"] / (1 - beta1**step)))
        _split(weight, parameter, state)


@torch.no_grad()
def upgrade_state(parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Make the state of an older checkpoint one of AdamWBf16, without losing precision.

    Older versions of AdamWBf16 had a "compensation" in place of the low bits, a bfloat16 number to
    be added to the weight. AdamW on bfloat16 weights has neither, and a bfloat16 second moment.
    """
    state["exp_avg_sq"] = state["exp_avg_sq"].float()
    compensation = state.pop(COMPENSATION, None)
    if parameter.dtype == torch.bfloat16 and LOW_BITS not in state:
        state[LOW_BITS] = torch.zeros_like(parameter, dtype=torch.int16)
        if compensation is not None:
            exact = on_this_rank(parameter).float() + on_this_rank(compensation).float()
            _split(exact, parameter, state)


def _join(parameter: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Return this rank's weights in float32; the parameter itself if it is in float32."""
    weight = on_this_rank(parameter)
    if weight.dtype == torch.float32:
        return weight
    assert weight.dtype == torch.bfloat16, f"adamw_bf16 trains no {weight.dtype}"
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(on_this_rank(state[LOW_BITS])).view(torch.float32)


def _split(weight: Tensor, parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Write weights in float32 into this rank's part of the parameter and of its low bits.

        float32 weight      s eeeeeeee mmmmmmm | nnnnnnnnnnnnnnnn
        parameter           s eeeeeeee mmmmmmm                       + 1 unit if n >= 0x8000
        low bits                                 n, signed: -0x8000 ... 0x7fff

    The parameter is the weight rounded to the nearest (ties away from zero), since n >= 0x8000 is
    negative as a signed number; parameter * 2^16 + low bits is the weight again.
    """
    target = on_this_rank(parameter)
    if target.dtype == torch.float32:
        return  # weight is target
    bits = weight.view(torch.int32)
    on_this_rank(state[LOW_BITS]).copy_(bits)  # keeps the lower 16 bits
    target.view(torch.int16).copy_(bits.add(0x8000).bitwise_right_shift_(16))
    # Rounding up can turn the bits of a nan into those of a number.
    target.masked_fill_(weight.isnan(), torch.nan)
