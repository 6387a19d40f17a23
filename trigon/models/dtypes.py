"""The torch dtypes of the names that configuration files and commands use."""

from __future__ import annotations

import torch

from trigon.names import DTYPE_ALIASES, Dtype

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of a short or long name ("bf16", "bfloat16"); None if it is unknown."""
    for short, dtype in DTYPES.items():
        if short == DTYPE_ALIASES.get(name, name):
            return dtype
    return None
