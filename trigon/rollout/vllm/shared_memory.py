"""Shared memory of vLLM's tensor parallelism on the CPU, named per run and never left behind.

vLLM 0.32 names the segments of its CPU communicator after the last part of an address that is empty
under external_launcher, so all runs of a machine use the same names, and a killed run leaves
segments that make the next one fail (errno 17). Here each run has names of its own, and the names
are removed as soon as all ranks have the segments mapped: the memory then lives as long as the
processes, however they end.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch.distributed as dist

FOLDER = Path("/dev/shm")


@contextmanager
def private_segments() -> Iterator[None]:
    """Name the segments that vLLM creates in this context after the run; unlink them on exit.

    Entered by all ranks of torch.distributed's process group together. The names begin with the
    variable TRIGON_SHARED_MEMORY; segments of a run that was killed while it started are removed at
    the next start, by that name (trigon/system/temporary.py). Not public in 0.32:
    _CPUSHMDistributed.make_group_name; in Python: shared_memory._make_filename, by which the
    segments of vLLM's message queues get their names.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    prefix = f"{os.environ['TRIGON_SHARED_MEMORY']}-"

    def group_name(communicator: Any) -> str:
        ranks = "-".join(str(rank) for rank in communicator.ranks)
        return f"{prefix}{communicator.unique_name}-{ranks}-cpushm".replace("/", "_")

    def file_name() -> str:
        return f"/{prefix}{secrets.token_hex(8)}"

    before = mapped_segments()
    names: Any = shared_memory  # its type stub has public names only
    original_group_name, original_file_name = _CPUSHMDistributed.make_group_name, names._make_filename
    _CPUSHMDistributed.make_group_name = staticmethod(group_name)
    names._make_filename = file_name
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original_group_name)
        names._make_filename = original_file_name
    dist.barrier()  # every rank has mapped what the others created
    for segment in mapped_segments() - before:
        if segment.name.startswith(prefix):
            segment.unlink(missing_ok=True)


def mapped_segments() -> set[Path]:
    """Return the files in /dev/shm that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines if f"{FOLDER}/" in line)
    return {Path(path) for path in paths if path.startswith(f"{FOLDER}/") and not path.endswith(" (deleted)")}
