"""Landlock: rules that a process makes for itself and all that it starts, without being root.

A process in a Landlock domain can neither trace nor read the memory and environment of a process
outside of it, and with version 6 of the interface not send it signals. See
https://docs.kernel.org/userspace-api/landlock.html, man 7 landlock and linux/landlock.h.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable

from trigon.rewards.confinement import kernel

SIGNAL_VERSION = 6
"""The version of the interface since which domains cover signals."""

# The same on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_SCOPE_ABSTRACT_UNIX_SOCKET, _SCOPE_SIGNAL = 1, 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
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
    then also forbids to mount.
    """
    _restrict(_make_ruleset(version, 0 if version >= SIGNAL_VERSION else _MAKE_CHAR | _MAKE_BLOCK))


def enter_domain_of_files(version: int, *, readable: Iterable[str], writable: Iterable[str]) -> None:
    """As enter_domain, and leave only these files and folders readable and writable.

    Paths that do not exist, or that this user may not open, are passed over. Raises: OSError.
    """
    everything = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    ruleset = _make_ruleset(version, everything)
    for paths, rights in ((readable, _READ), (writable, everything & ~(_MAKE_CHAR | _MAKE_BLOCK))):
        for path in paths:
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue
            allowed = rights if stat.S_ISDIR(os.fstat(opened).st_mode) else rights & _OF_FILES
            # struct landlock_path_beneath_attr is packed.
            kernel.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed & everything, opened), 0)
            os.close(opened)
    _restrict(ruleset)


def _make_ruleset(version: int, rights_of_files: int) -> int:
    scopes = _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL if version >= SIGNAL_VERSION else 0
    attributes = struct.pack("=QQQ", rights_of_files, 0, scopes)
    if not scopes:
        attributes = attributes[:8]  # older kernels know fewer fields
    return kernel.syscall(_CREATE_RULESET, attributes, len(attributes), 0)


def _restrict(ruleset: int) -> None:
    kernel.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
