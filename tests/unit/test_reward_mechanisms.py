"""Single mechanisms of the confinement of reward workers, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trigon.system.confinement import kernel, mechanisms, seccomp
from trigon.system.confinement.options import Confinement
from trigon.system.confinement.supervisor import choose_landlock_version

pytestmark = pytest.mark.skipif(not kernel.IS_LINUX, reason="the mechanisms are those of Linux")

LANDLOCK = mechanisms.find_landlock_version()

ACROSS_FOLDERS = """
import os, sys
from trigon.system.confinement import kernel, mechanisms

def attempt(function, *paths):
    try:
        function(*paths)
        return "done"
    except OSError as error:
        return error.strerror

version, folder = int(sys.argv[1]), sys.argv[2]
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
mechanisms.enter_domain(version)
os.chdir(folder)
print(attempt(os.link, "temporary/linked", "cache/linked"))
print(attempt(os.rename, "temporary/renamed", "cache/renamed"))
print(attempt(os.replace, "temporary/replaced", "cache/replaced"))
print(attempt(os.replace, "temporary/folder", "cache/folder"))
print(attempt(os.rename, "temporary/linked", "temporary/other"))
"""


@pytest.mark.parametrize("version", [1, 2, 5, 6])
def test_files_are_moved_and_linked_to_other_folders_where_landlock_can_allow_it(tmp_path, version):
    if version > LANDLOCK:
        pytest.skip(f"this kernel has version {LANDLOCK} of Landlock")
    for name in ("temporary/folder", "cache"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("temporary/linked", "temporary/renamed", "temporary/replaced", "cache/replaced"):
        (tmp_path / name).write_text(name)
    found = run(ACROSS_FOLDERS, str(version), str(tmp_path)).splitlines()
    # Version 1 cannot allow it, therefore test_version_1_is_used_only_where_nothing_else_protects.
    across = "done" if version >= mechanisms.REFER_VERSION else os.strerror(18)  # EXDEV
    assert found == [across] * 4 + ["done"]
    if across == "done":
        assert (tmp_path / "cache/replaced").read_text() == "temporary/replaced"


@pytest.mark.parametrize(
    ("level", "used", "found", "chosen"),
    [
        ("default", ("namespaces",), 1, 0),
        ("default", ("fewer capabilities",), 1, 0),
        ("default", ("proc",), 1, 1),
        ("default", ("namespaces",), 2, 2),
        ("default", ("namespaces",), 7, 7),
        ("default", ("namespaces",), 0, 0),
        ("strict", ("namespaces",), 1, 1),
    ],
)
def test_version_1_is_used_only_where_nothing_else_protects(level, used, found, chosen):
    assert choose_landlock_version(Confinement(level=level), used, found=found) == chosen


def test_an_older_version_can_be_asked_for():
    assert choose_landlock_version(Confinement(without=("signal scope",)), (), found=7) == mechanisms.SIGNAL_VERSION - 1


AS_ANOTHER_USER = """
import os, subprocess
from trigon.system.confinement import mechanisms
assert mechanisms.reduce_capabilities(to_none=False)
try:
    subprocess.run(["sleep", "20"], user=65534, group=65534, extra_groups=[], timeout=0.3)
except subprocess.TimeoutExpired:
    print("ended")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start processes as another user")
def test_root_can_end_the_processes_that_it_has_started_as_another_user():
    needed = 1 << 5 | 1 << 6 | 1 << 7  # to kill, and to set the group and the user
    if mechanisms.permitted_capabilities() & needed != needed:
        pytest.skip("this container does not have the capabilities")
    assert run(AS_ANOTHER_USER) == "ended\n"


MAKE_NAMESPACES = """
import ctypes, errno, multiprocessing, os, signal, struct, subprocess, sys, threading
from trigon.system.confinement import seccomp

libc = ctypes.CDLL(None, use_errno=True)
CLONE, CLONE3 = ((56, 435), (220, 435))[os.uname().machine == "aarch64"]
FLAGS = {"user": 0x10000000, "user and mounts": 0x10020000, "user and processes": 0x30000000, "nothing": 0}

def start(number, *arguments):
    pid = libc.syscall(number, *arguments)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        return errno.errorcode[ctypes.get_errno()]
    os.waitpid(pid, 0)
    return "started"

def clone(flags):
    return start(CLONE, ctypes.c_long(flags | signal.SIGCHLD), 0, 0, 0, 0)

def clone3(flags):
    arguments = struct.pack("=11Q", flags, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    return start(CLONE3, arguments, ctypes.c_long(len(arguments)))

def main():
    print({name: clone(flags) for name, flags in FLAGS.items()})
    print(clone3(FLAGS["user"]))
    seccomp.keep_only(seccomp.of_worker(sockets=True, unix_sockets=True, namespaces=False, is_alone=True))
    print({name: clone(flags) for name, flags in FLAGS.items()})
    print(clone3(FLAGS["user"]))
    threads = [threading.Thread(target=print, args=("a thread",)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    print(subprocess.run(["echo", "a program"], capture_output=True, text=True).stdout, end="")
    print(subprocess.run("echo a shell", shell=True, close_fds=False, capture_output=True, text=True).stdout, end="")
    print(os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1])
    print(multiprocessing.get_context("fork").Pool(1).map(abs, [-1]))

main()
"""


@pytest.mark.faults
@pytest.mark.skipif(not seccomp.is_available(), reason="this system has no seccomp")
def test_no_namespace_can_be_made_by_any_call_and_processes_and_threads_start():
    before, by_clone3, after, by_clone3_after, *lines = run(MAKE_NAMESPACES).splitlines()
    names = ("user", "user and mounts", "user and processes")
    if before != str(dict.fromkeys((*names, "nothing"), "started")) or by_clone3 != "started":
        pytest.skip(f"namespaces are not allowed here: {before}, clone3: {by_clone3}")
    assert after == str({**dict.fromkeys(names, "EPERM"), "nothing": "started"})
    assert by_clone3_after == "ENOSYS"
    assert lines == ["a thread", "a thread", "a program", "a shell", "0", "[1]"]


OTHER_INTERFACES = """
import ctypes, errno, mmap, os
from trigon.system.confinement import seccomp

libc = ctypes.CDLL(None, use_errno=True)
code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE | 4)
code.write(bytes.fromhex("b814000000" "cd80" "c3"))  # mov eax, 20 (getpid); int 0x80; ret
getpid_of_32_bits = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))

def x32():
    return "done" if libc.syscall(0x40000000 | 39) > 0 else errno.errorcode[ctypes.get_errno()]

def of_32_bits():
    pid = os.fork()
    if pid == 0:
        os._exit(getpid_of_32_bits() != os.getpid())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

print(x32(), of_32_bits())
seccomp.keep_only(seccomp.of_worker(sockets=True, unix_sockets=True, namespaces=True, is_alone=True))
print(x32(), of_32_bits())
"""


@pytest.mark.faults
@pytest.mark.skipif(kernel.machine() != "x86_64", reason="other processors have one interface of system calls")
def test_the_other_interfaces_of_system_calls_are_refused():
    before, after = run(OTHER_INTERFACES).splitlines()
    assert before.split()[0] in ("done", "ENOSYS")  # kernels are often made without it
    assert after.split()[0] == "EPERM"
    if before.split()[1] == "0":
        assert after.split()[1] == "1"


def run(script: str, *arguments: str) -> str:
    """Return what a Python program prints."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
