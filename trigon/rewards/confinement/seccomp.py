"""seccomp: system calls that a process gives up for itself and all that it starts.

A filter is a program for the kernel's classic BPF machine, which sees the number and the arguments
of each call. See man 2 seccomp, linux/seccomp.h, linux/filter.h, and the tables of system calls in
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

from trigon.rewards.confinement import kernel

_SET_MODE_FILTER = 1
_SPEC_ALLOW = 4  # before Linux 5.16, a filter otherwise slows down the processor (mitigations)
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little endian


class _Architecture(NamedTuple):
    audit: int
    seccomp: int
    column: int  # of _NUMBERS


_ARCHITECTURES = {"x86_64": _Architecture(0xC000003E, 317, 0), "aarch64": _Architecture(0xC00000B7, 277, 1)}

_NUMBERS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "setns": (308, 268),
    "unshare": (272, 97),
    "mount": (165, 40),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "socket": (41, 198),
    "clone": (56, 220),
    "clone3": (435, 435),
}
"""Numbers of system calls on x86_64 and aarch64."""

_FORBIDDEN_GROUPS = (
    # memory and files of other processes
    "ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp setns",
    # keys of the user's session; the kernel's inner parts; files by their handles
    "add_key request_key keyctl bpf perf_event_open userfaultfd open_by_handle_at",
    # calls that go past this filter
    "io_uring_setup io_uring_enter io_uring_register",
    # the machine
    "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff",
)
FORBIDDEN = tuple(" ".join(_FORBIDDEN_GROUPS).split())
"""System calls that no reward worker may make."""

_NAMESPACES = ("unshare", "mount")
"""System calls that make namespaces and change them, which a sandbox of the user's own may need."""

_CLONE_NAMESPACES = 0x7E020000
"""CLONE_NEWUSER, CLONE_NEWPID and the other flags with which `clone` makes namespaces."""


def is_available() -> bool:
    """Return whether filters can be made for this system."""
    return kernel.IS_LINUX and kernel.machine() in _ARCHITECTURES


def forbid(calls: Iterable[str], *, sockets_but_unix: bool = False, namespaces: bool = False) -> None:
    """Let system calls of this process, and of all that it will start, fail with EPERM.

    calls: their names. sockets_but_unix: also `socket`, but for connections within the machine.
    namespaces: also those that make namespaces. `clone3` then fails with ENOSYS, as on an older
    kernel, since a filter cannot read its flags; C libraries use `clone` instead.
    Raises: OSError if the kernel refuses the filter.
    """
    architecture = _ARCHITECTURES[kernel.machine()]
    refuse = _instruction(_RETURN, 0, 0, _ERRNO | errno.EPERM)
    allow = _instruction(_RETURN, 0, 0, _ALLOW)
    program = [
        _instruction(_LOAD, 0, 0, _ARCHITECTURE),
        _instruction(_EQUAL, 1, 0, architecture.audit),
        refuse,  # calls of 32-bit programs have other numbers
        _instruction(_LOAD, 0, 0, _NUMBER),
        _instruction(_AT_LEAST, 0, 1, 0x40000000),
        refuse,  # the x32 interface of x86-64, too
    ]
    for name in (*calls, *(_NAMESPACES if namespaces else ())):
        program += [_instruction(_EQUAL, 0, 1, _NUMBERS[name][architecture.column]), refuse]
    if namespaces:
        program += [
            _instruction(_EQUAL, 0, 1, _NUMBERS["clone3"][architecture.column]),
            _instruction(_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
            _instruction(_EQUAL, 0, 4, _NUMBERS["clone"][architecture.column]),
            _instruction(_LOAD, 0, 0, _FIRST_ARGUMENT),  # the flags, of which clone uses the lower 32 bits
            _instruction(_ANY_BIT, 0, 1, _CLONE_NAMESPACES),
            refuse,
            allow,
        ]
    if sockets_but_unix:
        program += [
            _instruction(_EQUAL, 0, 3, _NUMBERS["socket"][architecture.column]),
            _instruction(_LOAD, 0, 0, _FIRST_ARGUMENT),
            _instruction(_EQUAL, 1, 0, socket.AF_UNIX),
            refuse,
        ]
    program.append(allow)
    instructions = b"".join(program)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(buffer))  # struct sock_fprog
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.syscall(architecture.seccomp, _SET_MODE_FILTER, _SPEC_ALLOW, filter_program)


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    """Return an instruction; if_true and if_false are how many of the next ones are skipped."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
