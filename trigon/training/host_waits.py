"""Finds the places where the host waits for a GPU during a function call.

A GPU computes without a pause as long as the host issues work ahead of it, and the host cannot do
so while it waits for a result. Used by benchmarks and checks on machines with a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch


def host_waits(work: Callable[[], object]) -> list[str]:
    """Call a function, and return where the host waited for a GPU, as "file.py:12".

    Found by torch.cuda.set_sync_debug_mode: copies that block and reads of values, but not
    torch.cuda.synchronize. The line is one of Python's in the thread that called the operation; for
    operations of a backward pass it is that of the call of backward.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return [f"{each.filename}:{each.lineno}" for each in caught if "synchronizing CUDA operation" in str(each.message)]
