"""What tests ask of processes that others started."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """Tell whether a process is there and not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
