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
            return parameter.numel() * 2 * parameter.element_size()
        case "adamw_bf16":
            return parameter.numel() * (2 * parameter.element_size() + 4)
        case _:
            assert_never(strategy)


def state_dtype(parameter: Tensor, key: str, strategy: OptimizerStrategy) -> torch.dtype:
    """Return the dtype of one optimizer state of a parameter. key: its name, such as "exp_avg"."""
    return torch.float32 if strategy == "adamw_bf16" and key == "exp_avg_sq" else parameter.dtype


class AdamWBf16(Optimizer):
    """AdamW for bfloat16 parameters, without float32 master weights.

    The rounding error of each update is stored per parameter and added to the next update (Kahan
    summation). The second moment is in float32: with beta2 = 0.999 its increments are below the
    resolution of bfloat16. Memory: 2 (weight) + 2 (first moment) + 4 (second moment) + 2
    (compensation) bytes per parameter, plus the gradient.
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
            state["compensation"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        # All operations are elementwise, so each rank updates its local shard.
        weight, gradient = on_this_rank(parameter), on_this_rank(gradient).float()
        first, second = on_this_rank(state["exp_avg"]), on_this_rank(state["exp_avg_sq"])
        compensation = on_this_rank(state["compensation"])
        mean = first.float().lerp(gradient, 1 - beta1)
        first.copy_(mean)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = mean.div_(1 - beta1**step).div_(scale).add_(weight.float(), alpha=group["weight_decay"])
        change = compensation.float().sub(update, alpha=group["lr"])
        before = weight.to(torch.float32, copy=True)
        weight.copy_(before + change)
        compensation.copy_(change - (weight.float() - before))
