"""Copies from the host to a GPU that do not make the host wait.

The host issues the work of a pass long before a GPU is done with it, unless something makes it wait
for the GPU. A copy from ordinary memory does: only from pinned memory does the GPU copy by itself.
Does not depend on models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PINNED_FOR = {"cuda"}
"""Device types that copy from pinned memory. Not meta: without a driver nothing can be pinned."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, copied through pinned memory if it is on the host.

    The copy is in order with the other work of the current stream; torch keeps the pinned memory
    until it is done. The tensor itself if it is on the device already.
    """
    if device.type not in PINNED_FOR or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def concatenated(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate tensors of the host, in pinned memory if they will be copied to a GPU.

    device: the device to which to_device will copy the result.
    """
    if device.type not in PINNED_FOR:
        return torch.cat(list(parts))
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return torch.cat(list(parts), out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))


def host_bytes(num_bytes: int, *, pinned: bool) -> int:
    """Return the host memory of a tensor: torch rounds pinned memory up to a power of two."""
    return 1 << max(0, num_bytes - 1).bit_length() if pinned else num_bytes


def to_pinned(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory, pinned if the tensor is on a GPU.

    The copy of a tensor on a GPU is in order with the other work of the current stream, and so is a
    later copy back. The host must not read it before the stream is synchronized.
    """
    if tensor.device.type not in PINNED_FOR:
        return tensor.to("cpu", copy=True)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
