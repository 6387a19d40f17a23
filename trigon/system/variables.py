"""Environment variables that are set for a time, or for libraries that read them at import."""

from __future__ import annotations

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
