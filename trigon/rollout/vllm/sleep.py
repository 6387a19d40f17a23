"""What vLLM loses while it sleeps, other than the weights: saved at the start, and restored.

A sleep of level 2 drops all memory that vLLM allocated while it loaded the model. The next weight
sync loads the parameters again, and vLLM itself restores buffers. Other tensors from that time come
back with whatever the memory then holds. Seen in the sources of vLLM 0.32:

- Qwen3-VL adds `deepstack_input_embeds`, a list of tensors in a module, to the hidden states of
  every batch, and expects zeros where no image is (vLLM RFC 53343; NeMo-RL issue 2631).
- The V2 model runner allocates its m-RoPE positions and input embeddings there, and expects valid
  numbers in the rows that pad a batch to the size of a CUDA graph.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.nn.parameter import is_lazy

Dropped = Callable[[UntypedStorage], bool]
"""Whether a sleep drops this memory."""


class SleepingState:
    """Memory that a sleep drops, other than parameters and buffers, with its current values.

    All of it was allocated while the model was loaded. Between two sleeps it holds nothing that is
    needed after the second, so each waking restores the values of the start.
    """

    def __init__(self, storages: Iterable[UntypedStorage]) -> None:
        self.storages = tuple(storages)
        # None for zeros: the counts of tokens in vLLM's V2 runner alone have 4 bytes for each
        # sequence and word of the vocabulary.
        self.saved = tuple(_on_host(storage) if _bytes(storage).any() else None for storage in self.storages)

    def restore(self) -> None:
        """Write the values back. To be called after waking, before the weights are loaded."""
        for storage, saved in zip(self.storages, self.saved, strict=True):
            if saved is None:
                _bytes(storage).zero_()
            else:
                storage.copy_(saved)


def find_state(model: torch.nn.Module, is_dropped: Dropped) -> SleepingState:
    """Return the memory of all tensors in this process that a sleep drops, with current values.

    They are found wherever they are referred to: in modules, the model runner, caches of functions.
    Objects that are frozen (gc.freeze) are not found.
    Args: model: vLLM's model, whose parameters and buffers are left out.
    """
    loaded = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, UntypedStorage] = {}
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in loaded and address not in found and is_dropped(storage):
            found[address] = storage
    return SleepingState(found[address] for address in sorted(found))


def in_weights_pool() -> Dropped:
    """Return whether memory is in the pool in which vLLM allocates while it loads the model.

    Not public in 0.32: the allocator's table of allocations, with a tag each. It cannot be imported
    on the CPU, where vLLM does not sleep.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    allocations = CuMemAllocator.get_instance().pointer_to_data
    ranges = sorted(
        (address, address + data.handle[1]) for address, data in allocations.items() if data.tag == "weights"
    )
    starts = [start for start, _ in ranges]

    def is_dropped(storage: UntypedStorage) -> bool:
        index = bisect_right(starts, storage.data_ptr()) - 1
        return storage.is_cuda and index >= 0 and storage.data_ptr() < ranges[index][1]

    return is_dropped


def _tensors() -> Iterator[Tensor]:
    """Yield the tensors of this process that have memory of their own: no DTensor, no fake one."""
    for instance in gc.get_objects():
        # By type: isinstance asks objects for __class__, which some proxies answer with an import.
        kind = type(instance)
        if issubclass(kind, Tensor) and kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
            tensor: Tensor = instance
            if not is_lazy(tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                yield tensor


def _on_host(storage: UntypedStorage) -> UntypedStorage:
    copy: UntypedStorage = UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
    return copy.copy_(storage)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
