"""Says in words why a checkpoint or an export could not be written."""

from __future__ import annotations

from pathlib import Path

from trigon.errors import DiskError, EngineError
from trigon.system.disk import describe_fault, fault_number


def disk_error(error: BaseException, path: Path, final: Path) -> DiskError | None:
    """Return what to raise if a disk is the cause of an error; None for other errors.

    path: the temporary folder. final: what it would have become. After an EngineError, which may
    quote an error of a disk, there are no workers that could go on.
    """
    if isinstance(error, DiskError | EngineError) or fault_number(error) is None:
        return None
    return DiskError(f"{final} could not be saved: {describe_fault(error, path)}. Earlier checkpoints are intact")
