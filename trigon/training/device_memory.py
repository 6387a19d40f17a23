"""The device of an engine: what is placed on it, the memory it has, and the peak of a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trigon.data.packing import longest_row
from trigon.errors import ConfigError, DeviceMemoryError
from trigon.system.machine import count_total_bytes, count_usable_bytes
from trigon.training.parallel import ProcessGroup, SingleProcess
from trigon.types import RolloutGroup, TrainGroup

_MOST_REMEDIES = 3


class Memory(Protocol):
    """The memory of the device that a rank computes on.

    device_name: a name for messages, and to recognize devices of the same kind.
    total_bytes: the memory of the device, or the share of this rank.
    max_tokens: length of a row above which passes are not more efficient; None: no such limit.
    """

    @property
    def device_name(self) -> str: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def max_tokens(self) -> int | None: ...

    def free_bytes(self) -> int:
        """Return the memory that can be allocated now."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Call the function, and return the peak of the memory that it allocated."""
        ...


class CudaMemory:
    """The memory of a GPU, measured by its caching allocator. Satisfies Memory."""

    max_tokens = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device_name = torch.cuda.get_device_name(device)
        self.total_bytes = torch.cuda.mem_get_info(device)[1]

    def free_bytes(self) -> int:
        """See Memory. Cached blocks of the allocators, of pinned memory too, are returned first."""
        free_cached_memory(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Memory."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


class HostMemory:
    """The memory of this machine. Peaks are counted tensor by tensor. Satisfies Memory.

    The peak resident set size would include the buffers of kernels, but malloc keeps freed memory,
    so a second pass seems to need less than a first one, by megabytes that vary from run to run.
    The tensors of a pass are always the same, so the same machine always gets the same budget.
    """

    device_name = "CPU"
    max_tokens = 8192  # far fewer tokens keep a core busy; more only cost memory

    def __init__(self, *, shared_by: int, root: Path = Path("/")) -> None:
        """Read the total memory: of the machine, or of the container if that is less.

        shared_by: number of ranks on this machine, which get equal shares. root: of /proc and /sys.
        Raises: ConfigError if it cannot be read.
        """
        self._shared_by, self._root = shared_by, root
        self.total_bytes = _known(count_total_bytes(root=root)) // shared_by

    def free_bytes(self) -> int:
        """See Memory."""
        return _known(count_usable_bytes(root=self._root)) // self._shared_by

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Memory."""
        counter = _TensorBytes()
        with counter:
            work()
        return counter.peak


def _known(num_bytes: int | None) -> int:
    """Return the number. Raises: ConfigError if it is not known."""
    if num_bytes is None:
        raise ConfigError(
            "trainer.auto_micro_batch needs the size of this machine's memory, which cannot be read from "
            "/proc/meminfo; set it to false, and set worker.actor.micro_batch_size_per_device_for_update instead"
        )
    return num_bytes


def memory_of(device: torch.device, *, shared_by: int) -> Memory:
    """Return the memory of a device. Args, Raises: see HostMemory; a GPU is not shared."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory(shared_by=shared_by)


def host_memory_for(device: torch.device, *, shared_by: int) -> int | None:
    """Return the free host memory of one rank beside its GPU; None: unknown, or without a GPU."""
    usable = count_usable_bytes() if device.type == "cuda" else None
    return None if usable is None else usable // shared_by


def free_cached_memory(device: torch.device) -> None:
    """Return the free blocks of a GPU's caching allocators to the device and to the host.

    vLLM allocates its weights and its cache past torch's allocator. Pinned host memory is cached as
    well, and pages of it cannot be used for anything else. Does nothing on the CPU.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a pinned block is free once the copies that use it have ended
        torch.cuda.empty_cache()
        # torch 2.11 may have it for CUDA only.
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
        empty_host_cache()


class _TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are created inside the context, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._current = 0
        self._storages: dict[int, int] = {}  # bytes of each live storage that was counted, by its address

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage(), inputs)
        return result

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        # A view has the storage of an input, which was counted already or existed before the
        # context.
        if key in self._storages or key in inputs:
            return
        self._storages[key] = storage.nbytes()
        self._current += self._storages[key]
        self.peak = max(self.peak, self._current)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._current -= self._storages.pop(key)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a policy computes, and where its tensors are in between.

    device: the device on which the policy computes.
    compute_dtype: the dtype of the forward pass, by autocast; None for a sharded policy, which
    casts by itself.
    offload_params: move the weights to the CPU while they are not in use.
    offload_optimizer: move the optimizer states to the CPU between updates.
    process_group: the ranks that hold the policy together.
    model: what the run has the model for, in messages: policy, reference or critic.
    remedies: what to change if the device runs out of memory, in the order to try it.
    """

    device: torch.device
    compute_dtype: torch.dtype | None
    offload_params: bool = False
    offload_optimizer: bool = False
    process_group: ProcessGroup = field(default_factory=SingleProcess)
    model: str = "policy"
    remedies: tuple[str, ...] = ()

    @contextmanager
    def explain_out_of_memory(
        self, work: str, groups: Iterable[RolloutGroup | TrainGroup], *, max_tokens: int
    ) -> Iterator[None]:
        """Raise DeviceMemoryError if the device runs out of memory in this context.

        work: what the context computes. groups: the groups that it computes it for, packed into
        rows of at most max_tokens.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            longest = longest_row(list(groups), max_tokens=max_tokens)
            advice = "".join(f"\n  {remedy}" for remedy in self.remedies[:_MOST_REMEDIES])
            raise DeviceMemoryError(
                # What torch adds about its own settings is no remedy here.
                f"{str(error).partition(' If reserved but unallocated')[0]}\n"
                f"This was during the {work} of the {self.model}, whose longest row has {longest:,} tokens"
                f"{f'. Change, in this order:{advice}' if advice else ''}\n"
                "docs/troubleshooting.md has an entry 'CUDA out of memory'"
            ) from error
