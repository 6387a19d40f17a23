"""Settings of this process: environment variables, the garbage collector, the heaps of threads.

By default the collector runs after every 700 allocations of objects that can be part of a cycle.
Importing torch, transformers and vLLM allocates a million such objects that are never freed, and a
quarter of the import time was spent collecting.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore their former values on exit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def let_segments_grow() -> None:
    """Let torch's segments of GPU memory grow, unless the user has set its allocator.

    Rows differ in length from pass to pass, and leave gaps in segments of fixed sizes. torch reads
    the variable as it first allocates on a GPU, and processes inherit it. vLLM 0.32 switches the
    setting off for its own pools.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def keep_compiled_code() -> None:
    """Set the folder of code that torch compiles, unless TORCHINDUCTOR_CACHE_DIR is set.

    torch's own choice is in the temporary folder, under a name that every user of the machine knows
    and may take first, and torch runs the code that it finds there. Here it is in the user's cache.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "trigon" / "torchinductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home folder, or a full or read-only one
        return
    if os.access(folder, os.W_OK):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


_ALLOCATIONS = 20_000

_M_ARENA_MAX = -8  # of mallopt, in malloc.h

NUM_ARENAS = 2
ARENAS_VARIABLE = "MALLOC_ARENA_MAX"
"""The variable that sets the same in glibc before a process starts."""


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
