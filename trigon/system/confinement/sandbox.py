"""A sandbox for Python code: namespaces of its own, in which it sees a few files and nothing else.

    keeper    ordinary rights outside; all capabilities in the user namespace that it makes
    ---------------------------------------- user, process, IPC, network and host name namespaces
    init      process 1: makes the files below, gives up all rights, and ends with the code
      `- Python, with the code

The files are in a mount namespace of init: folders of the system and of Python that cannot be
written to, single files of /etc, four devices, and /tmp, which has a size limit and is all that can
be written to. There is no /proc, and no /dev/zero, of which memory can be mapped that is not
counted as a process's. Whoever the process is outside (an ordinary user, or 65534 where that is
root), it is user 1000 within.
"""

from __future__ import annotations

import os
import resource
import stat
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
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
"""The working folder of the code."""

MAX_MEMORY_BYTES = 4 << 30
"""Address space of each process."""

MAX_FILE_BYTES = 16 << 20
"""Maximum size of a file that the code may write."""

MAX_FOLDER_BYTES = 64 << 20
"""Maximum size of all files that the code may write, which are in memory."""

MAX_TASKS = 64
"""Processes and threads."""

MIN_RELEASE = (5, 14)
"""Version of Linux since which a limit of processes counts one namespace only."""

_NAMESPACES = CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWCGROUP

_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 1, 2, 4, 8  # MOUNT_ATTR_*

_USER_WITHIN = 1000
_WITHOUT_RIGHTS = 65534
_OLD_ROOT = "/old"
_MAX_FILES = 16384
_MAIN = Path(__file__).with_name("code_main.py")
_LIMITS = {
    resource.RLIMIT_AS: MAX_MEMORY_BYTES,
    resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
    resource.RLIMIT_CPU: 60,  # the time limit of a call is less
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_NPROC: MAX_TASKS,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
}
_NICENESS = 10

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_FILES_OF_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "fonts", "localtime", "mime.types")
_DEVICES = ("null", "full", "random", "urandom")
_VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": FOLDER,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MPLBACKEND": "Agg",
    "MPLCONFIGDIR": FOLDER,
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_WRITTEN_FILES = {
    "/etc/passwd": f"sandbox:x:{_USER_WITHIN}:{_USER_WITHIN}::{FOLDER}:/bin/sh\n",
    "/etc/group": f"sandbox:x:{_USER_WITHIN}:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
}


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


def make_command() -> list[str]:
    """Return the command of Python for the code. To be called before prepare()."""
    _, packages = _folders_of_python()
    return [sys.executable, "-P", "-c", _MAIN.read_text(encoding="utf-8"), "\n".join(packages)]


def prepare(files: Mapping[str, bytes]) -> None:
    """Make the files that the code sees, and give up rights that it does not have, in process 1.

    files: the files of its folder, by name. Raises: CannotConfineError.
    """
    try:
        _make_files(max_folder_bytes=MAX_FOLDER_BYTES + sum(map(len, files.values())))
        kernel.call("sethostname", b"sandbox", len(b"sandbox"))
    except OSError as error:
        raise CannotConfineError(f"files cannot be mounted in a namespace ({error}); {_remedy()}") from error
    os.chdir(FOLDER)
    for name, content in files.items():
        with open(name, "xb") as file:
            file.write(content)
    mechanisms.reduce_capabilities(to_none=True)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)  # other sandboxes and the run itself come first


def execute(command: list[str], code: str, output: int) -> NoReturn:
    """Replace this process, a child of process 1, by Python, which runs the code.

    output: the descriptor of its standard output and error.
    """
    os.setsid()
    with open("input", "xb+") as file:
        file.write(code.encode("utf-8", errors="replace"))
        file.seek(0)
        os.unlink("input")
        os.dup2(file.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    kernel.set_limits(_LIMITS)
    seccomp.keep_only(seccomp.of_python_code())
    try:
        os.execve(command[0], command, _VARIABLES)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _folders_of_python() -> tuple[list[str], list[str]]:
    """Return the folders of Python, and folders of sys.path with packages or the standard library.

    Other folders of sys.path belong to the user's project, which may have the dataset with its
    ground truths.
    """
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(sys.executable)}
    of_python = sorted({*prefixes, *map(os.path.realpath, prefixes)} - {"/"})
    packages = [
        path
        for path in sys.path
        if any(path == prefix or path.startswith(f"{prefix}{os.sep}") for prefix in of_python)
        or os.path.basename(path) in ("site-packages", "dist-packages")
    ]
    return of_python, packages


def _make_files(*, max_folder_bytes: int) -> None:
    """Make a mount namespace with the files that the code sees, and no others. Raises: OSError."""
    kernel.end_first_without_memory()
    base = os.path.realpath(tempfile.gettempdir())
    mechanisms.enter_mount_namespace()
    # Opened before the user changes, who may not enter root's folders to find them.
    opened = {path: os.open(path, os.O_PATH) for path in _visible() if os.path.exists(path)}
    os.setresgid(_USER_WITHIN, _USER_WITHIN, _USER_WITHIN)
    os.setresuid(_USER_WITHIN, _USER_WITHIN, _USER_WITHIN)
    mechanisms.mount_memory(base, "size=1m,mode=755")
    os.mkdir(f"{base}{_OLD_ROOT}")
    kernel.syscall(seccomp.ALL["pivot_root"], base.encode() + b"\0", f"{base}{_OLD_ROOT}".encode() + b"\0")
    os.chdir("/")
    os.umask(0o022)
    for folder in ("/tmp", "/etc", "/dev"):
        os.mkdir(folder)
    mechanisms.mount_memory("/tmp", f"size={max_folder_bytes},nr_inodes={_MAX_FILES},mode=1777")
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


def _visible() -> list[str]:
    """Return what is shown, without folders that are in another one."""
    shown: list[str] = []
    of_python, packages = _folders_of_python()
    for path in sorted({*_SYSTEM_FOLDERS, *map(os.path.normpath, (*of_python, *packages))}):
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
    kernel.syscall(seccomp.ALL["mount_setattr"], _AT_FDCWD, path.encode() + b"\0", flags, wanted, len(wanted))


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
