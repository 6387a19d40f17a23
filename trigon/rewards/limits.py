"""Limits that a process sets for itself before it runs user code; what it starts inherits them."""

from __future__ import annotations

import contextlib
import resource


def limit_resources(*, max_file_bytes: int, max_open_files: int) -> None:
    """Limit the size of a written file and the open files and sockets; write no core dumps.

    If memory runs out, the kernel kills this process rather than the trainer.
    """
    limits = {
        resource.RLIMIT_FSIZE: max_file_bytes,
        resource.RLIMIT_NOFILE: max_open_files,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (at_most(hard, limit), at_most(hard, limit)))
    with (
        contextlib.suppress(OSError),  # not on Linux, or not permitted
        open("/proc/self/oom_score_adj", "w") as file,
    ):
        file.write("1000")


def at_most(hard_limit: int, limit: int) -> int:
    """Return a limit, or the hard limit if that is lower."""
    return limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
