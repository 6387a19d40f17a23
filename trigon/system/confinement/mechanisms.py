"""What the Linux kernel offers to confine a process, besides seccomp: three mechanisms.

Capabilities are what root may do. A process can read the memory and environment of another one of
its user only if it has all capabilities of that one (man 2 ptrace), so giving up some of them
protects the other processes of root.

Namespaces hide all processes but the confined one's. An ordinary user needs a user namespace
to make the others. Containers and some distributions forbid those, so everything is tried in a
process of its own first. See man 7 namespaces, user_namespaces and pid_namespaces.

    supervisor                         sees all processes
    ------------------------------------------------------ process namespace
    init (process 1)                   when it ends, the kernel kills all others
      `- worker, and what it starts    /proc shows these only

Landlock has rules that a process makes for itself and all that it starts, without being root. A
process in a Landlock domain can neither trace nor read the memory and environment of a process
outside of it, and with version 6 of the interface not send it signals. See
https://docs.kernel.org/userspace-api/landlock.html, man 7 landlock and linux/landlock.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from trigon.system.confinement import kernel

# ------------------------------------------------------------------------------ capabilities

_KEPT = {
    0,  # CAP_CHOWN
    1,  # CAP_DAC_OVERRIDE
    2,  # CAP_DAC_READ_SEARCH
    3,  # CAP_FOWNER
    4,  # CAP_FSETID
    5,  # CAP_KILL: to end processes that it has started as another user
    6,  # CAP_SETGID: to start them
    7,  # CAP_SETUID
    10,  # CAP_NET_BIND_SERVICE
    18,  # CAP_SYS_CHROOT: to start them with another root folder
}
_VERSION_3 = 0x20080522


def permitted_capabilities() -> int:
    """Return the capabilities of this process, as a set of bits. Raises: OSError."""
    sets = ctypes.create_string_buffer(24)  # effective, permitted, inheritable, twice
    kernel.call("capget", struct.pack("=Ii", _VERSION_3, 0), sets)
    _, low, _, _, high, _ = struct.unpack("=6I", sets.raw)
    return int(low | high << 32)


def reduce_capabilities(*, to_none: bool) -> bool:
    """Give up capabilities, and return whether there were any to give up. Raises: OSError.

    to_none: give up all, since this process has them in a user namespace of its own only.
    """
    before = permitted_capabilities()
    kept = 0 if to_none else before & sum(1 << each for each in _KEPT)
    for each in range(64):
        if not kept >> each & 1:
            # Above the last capability, or without CAP_SETPCAP. Then no_new_privs, which is set
            # later, keeps programs from getting any.
            with contextlib.suppress(OSError):
                kernel.prctl(kernel.PR_CAPBSET_DROP, each)
    kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    sets = struct.pack("=6I", low, low, 0, high, high, 0)  # effective, permitted, inheritable
    kernel.call("capset", struct.pack("=Ii", _VERSION_3, 0), sets)
    return before != kept


# -------------------------------------------------------------------------------- namespaces

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 8, 0x1000, 0x4000, 0x80000


def needs_user_namespace() -> bool:
    """Return whether a worker needs a user namespace.

    Root does without: in a namespace with one user, it could not read files of other users.
    """
    return os.geteuid() != 0


def enter_worker_namespaces() -> None:
    """Make the namespaces of a worker. The next child of this process is their process 1.

    Raises: OSError.
    """
    flags = CLONE_NEWPID | CLONE_NEWIPC
    if needs_user_namespace():
        user, group = os.geteuid(), os.getegid()
        enter_user_namespace(flags, users=(user, user), groups=(group, group))
    else:
        kernel.call("unshare", flags)


def enter_user_namespace(flags: int, *, users: tuple[int, int], groups: tuple[int, int]) -> None:
    """Make a user namespace of one user and one group, and other namespaces (flags) in it.

    users, groups: the number within, and the number outside that it stands for. Raises: OSError.
    """
    # Only a process outside of the namespace may map another user than its own.
    reader, writer = os.pipe()
    entering = os.getpid()
    maps = {"setgroups": "deny", "uid_map": f"{users[0]} {users[1]} 1", "gid_map": f"{groups[0]} {groups[1]} 1"}

    def write_maps() -> None:
        os.close(writer)
        if os.read(reader, 1):
            try:
                for name, text in maps.items():
                    Path(f"/proc/{entering}/{name}").write_text(text)
            except OSError as error:
                os._exit(error.errno or 1)

    helper = kernel.fork(write_maps)
    os.close(reader)
    try:
        kernel.call("unshare", flags | CLONE_NEWUSER)
        os.write(writer, b"x")
    finally:
        os.close(writer)
        _, status = os.waitpid(helper, 0)
    if number := os.waitstatus_to_exitcode(status):
        raise OSError(number, f"users cannot be mapped to a namespace: {os.strerror(number)}")


def enter_mount_namespace() -> None:
    """Make a namespace, outside of which no later mount is seen. Raises: OSError."""
    kernel.call("unshare", CLONE_NEWNS)
    kernel.call("mount", None, b"/", None, MS_REC | MS_SLAVE, None)


def mount_memory(path: str, options: str) -> None:
    """Mount an empty folder that is in memory. Raises: OSError."""
    kernel.call("mount", b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())


def mount_proc(first_pid: int, *, private_shared_memory: bool) -> None:
    """Mount a /proc of this namespace, which only its processes see. Raises: OSError.

    To be called by process 1. first_pid: the next process gets an id above it, where that can be
    chosen: temporary files are often named by process ids, so the ids of two workers must differ.
    private_shared_memory: mount an empty /dev/shm as well.
    """
    enter_mount_namespace()
    kernel.call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    if private_shared_memory:
        mount_memory("/dev/shm", "size=1g,mode=1777")
    with contextlib.suppress(OSError):  # a kernel without CONFIG_CHECKPOINT_RESTORE
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(first_pid))


def find_namespace_obstacle(*, private_shared_memory: bool) -> str:
    """Return why a worker can have no namespaces; "" if it can. Tries it in a fork."""

    def attempt() -> bytes:
        try:
            enter_worker_namespaces()
            return kernel.result_of_fork(mount)
        except OSError as error:
            return (error.strerror or str(error)).encode()

    def mount() -> bytes:
        try:
            mount_proc(0, private_shared_memory=private_shared_memory)
        except OSError as error:
            return (error.strerror or str(error)).encode()
        return b"yes"

    answer = kernel.result_of_fork(attempt).decode(errors="replace")
    return "" if answer == "yes" else answer or "the process that tried it died"


# ---------------------------------------------------------------------------------- Landlock

SIGNAL_VERSION = 6
"""The version of Landlock's interface since which domains cover signals."""

REFER_VERSION = 2
"""The version since which a domain can allow to move and link files to other folders.

A domain that restricts any right of files forbids it unless a rule allows it.
"""

# The same on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_SCOPE_ABSTRACT_UNIX_SOCKET, _SCOPE_SIGNAL = 1, 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_REFER = 1 << 13  # to move and link into other folders
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Rights of files by version; 16 from version 5 on."""


def find_landlock_version() -> int:
    """Return the version of Landlock's interface; 0 without Landlock."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def enter_domain(version: int) -> None:
    """Put this process and all that it will start into a domain of its own. Raises: OSError.

    version: the version of the interface, as found, or an older one. Files stay as they are, but
    before version 6 a domain must restrict a right of files. The one chosen is to make device
    files; the kernel then also forbids to mount. With version 1, a file can no longer be moved or
    linked to another folder: os.rename, os.replace and os.link fail with EXDEV.
    """
    if version >= SIGNAL_VERSION:
        _restrict(_make_ruleset(version, 0))
        return
    refer = _REFER if version >= REFER_VERSION else 0
    ruleset = _make_ruleset(version, _MAKE_CHAR | _MAKE_BLOCK | refer)
    if refer:
        _allow_beneath(ruleset, "/", of_folders=refer, of_files=0)
    _restrict(ruleset)


def enter_domain_of_files(version: int, *, readable: Iterable[str], writable: Iterable[str]) -> None:
    """As enter_domain, and leave only these files and folders readable and writable.

    Paths that do not exist, or that this user may not open, are passed over. Raises: OSError.
    """
    everything = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    ruleset = _make_ruleset(version, everything)
    for paths, rights in ((readable, _READ), (writable, everything & ~(_MAKE_CHAR | _MAKE_BLOCK))):
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                allowed = rights & everything
                _allow_beneath(ruleset, path, of_folders=allowed, of_files=allowed & _OF_FILES)
    _restrict(ruleset)


def _allow_beneath(ruleset: int, path: str, *, of_folders: int, of_files: int) -> None:
    """Add a rule that allows rights for a file, or for a folder and all that is in it."""
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = of_folders if stat.S_ISDIR(os.fstat(opened).st_mode) else of_files
        # struct landlock_path_beneath_attr is packed.
        kernel.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, opened), 0)
    finally:
        os.close(opened)


def _make_ruleset(version: int, rights_of_files: int) -> int:
    scopes = _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL if version >= SIGNAL_VERSION else 0
    attributes = struct.pack("=QQQ", rights_of_files, 0, scopes)
    if not scopes:
        attributes = attributes[:8]  # older kernels know fewer fields
    return kernel.syscall(_CREATE_RULESET, attributes, len(attributes), 0)


def _restrict(ruleset: int) -> None:
    kernel.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
