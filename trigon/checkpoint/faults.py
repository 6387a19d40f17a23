"""Says in words why a checkpoint could not be written, and removes what was written of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def removed_on_failure(temporary: Path, final: Path) -> Iterator[None]:
    """Remove the temporary folder if the context fails, and explain the fault of a disk."""
    try:
        yield
    except BaseException as error:
        # Described first: afterwards the disk may have room.
        fault = disk_error(error, temporary, final)
        shutil.rmtree(temporary, ignore_errors=True)
        if fault is not None:
            raise fault from error
        raise
