"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from trigon.garbage import return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

# Blocks too small to be mapped by themselves; every second one stays, and after them the top one.
blocks = [bytes(60_000) for _ in range(4000)]
kept = blocks[::2]
del blocks
before = resident()
return_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_memory_that_is_freed_between_used_blocks_goes_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50 << 20  # of 120 MB that were freed
