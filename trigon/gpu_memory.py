"""Metrics of the memory of the GPU that this process uses."""

from __future__ import annotations

from trigon.metrics import Max, Metrics


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
