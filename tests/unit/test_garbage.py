"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from trigon.system.process_settings import ARENAS_VARIABLE, NUM_ARENAS

pytestmark = pytest.mark.faults

SCRIPT = """
import os, sys
from trigon.system.process_settings import return_freed_memory

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


ARENAS = """
import ctypes, sys, threading
from trigon.system.process_settings import limit_arenas

if sys.argv[1] == "limited":
    limit_arenas()
together = threading.Barrier(6)

def allocate():
    kept = bytes(100_000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the C library has no malloc_info")
@pytest.mark.parametrize("how", ["limited", "as it is"])
def test_threads_share_two_heaps(tmp_path, how):
    if how == "as it is" and (os.cpu_count() or 1) * 8 < 6:
        pytest.skip("this machine has too few CPUs for more heaps")
    environment = {name: value for name, value in os.environ.items() if name != ARENAS_VARIABLE}
    command = [sys.executable, "-c", ARENAS, how, str(tmp_path / "info.xml")]
    subprocess.run(command, check=True, env=environment)
    heaps = (tmp_path / "info.xml").read_text().count("<heap nr=")
    assert heaps <= NUM_ARENAS if how == "limited" else heaps > NUM_ARENAS


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_memory_that_is_freed_between_used_blocks_goes_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50 << 20  # of 120 MB that were freed
