"""The optimizer and its learning-rate schedule.

Does not depend on models, process groups and losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trigon.config.names import OptimizerStrategy
from trigon.config.schema import OptimConfig

LOW_BITS = "low_bits"
"""State of adamw_bf16: the bits by which a bfloat16 weight differs from its float32 value."""

STEP = "step"
"""State of all strategies: the number of updates of a parameter, a float32 scalar."""

SLICE_VALUES = 2**24
"""Number of values that AdamWBf16 updates at a time: enough for a GPU to be busy with, few enough
that the temporaries are small.
"""

_SLICE_BYTES = 12  # of temporaries for each value of a slice: three float32 tensors


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate as a function of the update's number, so that resuming needs no state.

    optim: its lr is the learning rate after the warm-up.
    warmup_updates: the k-th update of the warm-up, counted from 1, has lr * k / warmup_updates; no
    update has a learning rate of 0.
    total_updates: updates of the run, after the last of which the cosine reaches its minimum.
    """

    optim: OptimConfig
    warmup_updates: int = 0
    total_updates: int = 0

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of the given update, counted from 1."""
        peak = self.optim.lr
        if update <= self.warmup_updates:
            return peak * update / self.warmup_updates
        match self.optim.lr_scheduler_type:
            case "constant":
                return peak
            case "cosine":
                span = max(self.total_updates - self.warmup_updates, 1)
                progress = min((update - 1 - self.warmup_updates) / span, 1.0)
                floor = peak * (self.optim.min_lr_ratio or 0.0)
                return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
            case _:
                assert_never(self.optim.lr_scheduler_type)


def make_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> Optimizer:
    """Return AdamW over the trainable parameters.

    Matrices have weight decay; vectors (norms, biases) do not.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match optim.strategy:
        case "adamw":
            # torch's default on CUDA (foreach) allocates the square roots of all second moments at
            # once, 4 bytes a parameter, and on the CPU it is a slow for-loop. fused needs no
            # temporaries.
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)
        case "adamw_bf16":
            return AdamWBf16(groups, learning_rate=optim.lr, betas=optim.betas)
        case _:
            assert_never(optim.strategy)


def on_this_rank(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, and any other tensor unchanged."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else cast(Tensor, local())


def state_dtypes(parameter: Tensor, strategy: OptimizerStrategy) -> dict[str, torch.dtype]:
    """Return the dtype of each optimizer state of a parameter, by its name ("exp_avg").

    Each has the shape of the parameter, except STEP, which is a scalar.
    """
    match strategy:
        case "adamw":
            moments = {"exp_avg": parameter.dtype, "exp_avg_sq": parameter.dtype}
        case "adamw_bf16":
            moments = {"exp_avg": parameter.dtype, "exp_avg_sq": torch.float32}
            if parameter.dtype == torch.bfloat16:
                moments[LOW_BITS] = torch.int16
        case _:
            assert_never(strategy)
    return {STEP: torch.float32, **moments}


def state_bytes(parameter: Tensor, strategy: OptimizerStrategy) -> int:
    """Return the bytes of the optimizer states of one parameter, without STEP."""
    dtypes = state_dtypes(parameter, strategy)
    return parameter.numel() * sum(dtype.itemsize for name, dtype in dtypes.items() if name != STEP)


def update_bytes(parameters: Iterable[Tensor], strategy: OptimizerStrategy) -> int:
    """Return the peak of the temporaries of one update, in bytes.

    parameters: the trainable parameters, or their shards on this rank.
    """
    match strategy:
        case "adamw":
            return 0
        case "adamw_bf16":
            largest = max((parameter.numel() for parameter in parameters), default=0)
            return _SLICE_BYTES * min(largest, SLICE_VALUES)
        case _:
            assert_never(strategy)


def empty_state(parameter: Tensor, strategy: OptimizerStrategy) -> dict[str, Tensor]:
    """Return the optimizer states of a parameter before its first update: zeros.

    STEP is on the device that reads it. The fused kernel of adamw reads it on the device of the
    parameter, adamw_bf16 on the host, where that costs no synchronization.
    """
    step_device = parameter.device if strategy == "adamw" else torch.device("cpu")
    return {
        name: torch.zeros((), device=step_device) if name == STEP else torch.zeros_like(parameter, dtype=dtype)
        for name, dtype in state_dtypes(parameter, strategy).items()
    }


def move_states(optimizer: Optimizer, device: torch.device) -> None:
    """Move the states of all parameters to a device, but for "step", which stays where it is read.

    See empty_state. Each tensor is freed as soon as its copy exists.
    """
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != STEP:
                state[key] = value.to(device)


class AdamWBf16(Optimizer):
    """AdamW that trains bfloat16 parameters as if they were float32.

    Each weight is a float32 number in two halves: the parameter holds it rounded to bfloat16, and
    the state "low_bits" (int16) what was rounded away, so that no update is lost. Weights equal
    those of torch.optim.AdamW on float32 weights, bit for bit, if its first moment is rounded to
    bfloat16 after each update. The second moment is in float32: with beta2 = 0.999 its increments
    are below the resolution of bfloat16. Memory: 2 (weight) + 2 (first moment) + 4 (second moment)
    + 2 (low bits) bytes per parameter, plus the gradient, and the temporaries of one slice
    (update_bytes).

    Parameters in float32, such as adapters, have both moments in float32 and no low bits.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        epsilon: float = 1e-8,
        slice_values: int = SLICE_VALUES,
    ) -> None:
        super().__init__(list(params), {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0})
        self._slice_values = slice_values

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
            state.update(empty_state(parameter, "adamw_bf16"))
        state[STEP] += 1
        step = float(state[STEP])
        # All operations are elementwise, so each rank updates its local shard, slice by slice.
        tensors = [parameter, gradient, state["exp_avg"], state["exp_avg_sq"]]
        if parameter.dtype == torch.bfloat16:
            tensors.append(state[LOW_BITS])
        for parts in _slices([on_this_rank(tensor) for tensor in tensors], self._slice_values):
            _update_slice(*parts, step=step, group=group)


def _update_slice(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    low_bits: Tensor | None = None,
    *,
    step: float,
    group: Mapping[str, Any],
) -> None:
    """Update a slice of a parameter in place.

    The operations are the same as in torch.optim.AdamW(foreach=False), so that both round alike.
    Their order keeps no more than three float32 temporaries alive.

    Args:
        first, second: moments. low_bits: None for weights in float32.
        step: number of this update. group: learning rate and other settings.
    """
    beta1, beta2 = group["betas"]
    gradient = gradient.float()
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    mean = first.float().lerp_(gradient, 1 - beta1)  # first itself, if it is in float32
    del gradient
    first.copy_(mean)
    scale = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    exact = weight if low_bits is None else _join(weight, low_bits)
    exact.mul_(1 - group["lr"] * group["weight_decay"])
    exact.addcdiv_(mean, scale, value=-(group["lr"] / (1 - beta1**step)))
    del mean, scale
    if low_bits is not None:
        _split(exact, weight, low_bits)


def _slices(tensors: Sequence[Tensor], limit: int) -> Iterator[Sequence[Tensor]]:
    """Yield views of the same part of each tensor, of at most limit values; together all of them.

    tensors: tensors of the same shape, with any strides.
    """
    if tensors[0].numel() <= limit:
        yield tensors
        return
    rows = limit // tensors[0][0].numel()
    if rows > 0:
        yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
        return
    for row in zip(*tensors, strict=True):
        yield from _slices(row, limit)


def _join(weight: Tensor, low_bits: Tensor) -> Tensor:
    """Return the float32 weights whose halves are bfloat16 weights and their low bits."""
    assert weight.dtype == torch.bfloat16, f"adamw_bf16 trains no {weight.dtype}"
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(low_bits).view(torch.float32)


def _split(exact: Tensor, weight: Tensor, low_bits: Tensor) -> None:
    """Write float32 weights into bfloat16 weights and their low bits. Overwrites exact.

        float32 weight      s eeeeeeee mmmmmmm | nnnnnnnnnnnnnnnn
        weight              s eeeeeeee mmmmmmm                       + 1 unit if n >= 0x8000
        low bits                                 n, signed: -0x8000 ... 0x7fff

    The weight is the float32 weight rounded to the nearest (ties away from zero), since n >= 0x8000
    is negative as a signed number; weight * 2^16 + low bits is the float32 weight again.
    """
    is_nan = exact.isnan()
    bits = exact.view(torch.int32)
    low_bits.copy_(bits)  # keeps the lower 16 bits
    weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))
    # Rounding up can turn the bits of a nan into the bits of a number.
    weight.masked_fill_(is_nan, torch.nan)
