"""Keeps the inputs of checkpointed layers in host memory between the forward and the backward.

With gradient checkpointing the input of each layer is what stays on the device until the backward.
Here it is copied to pinned host memory while its layer computes, and comes back while the layer
above it, which comes before it in the backward, is computed again:

    forward    compute stream   layer 0 | layer 1  | layer 2  | ...
               copy stream              | 0 > host | 1 > host |
    backward   compute stream   ... | layer 2   | layer 1   | layer 0
               copy stream          | 1 < host  | 0 < host  |

So at most DEVICE_INPUTS inputs are on the device. On the CPU the same is done by plain copies,
which save nothing. Does not depend on models, sharding and configuration.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

DEVICE_INPUTS = 2
"""The inputs of layers that are on the device at a time: a layer's own, and the next one's."""


def host_bytes_at_most(num_bytes: int) -> int:
    """Return the most pinned memory that inputs of this many bytes, and shorter ones before, take.

    Rounding up takes up to twice as much. Freed blocks are cached, and used again for the same
    power of two only: the blocks of shorter rows take up to 1/2 + 1/4 + ... of it once more.
    """
    return 4 * num_bytes


class ActivationOffload:
    """Checkpoints layers whose inputs are kept in host memory.

    A backward that is made before the next forward has its copies in advance. Any other one has
    some of them when they are needed, with the same results.

    most_bytes: most bytes of inputs that were in host memory at a time.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        # Graphs own what they saved: a graph that is dropped without a backward frees its copies.
        self._last: weakref.ref[_SavedInput] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last_load: torch.cuda.Event | None = None

    def checkpoint_layers(self, layers: Iterable[nn.Module]) -> None:
        """Checkpoint these layers of a transformers model, whose gradient checkpointing is on."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        for layer in layers:
            assert isinstance(layer, GradientCheckpointingLayer), f"{type(layer)} is not checkpointed by itself"
            layer._gradient_checkpointing_func = self.checkpoint

    def checkpoint(self, layer: Callable[..., Any], states: Tensor, *arguments: Any) -> Any:
        """Return layer(states, *arguments), which the backward computes again.

        states: [..., T, D], the input that is kept in host memory. It must not be changed in place
        before the backward. arguments: what all layers share, which stays where it is.
        """
        if not torch.is_grad_enabled():
            return layer(states, *arguments)
        address, shape = states.data_ptr(), states.shape

        def pack(tensor: Tensor) -> Tensor | _SavedInput:
            is_input = tensor.data_ptr() == address and tensor.shape == shape
            return self._save(tensor) if is_input else tensor

        # What checkpoint saves are the arguments. Within the layer its own hooks replace these.
        with saved_tensors_hooks(pack, self._restore):
            return checkpoint(layer, states, *arguments, use_reentrant=False)

    def _save(self, states: Tensor) -> _SavedInput:
        """Begin to copy an input to host memory, and free the one before it on the device."""
        below = None if self._last is None else self._last()
        if below is None and self._last_load is not None:
            # The host memory of the last pass can be used again then. While the host waits, the GPU
            # has the backward of a layer to do.
            self._last_load.synchronize()
            self._last_load = None
        saved = _SavedInput(states, self._stream(states.device), below)
        if below is not None:
            below.free()
        self._last = weakref.ref(saved)
        self.most_bytes = max(self.most_bytes, saved.total_bytes)
        return saved

    def _restore(self, saved: Tensor | _SavedInput) -> Tensor:
        """Return an input on its device, and begin to copy the one below it back."""
        if isinstance(saved, Tensor):
            return saved
        states = saved.take()
        below = saved.below()
        if below is not None:
            self._last_load = below.load()
        return states

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class _SavedInput:
    """An input in host memory, and on the device while it is copied from or to there.

    Memory of the device is allocated and freed in the order of the compute stream, which waits for
    a copy before the copied memory is used or freed. So the allocator may reuse it at once.

    total_bytes: bytes of this input and of the inputs below it.
    """

    def __init__(self, states: Tensor, stream: torch.cuda.Stream | None, below: _SavedInput | None) -> None:
        """Begin to copy an input to host memory. below: the input of the layer below."""
        self.total_bytes: int = states.nbytes + (0 if below is None else below.total_bytes)
        self._stream, self._device = stream, states.device
        self._below = None if below is None else weakref.ref(below)
        self._on_device: Tensor | None = states
        self._version = states._version
        self._copied: torch.cuda.Event | None = None
        # Pinned blocks are cached, and not reused before the copies that use them have ended.
        self._host = torch.empty_like(states, device="cpu", pin_memory=stream is not None)
        self._copied = self._copy(self._host, states)

    def below(self) -> _SavedInput | None:
        """Return the input of the layer below; None if there is none any more."""
        return None if self._below is None else self._below()

    def load(self) -> torch.cuda.Event | None:
        """Begin to copy the input to the device, unless it is there. Returns: the copy's end."""
        if self._on_device is None:
            states = torch.empty_like(self._host, device=self._device)
            self._copied = self._copy(states, self._host)
            self._version = states._version
            self._on_device = states
        return self._copied

    def take(self) -> Tensor:
        """Return the input on the device, to which this object then has no reference."""
        self.load()
        states = self._on_device
        assert states is not None
        self.free()
        return states

    def free(self) -> None:
        """Let the compute stream wait for the last copy, and drop the input on the device."""
        if self._on_device is None:
            return
        assert self._on_device._version == self._version, "a layer's input was changed in place while it was copied"
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._on_device = None

    def __del__(self) -> None:
        # Of a backward that has failed, a copy to the device may not have ended.
        if self._on_device is not None and self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy on the copy stream, once what the compute stream has to do so far is done."""
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            target.copy_(source, non_blocking=stream is not None)
            return None if stream is None else stream.record_event()
