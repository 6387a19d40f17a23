"""A device on which the host would have to wait, for tests on machines without a GPU.

Tensors on it compute on the CPU, and report the device "meta": autograd and transformers know that
type, and no code under test treats it as the CPU. Inside HostWaits every operation is run, and one
for which the host would have to wait for a GPU is recorded. A copy from the host does not wait if
it is non-blocking and from pinned memory; that a tensor is pinned is recorded only, not done.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from trigon.models import transfer

DEVICE = torch.device("meta")

aten = torch.ops.aten

# The size of the result depends on the values, or the result is a number of Python.
_READS_VALUES = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.nonzero_numpy,
    aten.masked_select,
    aten.unique_consecutive,
    aten.unique_dim,
    aten._unique,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.isin,  # sorts and calls _unique if there are many elements
}
_INDEXES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class OnDevice(torch.Tensor):
    """A tensor on the device. host: the tensor of the CPU that has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )

    def __init__(self, host: Tensor) -> None:
        self.host = host

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch's own does not work for subclasses

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the device, outside HostWaits")


def move_module(module: nn.Module) -> None:
    """Move the parameters and buffers of a module to the device."""
    moved: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = _parameter(parameter)
                part._parameters[name] = moved[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnDevice(buffer)


def _parameter(parameter: nn.Parameter) -> nn.Parameter:
    with HostWaits():
        return nn.Parameter(OnDevice(parameter.detach()), requires_grad=parameter.requires_grad)


class _TensorFromData(TorchFunctionMode):
    """Makes torch.tensor(data, device=DEVICE) copy the data, as it does for any other device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return torch.tensor(*args, **kwargs).to(device)
        return func(*args, **kwargs)


class HostWaits(TorchDispatchMode):
    """Runs operations on the device, and records those for which the host would have to wait.

    waits: the name of each operation, with the line that called it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._pinned: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._from_data = _TensorFromData()

    def __enter__(self) -> HostWaits:
        self._pinned_for = transfer.PINNED_FOR
        transfer.PINNED_FOR = {*transfer.PINNED_FOR, DEVICE.type}
        # vLLM on the CPU replaces this method by one that does nothing, for all of the process.
        self._pin_memory = Tensor.pin_memory
        Tensor.pin_memory = torch._C.TensorBase.pin_memory
        self._from_data.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._from_data.__exit__(*error)
        Tensor.pin_memory = self._pin_memory
        transfer.PINNED_FOR = self._pinned_for

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        inputs = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in inputs if isinstance(each, OnDevice)]
        if packet is aten.is_pinned:
            return args[0].data_ptr() in self._pinned
        if packet is aten._pin_memory:
            return self._pin(args[0].clone())
        self._check(func, packet, args, kwargs, inputs, on_device)
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        device = kwargs.get("device")
        returns_on_device = bool(on_device) if device is None else torch.device(device) == DEVICE
        if device is not None:
            kwargs["device"] = "cpu"
        hosts = {id(each.host): each for each in on_device}
        host_args, host_kwargs = tree_map(_host, args), tree_map(_host, kwargs)
        if packet is aten.histc and not host_args[0].is_floating_point():  # the CPU counts no integers
            result = func(host_args[0].float(), *host_args[1:], **host_kwargs).to(host_args[0].dtype)
        else:
            result = func(*host_args, **host_kwargs)
        if not returns_on_device:
            return result

        def wrap(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            return hosts[id(each)] if id(each) in hosts else OnDevice(each)

        return tree_map(wrap, result)

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.data_ptr()] = tensor
        return tensor

    def _check(
        self,
        func: Any,
        packet: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Sequence[Tensor],
        on_device: Sequence[OnDevice],
    ) -> None:
        if packet in (aten._to_copy, aten.copy_):
            if packet is aten._to_copy:
                source, non_blocking = args[0], bool(kwargs.get("non_blocking"))
                to_device = (
                    isinstance(source, OnDevice)
                    if kwargs.get("device") is None
                    else torch.device(kwargs["device"]) == DEVICE
                )
                host_side = source
            else:
                target, source = args[:2]
                non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
                to_device = isinstance(target, OnDevice)
                host_side = source if to_device else target
            crosses = to_device != isinstance(source, OnDevice)
            # A copy of a new tensor to the host is never into pinned memory.
            pinned = host_side.data_ptr() in self._pinned if crosses and not isinstance(host_side, OnDevice) else False
            if crosses and not (non_blocking and pinned):
                self._record(func, "copies and waits")
            return
        if not on_device:
            return
        if packet in _READS_VALUES:
            self._record(func, "reads values")
        elif packet in _INDEXES:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self._record(func, "index by a mask")
            elif any(not isinstance(index, OnDevice) for index in indices):
                self._record(func, "index on the host")
        elif packet is aten.repeat_interleave and kwargs.get("output_size") is None:
            self._record(func, "output_size unknown")
        else:
            of_host = [each for each in inputs if not isinstance(each, OnDevice) and each.ndim > 0]
            assert not of_host, f"{func} mixes tensors of the device and of the host"

    def _record(self, func: Any, why: str) -> None:
        lines = [
            f"{Path(frame.filename).name}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if "/trigon/" in frame.filename or "/transformers/" in frame.filename
        ]
        self.waits.append(f"{func} ({why}) at {' < '.join(lines[:-4:-1])}")


def _host(value: Any) -> Any:
    return value.host if isinstance(value, OnDevice) else value
