"""Landlock: rules that a process makes for itself and all that it starts, without being root.

A process in a Landlock domain can neither trace nor read the memory and environment of a process
outside of it, and with version 6 of the interface not send it signals. See
https://docs.kernel.org/userspace-api/landlock.html, man 7 landlock and linux/landlock.h.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterable

from trigon.rewards.confinement import kernel

SIGNAL_VERSION = 6
"""The version of the interface since which domains cover signals."""

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


def find_version() -> int:
    """Return the version of the interface; 0 without Landlock."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def enter_domain(version: int) -> None:
    """Put this process and all that it will start into a domain of its own. Raises: OSError.

    version: of the interface, as found, or an older one. Files stay as they are, but before version
    6 a domain must restrict a right of files. The one chosen is to make device files; the kernel
    then also forbids to mount. With version 1, a file can no longer be moved or linked to another
    folder: os.rename, os.replace and os.link fail with EXDEV.
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
