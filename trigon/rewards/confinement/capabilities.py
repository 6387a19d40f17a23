"""Capabilities: what root may do. Reward workers of root keep those of files and processes.

A process can read the memory and environment of another one of its user only if it has all
capabilities of that one (man 2 ptrace), so fewer of them also protect the other processes of root.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct

from trigon.rewards.confinement import kernel

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


def permitted() -> int:
    """Return the capabilities of this process, as a set of bits. Raises: OSError."""
    sets = ctypes.create_string_buffer(24)  # effective, permitted, inheritable, twice
    kernel.call("capget", struct.pack("=Ii", _VERSION_3, 0), sets)
    _, low, _, _, high, _ = struct.unpack("=6I", sets.raw)
    return int(low | high << 32)


def reduce_capabilities(*, to_none: bool) -> bool:
    """Give up capabilities, and return whether there were any to give up. Raises: OSError.

    to_none: give up all, since this process has them in a user namespace of its own only.
    """
    before = permitted()
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
