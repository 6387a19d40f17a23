"""Shared memory of vLLM's tensor parallelism on the CPU, named per run and never left behind.

vLLM 0.32 names the segments of its CPU communicator after the last part of an address that is empty
under external_launcher, so all runs of a machine use the same names, and a killed run leaves
segments that make the next one fail (errno 17). Here each run has names of its own, and the names
are removed as soon as all ranks have the segments mapped: the memory then lives as long as the
processes, however they end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

FOLDER = Path("/dev/shm")


@contextmanager
def private_segments() -> Iterator[None]:
    """Name the segments that vLLM creates in this context after the run; unlink them on exit.

    Entered by all ranks of torch.distributed's process group together. The address of the process
    group, MASTER_ADDR and MASTER_PORT, belongs to one run at a time, so segments under its name
    that exist before are those of a run that was killed while it started; they are removed. Not
    public in 0.32: _CPUSHMDistributed.make_group_name.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    address = f"{os.environ['MASTER_ADDR']}-{os.environ['MASTER_PORT']}".replace("/", "_").replace(":", "_")
    prefix = f"trigon-{address}-"

    def group_name(communicator: Any) -> str:
        ranks = "-".join(str(rank) for rank in communicator.ranks)
        return f"{prefix}{communicator.unique_name}-{ranks}-cpushm".replace("/", "_")

    for left_behind in FOLDER.glob(f"{prefix}*"):
        left_behind.unlink(missing_ok=True)
    dist.barrier()
    before = mapped_segments()
    original = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(group_name)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original)
    dist.barrier()  # every rank has mapped what the others created
    for segment in mapped_segments() - before:
        if segment.name.startswith((prefix, "psm_")):  # psm_: multiprocessing.shared_memory, vLLM's message queues
            segment.unlink(missing_ok=True)


def mapped_segments() -> set[Path]:
    """Return the files in /dev/shm that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines if f"{FOLDER}/" in line)
    return {Path(path) for path in paths if path.startswith(f"{FOLDER}/") and not path.endswith(" (deleted)")}
