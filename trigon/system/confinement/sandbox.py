"""A sandbox: namespaces of its own, in which a process sees a few files and nothing else.

    keeper    ordinary rights outside; all capabilities in the user namespace that it makes
    ---------------------------------------- user, process, IPC, network and host name namespaces
    init      process 1: makes the files below, gives up all rights, and ends with the program
      `- program

The files are those of a mount namespace of init: folders of the system and of Python that cannot be
written to, single files of /etc, five devices, and /tmp, which has a size limit and is all that can
be written to. There is no /proc. Whoever the process is outside (an ordinary user, or 65534 where
that is root), it is user 1000 within.
"""

from __future__ import annotations

import os
import resource
import stat
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from trigon.system.confinement import kernel, mechanisms, seccomp
from trigon.system.confinement.mechanisms import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWPID,
    CLONE_NEWUTS,
    MS_BIND,
    MS_REC,
)

FOLDER = "/tmp/code"
"""The working folder of the program."""

MIN_RELEASE = (5, 14)
"""Version of Linux since which a limit of processes counts those of a namespace only."""

_NAMESPACES = CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWCGROUP

_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 1, 2, 4, 8  # MOUNT_ATTR_*
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442

_USER_WITHIN = 1000
_WITHOUT_RIGHTS = 65534
_OLD_ROOT = "/old"
_MAX_FILES = 16384
_NICENESS = 10

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_FILES_OF_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "fonts", "localtime", "mime.types")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_WRITTEN_FILES = {
    "/etc/passwd": f"sandbox:x:{_USER_WITHIN}:{_USER_WITHIN}::{FOLDER}:/bin/sh\n",
    "/etc/group": f"sandbox:x:{_USER_WITHIN}:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program in a sandbox.

    command: its path and arguments. standard_input: what it reads. files: of its folder, by name.
    readable: folders that it sees besides the system's. max_memory_bytes: of address space of each
    of its processes; max_folder_bytes: that it may write to /tmp.
    """

    command: Sequence[str]
    variables: Mapping[str, str]
    standard_input: bytes
    files: Mapping[str, bytes]
    readable: Sequence[str]
    max_memory_bytes: int
    max_file_bytes: int
    max_folder_bytes: int
    max_cpu_seconds: int
    max_tasks: int
    max_open_files: int = 256


class CannotConfineError(Exception):
    """This system does not allow a sandbox. The text says what it does not allow, and a remedy."""


def find_obstacle() -> str:
    """Return what this system certainly lacks, without trying it; "" if nothing."""
    if not seccomp.is_available():
        return "it needs seccomp (Linux on x86-64 or ARM64)"
    if kernel.release() < MIN_RELEASE:
        return f"it needs Linux {MIN_RELEASE[0]}.{MIN_RELEASE[1]} or later"
    return ""


def enter_namespaces() -> None:
    """Make the namespaces of a sandbox. The next child of this process is their process 1.

    Raises: CannotConfineError.
    """
    is_root = os.geteuid() == 0
    user, group = (_WITHOUT_RIGHTS, _WITHOUT_RIGHTS) if is_root else (os.geteuid(), os.getegid())
    try:
        if is_root:
            os.setgroups([])
        mechanisms.enter_user_namespace(_NAMESPACES, users=(_USER_WITHIN, user), groups=(_USER_WITHIN, group))
    except OSError as error:
        raise CannotConfineError(f"namespaces cannot be made ({error}); {_remedy()}") from error


def prepare(program: Program) -> None:
    """Make the files of the program, and give up all rights but those that it has, in process 1.

    Raises: CannotConfineError.
    """
    try:
        _make_files(program)
        kernel.call("sethostname", b"sandbox", len(b"sandbox"))
    except OSError as error:
        raise CannotConfineError(f"files cannot be mounted in a namespace ({error}); {_remedy()}") from error
    os.chdir(FOLDER)
    for name, content in program.files.items():
        with open(name, "xb") as file:
            file.write(content)
    mechanisms.reduce_capabilities(to_none=True)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)  # other sandboxes and the run itself come first


def execute(program: Program, output: int) -> NoReturn:
    """Replace this process, a child of process 1, by the program.

    output: the descriptor of its standard output and error.
    """
    os.setsid()
    with open("input", "xb+") as file:
        file.write(program.standard_input)
        file.seek(0)
        os.unlink("input")
        os.dup2(file.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    kernel.set_limits(
        {
            resource.RLIMIT_AS: program.max_memory_bytes,
            resource.RLIMIT_FSIZE: program.max_file_bytes,
            resource.RLIMIT_CPU: program.max_cpu_seconds,
            resource.RLIMIT_NOFILE: program.max_open_files,
            resource.RLIMIT_NPROC: program.max_tasks,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
    )
    seccomp.keep_only(seccomp.of_python_code())
    try:
        os.execve(program.command[0], list(program.command), dict(program.variables))
    except OSError as error:
        os.write(2, f"{program.command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _make_files(program: Program) -> None:
    """Make a mount namespace with the files of the program, and no others. Raises: OSError."""
    kernel.end_first_without_memory()
    base = os.path.realpath(tempfile.gettempdir())
    mechanisms.enter_mount_namespace()
    # Opened before the user changes, who may not enter root's folders to find them.
    opened = {path: os.open(path, os.O_PATH) for path in _visible(program.readable) if os.path.exists(path)}
    os.setresgid(_USER_WITHIN, _USER_WITHIN, _USER_WITHIN)
    os.setresuid(_USER_WITHIN, _USER_WITHIN, _USER_WITHIN)
    mechanisms.mount_memory(base, "size=1m,mode=755")
    os.mkdir(f"{base}{_OLD_ROOT}")
    kernel.syscall(_PIVOT_ROOT[kernel.machine()], base.encode() + b"\0", f"{base}{_OLD_ROOT}".encode() + b"\0")
    os.chdir("/")
    os.umask(0o022)
    for folder in ("/tmp", "/etc", "/dev"):
        os.mkdir(folder)
    mechanisms.mount_memory("/tmp", f"size={program.max_folder_bytes},nr_inodes={_MAX_FILES},mode=1777")
    os.mkdir(FOLDER)
    os.mkdir("/tmp/.shm")
    os.symlink("/tmp/.shm", "/dev/shm")
    for path, descriptor in opened.items():
        _show(path, descriptor)
    for path, text in _WRITTEN_FILES.items():
        with open(path, "x") as file:
            file.write(text)
    kernel.call("umount2", _OLD_ROOT.encode(), _MNT_DETACH)
    os.rmdir(_OLD_ROOT)
    _set_attributes("/", _READ_ONLY | _NO_SETUID | _NO_DEVICES, recursive=False)


def _visible(readable: Sequence[str]) -> list[str]:
    """Return what is shown, folders before those that they contain, which are left out."""
    shown: list[str] = []
    for path in sorted({*_SYSTEM_FOLDERS, *map(os.path.normpath, readable)}):
        if not any(path.startswith(f"{folder}/") for folder in shown):
            shown.append(path)
    return [*shown, *(f"/etc/{name}" for name in _FILES_OF_ETC), *(f"/dev/{name}" for name in _DEVICES)]


def _show(path: str, descriptor: int) -> None:
    """Show an open file or folder of the old root, as it is there, but not to be written to."""
    source = f"{_OLD_ROOT}/proc/self/fd/{descriptor}"
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "x").close()
    kernel.call("mount", source.encode(), path.encode(), None, MS_BIND | MS_REC, None)
    is_device = path.startswith("/dev/")
    _set_attributes(path, _READ_ONLY | _NO_SETUID | (_NO_PROGRAMS if is_device else _NO_DEVICES), recursive=True)


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)  # struct mount_attr
    flags = _AT_RECURSIVE if recursive else 0
    kernel.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode() + b"\0", flags, wanted, len(wanted))


def _remedy() -> str:
    """Return what may allow namespaces on this system."""
    settings = (
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    )
    for name, forbids, setting in settings:
        try:
            with open(f"/proc/sys/{name}") as file:
                if file.read().strip() == forbids:
                    return f"`sysctl {setting}` on the host allows it"
        except OSError:
            continue  # this kernel does not have the setting
    return (
        "in a container, allow it with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined` of "
        "Docker, or seccompProfile and appArmorProfile of type Unconfined of Kubernetes"
    )
