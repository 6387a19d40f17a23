"""seccomp: the system calls that a process keeps, for itself and all that it starts.

A filter is a program for the kernel's classic BPF machine, which sees the number and the arguments
of each call. It is a list of what is allowed, so that a call that a later kernel adds is refused.
See man 2 seccomp, linux/seccomp.h and linux/filter.h.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from trigon.rewards.confinement import kernel
from trigon.rewards.confinement.system_calls import ALL, NAMESPACES, PYTHON, WORKER

_SET_MODE_FILTER = 1
_SPEC_ALLOW = 4  # before Linux 5.16, a filter otherwise slows down the processor (mitigations)
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _ABOVE, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little endian
_X32 = 0x40000000  # the numbers of a second interface of x86-64 begin here

_CLONE_NAMESPACES = 0x7E020000
"""CLONE_NEWUSER, CLONE_NEWPID and the other flags with which `clone` makes namespaces."""

_FILE_CONTROLS = (*range(8), 1030, 1032)
"""Commands of `fcntl`: F_DUPFD to F_SETLKW, F_DUPFD_CLOEXEC and F_GETPIPE_SZ. No F_SETOWN,
F_SETSIG, F_SETLEASE and F_NOTIFY, which concern others, and no F_SETPIPE_SZ.
"""

_DEVICE_CONTROLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Requests of `ioctl`: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX."""

_IOPRIO_WHO_PROCESS = 1


class _Architecture(NamedTuple):
    audit: int
    seccomp: int


_ARCHITECTURES = {"x86_64": _Architecture(0xC000003E, 317), "aarch64": _Architecture(0xC00000B7, 277)}


class Argument(NamedTuple):
    """What the lower 32 bits of an argument must be: one of values, or without no_bits.

    The kernel reads no more of the arguments that are compared here.
    """

    position: int
    values: tuple[int, ...] = ()
    no_bits: int = 0


_ITSELF = Argument(0, (0,))  # 0 is the calling process, and each process may be named by its number


@dataclass(frozen=True, slots=True)
class Profile:
    """The system calls that are allowed, by name, and the arguments that some of them must have."""

    allowed: Collection[str]
    with_arguments: Mapping[str, tuple[Argument, ...]] = field(default_factory=dict)


def is_available() -> bool:
    """Return whether filters can be made for this system."""
    return kernel.IS_LINUX and kernel.machine() in _ARCHITECTURES


def all_but(*names: str) -> Profile:
    """Return a profile of all system calls that any process here needs, but some."""
    return Profile(ALL.keys() - set(names))


def of_python_code() -> Profile:
    """Return what code that a model wrote may call.

    No sockets but pairs, no namespaces, no System V shared memory, no files in memory; limits of
    itself only, and no priorities; of `fcntl` and `ioctl` what concerns its own files.
    """
    return Profile(
        PYTHON.keys(),
        {
            "clone": (Argument(0, no_bits=_CLONE_NAMESPACES),),
            "fcntl": (Argument(1, _FILE_CONTROLS),),
            "ioctl": (Argument(1, _DEVICE_CONTROLS),),
            "prlimit64": (_ITSELF,),
            "socketpair": (Argument(0, (socket.AF_UNIX,)),),
        },
    )


def of_worker(*, sockets: bool, unix_sockets: bool, namespaces: bool, is_alone: bool) -> Profile:
    """Return what a reward worker may call.

    sockets: whether it may open sockets of all kinds; unix_sockets: those of this machine.
    namespaces: whether it may make namespaces. is_alone: whether it has a process namespace. If it
    does not, limits and priorities may be those of the calling process only, and there is no System
    V shared memory, which would stay when the worker has ended.
    """
    allowed = {*PYTHON, *WORKER, *(NAMESPACES if namespaces else ())}
    with_arguments: dict[str, tuple[Argument, ...]] = {}
    if not sockets:
        if unix_sockets:
            with_arguments["socket"] = (Argument(0, (socket.AF_UNIX,)),)
        else:
            allowed.discard("socket")
    if not namespaces:
        allowed.discard("clone3")  # a filter cannot read its flags
        with_arguments["clone"] = (Argument(0, no_bits=_CLONE_NAMESPACES),)
    if not is_alone:
        allowed -= {"shmget", "semget", "msgget"}
        with_arguments |= dict.fromkeys(("prlimit64", "migrate_pages", "move_pages"), (_ITSELF,))
        with_arguments |= dict.fromkeys(
            ("sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr"), (_ITSELF,)
        )
        with_arguments["setpriority"] = (Argument(0, (os.PRIO_PROCESS,)), Argument(1, (0,)))
        with_arguments["ioprio_set"] = (Argument(0, (_IOPRIO_WHO_PROCESS,)), Argument(1, (0,)))
    return Profile(allowed, with_arguments)


def keep_only(profile: Profile) -> None:
    """Let other system calls of this process, and of all that it will start, fail with EPERM.

    Those that Linux has added since, and `clone3` unless it is allowed, fail with ENOSYS, as on an
    older kernel; C libraries then use others.
    Raises: OSError if the kernel refuses the filter.
    """
    machine = kernel.machine()
    architecture = _ARCHITECTURES[machine]
    numbers = {name: number for name, call in ALL.items() if (number := getattr(call, machine)) is not None}
    refuse = _instruction(_RETURN, 0, 0, _ERRNO | errno.EPERM)
    absent = _instruction(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    allow = _instruction(_RETURN, 0, 0, _ALLOW)
    program = [
        _instruction(_LOAD, 0, 0, _ARCHITECTURE),
        _instruction(_EQUAL, 1, 0, architecture.audit),
        refuse,  # calls of 32-bit programs have other numbers
        _instruction(_LOAD, 0, 0, _NUMBER),
        _instruction(_AT_LEAST, 0, 1, _X32),
        refuse,
    ]
    always = {numbers[name] for name in profile.allowed if name in numbers and name not in profile.with_arguments}
    for first, last in _ranges(always):
        program += [_instruction(_AT_LEAST, 0, 2, first), _instruction(_ABOVE, 1, 0, last), allow]
    for name, arguments in profile.with_arguments.items():
        tests = list(itertools.chain.from_iterable(_tests(argument, refuse) for argument in arguments))
        program += [_instruction(_EQUAL, 0, len(tests) + 1, numbers[name]), *tests, allow]
    program += [
        _instruction(_EQUAL, 0, 1, numbers["clone3"]),
        absent,
        _instruction(_ABOVE, 0, 1, max(numbers.values())),
        absent,
        refuse,
    ]
    instructions = b"".join(program)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(buffer))  # struct sock_fprog
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.syscall(architecture.seccomp, _SET_MODE_FILTER, _SPEC_ALLOW, filter_program)


def _tests(argument: Argument, refuse: bytes) -> Iterator[bytes]:
    """Return instructions that refuse the call unless the argument is as it must be."""
    yield _instruction(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * argument.position)
    for number, value in enumerate(argument.values):
        yield _instruction(_EQUAL, len(argument.values) - number, 0, value)
    if argument.no_bits:
        yield _instruction(_ANY_BIT, 0, 1, argument.no_bits)
    yield refuse


def _ranges(numbers: Collection[int]) -> Iterator[tuple[int, int]]:
    """Return the first and the last of each run of consecutive numbers."""
    first = last = -1
    for number in sorted(numbers):
        if number != last + 1 or first < 0:
            if first >= 0:
                yield first, last
            first = number
        last = number
    if first >= 0:
        yield first, last


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    """Return an instruction; if_true and if_false are how many of the next ones are skipped."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
