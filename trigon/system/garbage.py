"""Makes Python's garbage collector run less often, and gives freed memory back to the system.

By default the collector runs after every 700 allocations of objects that can be part of a cycle.
Importing torch, transformers and vLLM allocates a million such objects that are never freed, and a
quarter of the import time was spent collecting.
"""

from __future__ import annotations

import gc

_ALLOCATIONS = 20_000

_M_ARENA_MAX = -8  # of mallopt, in malloc.h

NUM_ARENAS = 2
ARENAS_VARIABLE = "MALLOC_ARENA_MAX"
"""The variable with which glibc is told the same before a process starts."""


def set_gc_threshold() -> None:
    """Raise the collector's threshold in this process.

    Objects that are not part of a cycle, such as tensors, are still freed at once.
    """
    gc.set_threshold(_ALLOCATIONS, *gc.get_threshold()[1:])


def limit_arenas() -> None:
    """Let the threads of this process share two heaps (arenas), if its C library is glibc.

    By default glibc makes up to eight for each CPU, and each keeps up to 64 MiB of what was freed
    in it. Saves and validations allocate much at once, in threads that come and go, so that the
    memory of a run would grow for thousands of steps. To be called before there are threads.
    """
    import ctypes  # takes milliseconds, which commands that start no run need not wait for

    library = ctypes.CDLL(None)  # what this process is linked with
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, NUM_ARENAS)


def return_freed_memory() -> None:
    """Give memory that this process has freed back to the system, if its C library is glibc.

    Takes milliseconds, and what is used again has to be fetched again, so it is not done at every
    step but after those that need much, which save or validate.
    """
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
