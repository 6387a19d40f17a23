"""seccomp: the system calls that a process keeps, for itself and all that it starts.

A filter is a program for the kernel's classic BPF machine, which sees the number and the arguments
of each call. It is a list of what is allowed, so that a call that a later kernel adds is refused.
See man 2 seccomp, linux/seccomp.h and linux/filter.h.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from trigon.system.confinement import kernel

_SET_MODE_FILTER = 1
_SPEC_ALLOW = 4  # before Linux 5.16, a filter otherwise slows down the processor (mitigations)
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _AND, _EQUAL, _ABOVE, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06
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

_SHARED_ANONYMOUS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
"""Flags of `mmap` for memory that stays, uncounted, when all but one of its pages are unmapped."""


_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The architectures in the order of the columns of the tables below, with AUDIT_ARCH_*."""


class Argument(NamedTuple):
    """What the lower 32 bits of an argument must be.

    One of values; or with no_bits, none of these bits is set; or with not_all_bits, at least one of
    these bits is not set. The kernel reads no more of the arguments that are compared here.
    """

    position: int
    values: tuple[int, ...] = ()
    no_bits: int = 0
    not_all_bits: int = 0


_ITSELF = Argument(0, (0,))  # 0 is the calling process, and each process may be named by its number


@dataclass(frozen=True, slots=True)
class Profile:
    """The system calls that are allowed, by name, and the arguments that some of them must have."""

    allowed: Set[str]
    with_arguments: Mapping[str, tuple[Argument, ...]] = field(default_factory=dict)


def is_available() -> bool:
    """Return whether filters can be made for this system."""
    return kernel.IS_LINUX and kernel.machine() in _ARCHITECTURES


def of_python_code() -> Profile:
    """Return what code that a model wrote may call.

    No sockets but pairs, whose buffers stay small; no namespaces; no memory that is not counted as
    a process's: System V shared memory, files in memory, shared mappings without a file; limits of
    itself only, and no priorities; of `fcntl` and `ioctl` what concerns its own files.
    """
    return Profile(
        PYTHON.keys(),
        {
            "clone": (Argument(0, no_bits=_CLONE_NAMESPACES),),
            "fcntl": (Argument(1, _FILE_CONTROLS),),
            "ioctl": (Argument(1, _DEVICE_CONTROLS),),
            "mmap": (Argument(3, not_all_bits=_SHARED_ANONYMOUS),),
            "prlimit64": (_ITSELF,),
            "socketpair": (Argument(0, (socket.AF_UNIX,)),),
        },
    )


def of_worker(*, sockets: bool, unix_sockets: bool, namespaces: bool, is_alone: bool) -> Profile:
    """Return what a reward worker may call.

    sockets: whether it may open sockets of all kinds; unix_sockets: sockets of this machine.
    namespaces: whether it may make namespaces. is_alone: whether it has a process namespace. If it
    does not, it may set limits and priorities of the calling process only, and there is no System
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

    Calls that Linux has added since, and `clone3` unless it is allowed, fail with ENOSYS, as on an
    older kernel; C libraries then use others.
    Raises: OSError if the kernel refuses the filter.
    """
    refuse = _instruction(_RETURN, 0, 0, _ERRNO | errno.EPERM)
    absent = _instruction(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    allow = _instruction(_RETURN, 0, 0, _ALLOW)
    program = [
        _instruction(_LOAD, 0, 0, _ARCHITECTURE),
        _instruction(_EQUAL, 1, 0, _ARCHITECTURES[kernel.machine()]),
        refuse,  # calls of 32-bit programs have other numbers
        _instruction(_LOAD, 0, 0, _NUMBER),
        _instruction(_AT_LEAST, 0, 1, _X32),
        refuse,
    ]
    always = {ALL[name] for name in profile.allowed - profile.with_arguments.keys()}
    for first, last in _ranges(always):
        program += [_instruction(_AT_LEAST, 0, 2, first), _instruction(_ABOVE, 1, 0, last), allow]
    for name, arguments in profile.with_arguments.items():
        tests = list(itertools.chain.from_iterable(_tests(argument, refuse) for argument in arguments))
        program += [_instruction(_EQUAL, 0, len(tests) + 1, ALL[name]), *tests, allow]
    program += [
        _instruction(_EQUAL, 0, 1, ALL["clone3"]),
        absent,
        _instruction(_ABOVE, 0, 1, max(ALL.values())),
        absent,
        refuse,
    ]
    instructions = b"".join(program)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(buffer))  # struct sock_fprog
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.syscall(ALL["seccomp"], _SET_MODE_FILTER, _SPEC_ALLOW, filter_program)


def _tests(argument: Argument, refuse: bytes) -> Iterator[bytes]:
    """Return instructions that refuse the call unless the argument is as it must be."""
    yield _instruction(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * argument.position)
    for number, value in enumerate(argument.values):
        yield _instruction(_EQUAL, len(argument.values) - number, 0, value)
    if argument.no_bits:
        yield _instruction(_ANY_BIT, 0, 1, argument.no_bits)
    if argument.not_all_bits:
        yield _instruction(_AND, 0, 0, argument.not_all_bits)
        yield _instruction(_EQUAL, 0, 1, argument.not_all_bits)
    yield refuse


def _ranges(numbers: Collection[int]) -> Iterator[tuple[int, int]]:
    """Return the first and the last of each run of consecutive numbers."""
    # Consecutive numbers differ equally from their positions.
    for _, same in itertools.groupby(enumerate(sorted(numbers)), key=lambda numbered: numbered[1] - numbered[0]):
        run = [number for _, number in same]
        yield run[0], run[-1]


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    """Return an instruction; if_true and if_false are how many of the next ones are skipped."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


# The system calls by name: their numbers on x86-64 and ARM64, and which kind of process needs them.
# See arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux. All
# groups together are about what the default profiles of container runtimes allow. What no group has
# is refused: ptrace, process_vm_readv, setns, keyctl, bpf, io_uring_setup, perf_event_open,
# userfaultfd, open_by_handle_at, reboot, clock_settime and others.


def _read(table: str) -> dict[str, int]:
    """Return the system calls of a table that this machine has, by name."""
    calls: dict[str, int] = {}
    for entry in table.split(",") if is_available() else ():
        name, *numbers = entry.split()
        number = numbers[list(_ARCHITECTURES).index(kernel.machine())]
        if number != "-":
            calls[name] = int(number)
    return calls


PYTHON = _read("""
access 21 -, alarm 37 -, arch_prctl 158 -, brk 12 214, capget 125 90, chdir 80 49, chmod 90 -, chown 92 -,
clock_getres 229 114, clock_gettime 228 113, clock_nanosleep 230 115, clone 56 220, close 3 57,
close_range 436 436, copy_file_range 326 285, creat 85 -, dup 32 23, dup2 33 -, dup3 292 24, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22, epoll_pwait2 441 441, epoll_wait 232 -,
eventfd 284 -, eventfd2 290 19, execve 59 221, execveat 322 281, exit 60 93, exit_group 231 94, faccessat 269 48,
faccessat2 439 439, fadvise64 221 223, fallocate 285 47, fchdir 81 50, fchmod 91 52, fchmodat 268 53,
fchmodat2 452 452, fchown 93 55, fchownat 260 54, fcntl 72 25, fdatasync 75 83, fgetxattr 193 10,
flistxattr 196 13, fork 57 -, fstat 5 80, fstatfs 138 44, fsync 74 82, ftruncate 77 46,
futex 202 98, futex_requeue 456 456, futex_wait 455 455, futex_waitv 449 449, futex_wake 454 454,
futimesat 261 -, get_robust_list 274 100, getcpu 309 168, getcwd 79 17, getdents 78 -, getdents64 217 61,
getegid 108 177, geteuid 107 175, getgid 104 176, getgroups 115 158, getitimer 36 102, getpeername 52 205,
getpgid 121 155, getpgrp 111 -, getpid 39 172, getppid 110 173, getpriority 140 141, getrandom 318 278,
getresgid 120 150, getresuid 118 148, getrlimit 97 163, getrusage 98 165, getsid 124 156, getsockname 51 204,
getsockopt 55 209, gettid 186 178, gettimeofday 96 169, getuid 102 174, getxattr 191 8, ioctl 16 29, kill 62 129,
lchown 94 -, lgetxattr 192 9, link 86 -, linkat 265 37, listxattr 194 11, llistxattr 195 12, lseek 8 62,
lstat 6 -, madvise 28 233, map_shadow_stack 453 453, membarrier 324 283, mincore 27 232, mkdir 83 -,
mkdirat 258 34, mmap 9 222, mprotect 10 226, mremap 25 216, mseal 462 462, msync 26 227, munmap 11 215,
nanosleep 35 101, newfstatat 262 79, open 2 -, openat 257 56, openat2 437 437, pause 34 -, pidfd_open 434 434,
pidfd_send_signal 424 424, pipe 22 -, pipe2 293 59, pkey_alloc 330 289, pkey_free 331 290, pkey_mprotect 329 288,
poll 7 -, ppoll 271 73, prctl 157 167, pread64 17 67, preadv 295 69, preadv2 327 286, prlimit64 302 261,
pselect6 270 72, pwrite64 18 68, pwritev 296 70, pwritev2 328 287, read 0 63, readahead 187 213, readlink 89 -,
readlinkat 267 78, readv 19 65, recvfrom 45 207, recvmmsg 299 243, recvmsg 47 212, rename 82 -, renameat 264 38,
renameat2 316 276, restart_syscall 219 128, rmdir 84 -, rseq 334 293, rt_sigaction 13 134, rt_sigpending 127 136,
rt_sigprocmask 14 135, rt_sigqueueinfo 129 138, rt_sigreturn 15 139, rt_sigsuspend 130 133,
rt_sigtimedwait 128 137, rt_tgsigqueueinfo 297 240, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, sched_getaffinity 204 123, sched_getattr 315 275, sched_getparam 143 121,
sched_getscheduler 145 120, sched_rr_get_interval 148 127, sched_yield 24 124, select 23 -, sendfile 40 71,
sendmmsg 307 269, sendmsg 46 211, sendto 44 206, set_robust_list 273 99, set_tid_address 218 96,
setitimer 38 103, setpgid 109 154, setrlimit 160 164, setsid 112 157, shutdown 48 210,
sigaltstack 131 132, signalfd 282 -, signalfd4 289 74, socketpair 53 199, splice 275 76, stat 4 -, statfs 137 43,
statx 332 291, symlink 88 -, symlinkat 266 36, sync_file_range 277 84, sysinfo 99 179, tee 276 77,
tgkill 234 131, time 201 -, timer_create 222 107, timer_delete 226 111, timer_getoverrun 225 109,
timer_gettime 224 108, timer_settime 223 110, timerfd_create 283 85, timerfd_gettime 287 87,
timerfd_settime 286 86, times 100 153, tkill 200 130, truncate 76 45, umask 95 166, uname 63 160, unlink 87 -,
unlinkat 263 35, utime 132 -, utimensat 280 88, utimes 235 -, vfork 58 -, wait4 61 260, waitid 247 95,
write 1 64, writev 20 66
""")
"""What Python and its packages need to compute, to start programs, and to use own files."""

WORKER = _read("""
accept 43 202, accept4 288 242, adjtimex 159 171, bind 49 200, cachestat 451 451, capset 126 91,
clock_adjtime 305 266, clone3 435 435, connect 42 203, fanotify_mark 301 263, fremovexattr 199 16,
fsetxattr 190 7, get_mempolicy 239 236, inotify_add_watch 254 27, inotify_init 253 -, inotify_init1 294 26,
inotify_rm_watch 255 28, io_cancel 210 3, io_destroy 207 1, io_getevents 208 4, io_pgetevents 333 292,
io_setup 206 0, io_submit 209 2, ioprio_get 252 31, ioprio_set 251 30, landlock_add_rule 445 445,
landlock_create_ruleset 444 444, landlock_restrict_self 446 446, listen 50 201, lremovexattr 198 15,
lsetxattr 189 6, mbind 237 235, memfd_create 319 279, memfd_secret 447 447, migrate_pages 256 238, mknod 133 -,
mknodat 259 33, mlock 149 228, mlock2 325 284, mlockall 151 230, modify_ldt 154 -, move_pages 279 239,
mq_getsetattr 245 185, mq_notify 244 184, mq_open 240 180, mq_timedreceive 243 183, mq_timedsend 242 182,
mq_unlink 241 181, msgctl 71 187, msgget 68 186, msgrcv 70 188, msgsnd 69 189, munlock 150 229,
munlockall 152 231, name_to_handle_at 303 264, personality 135 92, process_mrelease 448 448,
remap_file_pages 216 234, removexattr 197 14, sched_setaffinity 203 122, sched_setattr 314 274,
sched_setparam 142 118, sched_setscheduler 144 119, seccomp 317 277, semctl 66 191, semget 64 190, semop 65 193,
semtimedop 220 192, set_mempolicy 238 237, set_mempolicy_home_node 450 450, setfsgid 123 152, setfsuid 122 151,
setgid 106 144, setgroups 116 159, setpriority 141 140, setregid 114 143, setresgid 119 149, setresuid 117 147,
setreuid 113 145, setsockopt 54 208, setuid 105 146, setxattr 188 5, shmat 30 196, shmctl 31 195, shmdt 67 197,
shmget 29 194,
socket 41 198, sync 162 81, syncfs 306 267, vmsplice 278 75,
flock 73 32
""")
"""What a reward function may need besides: the network, shared memory, other users, priorities."""

NAMESPACES = _read("""
chroot 161 51, fsconfig 431 431, fsmount 432 432, fsopen 430 430, fspick 433 433, listmount 458 458,
mount 165 40, mount_setattr 442 442, move_mount 429 429, open_tree 428 428, pivot_root 155 41,
setdomainname 171 162, sethostname 170 161, statmount 457 457, umount2 166 39, unshare 272 97
""")
"""What a sandbox of the user's own needs, such as bubblewrap."""

ALL = PYTHON | WORKER | NAMESPACES
