"""How much memory a device has, has left, and needed for a piece of work.

Knows two kinds of device. Refuses to know what the work is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trigon.errors import ConfigError


class Memory(Protocol):
    """The memory of the device that a rank computes on.

    device_name: as a person says it. total_bytes: of the device, or this rank's share.
    most_tokens: of a row, beyond which it is no faster; None: there is no such limit.
    """

    @property
    def device_name(self) -> str: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def most_tokens(self) -> int | None: ...

    def free_bytes(self) -> int:
        """Return what could be taken now."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Do the work, and return the most that it held at a time, besides what was held before."""
        ...


class CudaMemory:
    """A GPU's. Its allocator counts."""

    most_tokens = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device_name = torch.cuda.get_device_name(device)
        self.total_bytes = torch.cuda.mem_get_info(device)[1]

    def free_bytes(self) -> int:
        """See Memory. What the allocator keeps for later goes back to the device first."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Memory."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


class HostMemory:
    """A machine's. Tensors are counted as they come and go.

    The high-water mark of resident memory would count kernels' own buffers as well, but malloc keeps what was freed, so
    that a second pass seems to need less than a first: it tells megabytes, and others each time. The tensors of a pass
    are the same each time, so that the same machine always finds the same budget.
    """

    device_name = "CPU"
    most_tokens = 8192  # a core is busy with far fewer; more cost memory only

    def __init__(self, *, shared_by: int, meminfo: Path = Path("/proc/meminfo")) -> None:
        """shared_by: how many ranks have a part of this machine each. meminfo: where Linux tells how much there is.

        Raises: ConfigError where that cannot be read.
        """
        self._shared_by = shared_by
        self._meminfo = meminfo
        self.total_bytes = self._told("MemTotal") // shared_by

    def free_bytes(self) -> int:
        """See Memory."""
        return self._told("MemAvailable") // self._shared_by

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Memory."""
        tally = _Tally()
        with tally:
            work()
        return tally.peak

    def _told(self, name: str) -> int:
        try:
            fields = dict(line.split(":", 1) for line in self._meminfo.read_text(encoding="ascii").splitlines())
            return int(fields[name].removesuffix("kB")) * 1024
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(
                "trainer.auto_micro_batch needs to know this machine's memory, which "
                f"{self._meminfo} does not tell ({error}); set it to false, and "
                "worker.actor.micro_batch_size_per_device_for_update by hand"
            ) from error


def memory_of(device: torch.device, *, shared_by: int) -> Memory:
    """Return a device's memory. shared_by: how many ranks compute on this machine. Raises: as HostMemory."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory(shared_by=shared_by)


class _Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of the tensors that are made while it is entered, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._held = 0
        self._known: dict[int, int] = {}  # storages that were counted: their addresses, and bytes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage(), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata  # a view has that of what it looks at: counted already, or there from before
        if key in self._known or key in given:
            return
        self._known[key] = storage.nbytes()
        self._held += self._known[key]
        self.peak = max(self.peak, self._held)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._held -= self._known.pop(key)
