"""Namespaces: a worker that cannot see any process but its own.

An ordinary user needs a user namespace to make the others. Containers and some distributions forbid
those, so everything is tried in a process of its own first. See man 7 namespaces, user_namespaces
and pid_namespaces.

    supervisor                         sees all processes
    ------------------------------------------------------ process namespace
    init (process 1)                   when it ends, the kernel kills all others
      `- worker, and what it starts    /proc shows these only
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from trigon.rewards.confinement import kernel

_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_SLAVE = 2, 4, 8, 0x4000, 0x80000


def needs_user_namespace() -> bool:
    """Return whether a user namespace is needed.

    Root does without: in a namespace with one user, it could not read files of other users.
    """
    return os.geteuid() != 0


def enter() -> None:
    """Make namespaces. The next child of this process is their process 1. Raises: OSError."""
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWPID | _CLONE_NEWIPC
    if needs_user_namespace():
        kernel.call("unshare", flags | _CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    else:
        kernel.call("unshare", flags)


def mount_proc(first_pid: int, *, private_shared_memory: bool) -> None:
    """Mount a /proc of this namespace, which only its processes see. Raises: OSError.

    To be called by process 1. first_pid: the next process gets an id above it, where that can be
    chosen: temporary files are often named by process ids, so those of two workers must differ.
    private_shared_memory: mount an empty /dev/shm as well.
    """
    kernel.call("unshare", _CLONE_NEWNS)
    kernel.call("mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)  # what is mounted here stays here
    kernel.call("mount", b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    if private_shared_memory:
        kernel.call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=1g,mode=1777")
    with contextlib.suppress(OSError):  # a kernel without CONFIG_CHECKPOINT_RESTORE
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(first_pid))


def find_obstacle(*, private_shared_memory: bool) -> str:
    """Return why namespaces cannot be made; "" if they can. Tries it in a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            enter()
            init = os.fork()
            if init == 0:
                mount_proc(0, private_shared_memory=private_shared_memory)
                os.write(writer, b"yes")
                os._exit(0)
            os.waitpid(init, 0)
        except OSError as error:
            os.write(writer, (error.strerror or str(error)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    answer = os.read(reader, 1000).decode(errors="replace")
    os.close(reader)
    os.waitpid(pid, 0)
    return "" if answer == "yes" else answer or "the process that tried it died"
