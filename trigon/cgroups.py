"""The control groups of this process, in which a container or a batch scheduler limits it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

MEMBERSHIPS = Path("/proc/self/cgroup")
"""The file with the control groups of this process."""

MOUNT = Path("/sys/fs/cgroup")
"""The folder in which control groups are mounted."""


def cgroup_folders(
    controller: Literal["cpu", "memory"], memberships: Path, mount: Path
) -> Iterator[tuple[Path, Literal[1, 2]]]:
    """Yield the folders of all control groups that may limit this process, and their version.

    They are its groups and those above them, as far as they are visible here; some may not exist.
    """
    try:
        lines = memberships.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux, or /proc is not mounted
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)  # "0::/user.slice" in version 2, "4:cpu,cpuacct:/user" in 1
        version: Literal[1, 2]
        if controllers == "":
            hierarchies, version = [mount], 2
        elif controller in controllers.split(","):
            hierarchies, version = [mount / controllers, mount / controller], 1
        else:
            continue
        # A container may see its own group as the root of the mount: then the path of the group,
        # as the host names it, does not exist there. The root is always among the parents.
        path = Path(group.lstrip("/"))
        for hierarchy in hierarchies:
            for folder in (path, *path.parents):
                yield hierarchy / folder, version


def read_limit(file: Path) -> str:
    """Return the text of a file of a control group, "" if there is none."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:  # the group has no such limit, or is not visible here
        return ""
