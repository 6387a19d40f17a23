"""The memory of the GPU that this process uses: metrics, and a check that it is free."""

from __future__ import annotations

from trigon.errors import ConfigError
from trigon.metrics import Max, Metrics, Min
from trigon.system.terminal import format_bytes


def gpu_memory_metrics() -> Metrics:
    """Return the largest memory of torch's allocator so far; {} in a process that uses no GPU.

    Memory that vLLM has given back for its sleep counts as allocated.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {
        "perf/max_memory_allocated_gb": Max(torch.cuda.max_memory_allocated() / 2**30),
        "perf/max_memory_reserved_gb": Max(torch.cuda.max_memory_reserved() / 2**30),
    }


def gpu_memory_now() -> Metrics:
    """Return the GPU memory of tensors now, and what further ones may take.

    {} in a process that uses no GPU.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {"perf/gpu_memory_allocated_gb": Max(torch.cuda.memory_allocated() / 2**30), **gpu_memory_left()}


def gpu_memory_left() -> Metrics:
    """Return the GPU memory that further tensors may take now; {} in a process that uses no GPU.

    What torch's allocator keeps for later counts as free. So does vLLM's share while vLLM sleeps:
    to be measured while it is awake too. Of several measurements the least counts.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    free, _ = torch.cuda.mem_get_info()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return {"perf/gpu_memory_free_gb": Min((free + kept) / 2**30)}


def require_free_memory(fraction: float) -> None:
    """Raise ConfigError unless vLLM finds this fraction of the GPU's memory free.

    To be called before anything is loaded: vLLM would refuse it after minutes of loading.
    """
    import torch

    free, total = torch.cuda.mem_get_info()
    if free < fraction * total:
        raise ConfigError(
            f"the GPU of this process ({torch.cuda.get_device_name()}) has {format_bytes(free)} of "
            f"{format_bytes(total)} free, and vLLM is to take {fraction:.0%} of all "
            "(worker.rollout.gpu_memory_utilization): another process uses it, which nvidia-smi shows"
        )
