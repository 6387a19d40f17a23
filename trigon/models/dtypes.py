"""The torch dtypes of the names that configuration files use, and the dtype of a computation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from trigon.config.names import DTYPE_ALIASES, Dtype

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of a short or long name ("bf16", "bfloat16"); None if it is unknown."""
    for short, dtype in DTYPES.items():
        if short == DTYPE_ALIASES.get(name, name):
            return dtype
    return None


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of autocast if it is enabled on the device, else the given one."""
    known = torch.amp.is_autocast_available(device.type)  # not for "meta"
    return torch.get_autocast_dtype(device.type) if known and torch.is_autocast_enabled(device.type) else dtype


def autocast_off(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast on the device."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()
