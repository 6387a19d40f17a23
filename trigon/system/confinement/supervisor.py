"""The parent of a process that runs user code: confines it, and ends all that it has started.

    driver
      `- supervisor         does not run the user's code
           |- (code server) only for a worker that has code run; see code_server.py
           |- (init)        only with namespaces; see mechanisms.py
           `- worker        the process with the user's code

The worker is a fork of this process, so that it does not take longer to start. The supervisor's
standard input is a socket from the driver: when it closes, because the driver wants it or has ended
in any way, all is killed. When the worker ends by itself, so does the supervisor, in the same way:
with the same exit code, or by the same signal. If it killed the worker, it sends the reason first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import itertools
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from trigon.system import processes
from trigon.system.confinement import kernel, mechanisms, seccomp
from trigon.system.confinement.code_server import serve
from trigon.system.confinement.options import Confinement, Mechanism
from trigon.system.frames import encode_frame
from trigon.system.stopping import outlive_stop_signals, watch_signals
from trigon.system.temporary import private_folder

WATCH_SECONDS = 0.25
"""Interval at which memory and number of the worker's processes are compared with the limits."""

STRICT_READABLE = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/etc", "/proc", "/sys"),
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)
"""What "strict" leaves readable besides the folders of Python and of the reward function."""

MIN_ADDRESS_SPACE = 16 << 30
"""Address space of each process of a worker, or more if the worker may have more memory.

Less would keep large libraries from being imported, which reserve more than they use.
"""

_PACKAGE = str(Path(__file__).parents[2])  # an editable install need not be on sys.path
_STRICT_WRITABLE = ("/dev/null", "/dev/zero", "/dev/full")
_TASKS_PER_PROCESS = 16  # a task is a process or a thread
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


@dataclass(frozen=True, slots=True)
class Confined:
    """How a worker is confined, as it is reported to the worker.

    used: the mechanisms. obstacle: why it has no namespaces, or "". code_server: the descriptor for
    code_server.run_code; None unless Confinement.runs_code.
    """

    used: Sequence[Mechanism]
    obstacle: str
    code_server: int | None = None


Work = Callable[[int, Confined], object]
"""Called in the worker with the descriptor of its channel to the driver."""


def main(confinement_json: str, channel_fd: int, work: Work) -> NoReturn:
    """Start a worker, which calls work, and return when it and all that it started have ended."""
    confinement = Confinement.from_json(confinement_json)
    driver = socket.socket(fileno=os.dup(0))
    # Stop signals may be sent to all processes of a run; the driver says when the workers end.
    wakeup = watch_signals(*_HANDLED)
    code_server_pid, code_server = _start_code_server(confinement) if confinement.runs_code else (0, None)
    with _temporary_folder() if confinement.level == "strict" else contextlib.nullcontext("") as temporary:
        used, obstacle = _prepare(confinement)
        status_reader, status_writer = os.pipe()
        confined = Confined(used, obstacle, code_server)
        become = partial(_become_worker, confinement, channel_fd, confined, work, temporary, status_writer)
        main_pid = kernel.fork(become)
        os.close(status_writer)
        if code_server is not None:
            os.close(code_server)
        reason, status = _watch(main_pid, code_server_pid, driver, wakeup, confinement, can_list="proc" in used)
        _kill_all(main_pid, used)  # if it has ended, only what it left
        if "namespaces" in used:  # process 1 cannot end by a signal, so it has sent the worker's status
            sent = os.read(status_reader, 4)
            status = struct.unpack("=i", sent)[0] if len(sent) == 4 and not reason else signal.SIGKILL
    if reason:
        with contextlib.suppress(OSError):  # the driver has ended
            driver.sendall(reason.encode())
    _end_as(status)


def _start_code_server(confinement: Confinement) -> tuple[int, int]:
    """Start a code server; return its process id, and the worker's end of the socket to it."""
    server, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    obstacle = "it needs namespaces" if "namespaces" in confinement.without else ""

    def work() -> None:
        if kernel.IS_LINUX:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        _close_descriptors(server.fileno())
        serve(server, max_memory_bytes=confinement.code_memory_bytes, obstacle=obstacle)

    pid = kernel.fork(work)
    server.close()
    return pid, worker_end.detach()


def _prepare(confinement: Confinement) -> tuple[list[Mechanism], str]:
    """Make namespaces, if possible; return what is used until now, and why there are none."""
    used: list[Mechanism] = []
    if kernel.IS_LINUX and processes.can_be_listed() and "proc" not in confinement.without:
        kernel.adopt_orphans()
        used.append("proc")
    if confinement.level == "off":
        return used, ""
    if not kernel.IS_LINUX:
        return used, "this system is not Linux"
    if "namespaces" in confinement.without or "proc" not in used:
        return used, "no namespaces"
    if obstacle := mechanisms.find_namespace_obstacle(private_shared_memory=confinement.level == "strict"):
        return used, f"no namespaces: {obstacle}"
    if mechanisms.needs_user_namespace():
        used.append("user namespace")
    mechanisms.enter_worker_namespaces()
    used.append("namespaces")
    return used, ""


def _watch(
    main_pid: int,
    code_server_pid: int,
    driver: socket.socket,
    wakeup: int,
    confinement: Confinement,
    *,
    can_list: bool,
) -> tuple[str, int]:
    """Wait until the worker has to be killed or has ended. Returns: the reason, and its status.

    The reason is "" if the driver wants it to end, or if it has ended by itself.
    """
    while True:
        readable, _, _ = select.select([driver.fileno(), wakeup], [], [], WATCH_SECONDS)
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)
        ended = processes.reap()
        if main_pid in ended:
            return "", ended[main_pid]
        if driver.fileno() in readable:
            return "", signal.SIGKILL
        if code_server_pid in ended:
            return "was killed, since the server of the tool python had ended", signal.SIGKILL
        if can_list and (reason := _exceeded(confinement, code_server_pid)):
            return reason, signal.SIGKILL


def _exceeded(confinement: Confinement, code_server_pid: int) -> str:
    """Return which limit the worker and the processes that it started exceed, or "".

    A code server has limits of its own.
    """
    others = {code_server_pid, *processes.descendants(code_server_pid)} if code_server_pid else set()
    pids = [pid for pid in processes.descendants(os.getpid()) if pid not in others]
    if len(pids) > confinement.max_processes:
        return f"had {len(pids):,} processes, and at most {confinement.max_processes:,} are allowed; it was killed"
    used = processes.count_resident_bytes(pids)
    if used > confinement.worker_memory_bytes:  # pages that several of them share count several times
        used = processes.count_proportional_bytes(pids)
    if used > confinement.worker_memory_bytes:
        return (
            f"used {used / 2**30:.1f} GiB of memory with the {len(pids):,} processes that it had, and "
            f"worker.reward.max_memory_gb allows {confinement.worker_memory_bytes / 2**30:g}; it was killed"
        )
    return ""


def _kill_all(main_pid: int, used: Sequence[Mechanism]) -> None:
    if "proc" in used:
        processes.kill_descendants()  # with namespaces, the kernel kills all others when process 1 is killed
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(main_pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # it has been waited for
        os.waitpid(main_pid, 0)


def _end_as(status: int) -> NoReturn:
    """End like a process with this status of os.waitpid."""
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the default of this signal is not to end the process


def _become_worker(
    confinement: Confinement, channel_fd: int, confined: Confined, work: Work, temporary: str, status_writer: int
) -> None:
    supervisor = os.getppid()  # 0 in a process namespace
    kept = [channel_fd] if confined.code_server is None else [channel_fd, confined.code_server]
    used = confined.used
    if "namespaces" in used:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        pid_outside = int(os.readlink("/proc/self"))  # in the parent's namespace, which /proc still shows
        mechanisms.mount_proc(pid_outside, private_shared_memory=confinement.level == "strict")
        worker = os.fork()
        if worker != 0:
            _be_init(worker, kept, status_writer)
        supervisor = 1
    os.setsid()
    _close_descriptors(*kept)
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):  # CUDA reserves addresses for all memory of host and GPUs
        kernel.set_limits({resource.RLIMIT_AS: max(MIN_ADDRESS_SPACE, confinement.max_memory_bytes)})
    for number in _HANDLED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    used = [*used, *_confine(confinement, used, temporary)]
    if kernel.IS_LINUX:
        kernel.end_with(supervisor)
    work(channel_fd, Confined(used, confined.obstacle, confined.code_server))


def _be_init(worker: int, not_its_own: Sequence[int], status_writer: int) -> NoReturn:
    """Be process 1 of a namespace: wait for orphans, and end with the worker."""
    for descriptor in not_its_own:
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == worker:
            os.write(status_writer, struct.pack("=i", status))
            os._exit(0)


def _close_descriptors(*kept: int) -> None:
    """Leave some descriptors and the standard streams, with no standard input."""
    signal.set_wakeup_fd(-1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    ends = [2, *sorted(kept), max(kept) + 256]  # this process has opened few files since it started
    for before, after in itertools.pairwise(ends):
        os.closerange(before + 1, after)


def _confine(confinement: Confinement, used: Sequence[Mechanism], temporary: str) -> list[Mechanism]:
    """Give up rights for the rest of this process's life. Returns: the mechanisms used."""
    if confinement.level == "off" or not kernel.IS_LINUX:
        return []
    added: list[Mechanism] = []
    to_none = "user namespace" in used
    may_reduce = to_none or "fewer capabilities" not in confinement.without
    if may_reduce and mechanisms.reduce_capabilities(to_none=to_none) and not to_none:
        added.append("fewer capabilities")
    if to_none and kernel.release() >= (5, 14):  # the processes of this namespace; before, all of the user's
        kernel.set_limits({resource.RLIMIT_NPROC: _TASKS_PER_PROCESS * confinement.max_processes})
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)  # from here on, no program has more rights than this process
    found = mechanisms.find_landlock_version() if "landlock" not in confinement.without else 0
    if version := choose_landlock_version(confinement, (*used, *added), found=found):
        if confinement.level == "strict":
            shared_memory = ["/dev/shm"] if "namespaces" in used else []
            writable = [*_STRICT_WRITABLE, temporary, *shared_memory, *confinement.writable]
            mechanisms.enter_domain_of_files(version, readable=_strict_readable(confinement), writable=writable)
        else:
            mechanisms.enter_domain(version)
        added.append("landlock")
        if version >= mechanisms.SIGNAL_VERSION:
            added.append("signal scope")
    if seccomp.is_available() and "seccomp" not in confinement.without:
        is_strict = confinement.level == "strict"
        profile = seccomp.of_worker(
            sockets=confinement.allows_network,
            unix_sockets=not is_strict,
            namespaces=not is_strict,
            is_alone="namespaces" in used,
        )
        try:
            seccomp.keep_only(profile)
        except OSError:  # a kernel without CONFIG_SECCOMP_FILTER, which options.lacking reports
            pass
        else:
            added.append("seccomp")
    return added


def choose_landlock_version(confinement: Confinement, used: Sequence[Mechanism], *, found: int) -> int:
    """Return the version of Landlock to use; 0: none.

    Version 1 keeps functions from moving files to other folders, for example from a temporary one
    to a cache. So at "default" it is used only if nothing else protects other processes' memory.
    used: the other mechanisms. found: the version that the system has; 0: none.
    """
    is_protected = "namespaces" in used or "fewer capabilities" in used
    if found < mechanisms.REFER_VERSION and is_protected and confinement.level == "default":
        return 0
    return min(found, mechanisms.SIGNAL_VERSION - 1) if "signal scope" in confinement.without else found


def _strict_readable(confinement: Confinement) -> list[str]:
    of_python = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(sys.executable)]
    return [*STRICT_READABLE, _PACKAGE, *of_python, *(path for path in sys.path if path), *confinement.readable]


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Make a private folder, which the standard library's tempfile and most programs then use.

    It is in one that the next start removes, should this process be killed; the worker cannot reach
    the lock in that.
    """
    with private_folder() as outer:
        folder = outer / "reward"
        folder.mkdir(mode=0o700)
        tempfile.tempdir = None  # the worker, a fork, asks again
        os.environ["TMPDIR"] = str(folder)
        yield str(folder)


MAX_FILE_BYTES = 1 << 30
"""Maximum size of a file that user code may write."""


def begin_child(channel_fd: int, confined: Confined, *, max_open_files: int) -> socket.socket:
    """Limit this process, before it runs user code, and say how it is confined.

    max_open_files: and sockets. Returns: the channel to the driver, a blocking socket.
    """
    outlive_stop_signals()  # the driver, which saves first, ends this process
    kernel.set_limits(
        {
            resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
            resource.RLIMIT_NOFILE: max_open_files,
            resource.RLIMIT_CORE: 0,
        }
    )
    with contextlib.suppress(OSError):  # not on Linux, or not permitted
        kernel.end_first_without_memory()
    os.set_inheritable(channel_fd, False)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable(file=2)
    channel = socket.socket(fileno=channel_fd)
    channel.setblocking(True)
    channel.sendall(encode_frame({"used": list(confined.used), "obstacle": confined.obstacle}))
    return channel
