"""Attacks by reward functions, each without the mechanism that prevents it, and with it."""

import contextlib
import http.server
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support.processes import is_locked, is_running, wait_until
from support.rewards import requests, reward_pool
from trigon.assemble.preflight import open_rewards
from trigon.config.schema import Config
from trigon.errors import RewardError
from trigon.system import processes
from trigon.system.confinement import kernel, mechanisms
from trigon.system.confinement.options import Confinement

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="the mechanisms are those of Linux"),
]

IS_ROOT = os.geteuid() == 0
NO_NAMESPACES = mechanisms.find_namespace_obstacle(private_shared_memory=True)
LANDLOCK = mechanisms.find_landlock_version()

needs_namespaces = pytest.mark.skipif(bool(NO_NAMESPACES), reason=f"namespaces are not allowed here: {NO_NAMESPACES}")
needs_landlock = pytest.mark.skipif(not LANDLOCK, reason="this kernel has no Landlock")

# Each returns whether the attack on `pid`, the driver, or on `child`, its child process, succeeds.
ATTACKS = """
import ctypes, fcntl, os, resource, signal, socket, struct, time

libc = ctypes.CDLL(None, use_errno=True)

def read_environment(pid, child):
    return b"hf_attacked" in open(f"/proc/{pid}/environ", "rb").read()

def read_memory(pid, child):
    start = int(open(f"/proc/{pid}/maps").readline().split("-")[0], 16)
    with open(f"/proc/{pid}/mem", "rb") as memory:
        memory.seek(start)
        return len(memory.read(16)) == 16

def read_memory_by_a_system_call(pid, child):
    here = ctypes.create_string_buffer(16)
    start = int(open(f"/proc/self/maps").readline().split("-")[0], 16)  # where programs are loaded, often
    vector = struct.pack("@PN", ctypes.addressof(here), 16)
    remote = struct.pack("@PN", start, 16)
    number = libc.process_vm_readv(pid, vector, 1, remote, 1, 0)
    return number == 16 or ctypes.get_errno() == 14  # EFAULT: allowed, but another address

def trace(pid, child):
    PTRACE_SEIZE = 0x4206
    return libc.ptrace(PTRACE_SEIZE, child, None, None) == 0

def read_other_processes(pid, child):
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) not in (1, os.getpid()):  # 1 is of this worker with namespaces
            try:
                found.append(open(f"/proc/{name}/environ", "rb").read())
            except OSError:
                pass
    return b'hf_attacked' in b''.join(found)

def read_command_lines(pid, child):
    def line(name):
        try:
            return open(f"/proc/{name}/cmdline", "rb").read()
        except OSError:
            return b""
    return any(b"4711.25" in line(name) for name in os.listdir("/proc") if name.isdecimal())

def stop_a_process(pid, child):
    os.kill(child, signal.SIGSTOP)
    os.kill(child, signal.SIGCONT)
    return True

def stop_a_process_by_its_descriptor(pid, child):
    signal.pidfd_send_signal(os.pidfd_open(child), signal.SIGCONT)
    return True

def stop_a_process_by_a_socket(pid, child):
    receiver, sender = socket.socketpair()
    fcntl.fcntl(receiver, fcntl.F_SETOWN, child)
    fcntl.fcntl(receiver, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(receiver, fcntl.F_SETFL, os.O_ASYNC)
    sender.send(b"x")
    deadline = time.monotonic() + 1
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(child)

def is_alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True  # it cannot be seen

def limit_a_process(pid, child):
    return resource.prlimit(child, resource.RLIMIT_CORE, (0, 0)) is not None

def lower_a_priority(pid, child):
    return os.setpriority(os.PRIO_PROCESS, child, 5) is None

def choose_processors(pid, child):
    return os.sched_setaffinity(child, {min(os.sched_getaffinity(0))}) is None

def make_a_key(pid, child):
    ADD_KEY = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
    return libc.syscall(ADD_KEY, b"user", b"name", b"value", 5, -3) > 0

def main(reward_input, pid):
    attack, child = reward_input["response"].split()
    try:
        return float(globals()[attack](pid, int(child)))
    except OSError:
        return 0.0
"""
PEEK = {"read_environment", "read_memory", "read_other_processes"}
MEMORY_CALLS = {"read_memory_by_a_system_call", "trace"}
SIGNALS = {"stop_a_process", "stop_a_process_by_its_descriptor", "stop_a_process_by_a_socket"}
NAMES = {"read_command_lines"}
CALLS = {"make_a_key"}
LIMITS = {"limit_a_process", "lower_a_priority", "choose_processors"}
# Linux compares the capabilities of both for priorities, not for limits.
LIMITS_WITH_FEWER_CAPABILITIES = {"limit_a_process"} if IS_ROOT else LIMITS
ALL = PEEK | MEMORY_CALLS | SIGNALS | NAMES | CALLS | LIMITS

# What of ATTACKS succeeds without some mechanisms. An ordinary user has no capabilities to give up.
EVERYTHING = ("namespaces", "fewer capabilities", "landlock", "signal scope", "seccomp")
SUCCEEDS = {
    (): set(),
    ("seccomp",): CALLS,
    ("namespaces",): NAMES,
    ("namespaces", "seccomp"): NAMES | CALLS | LIMITS_WITH_FEWER_CAPABILITIES,
    ("namespaces", "signal scope"): NAMES | SIGNALS,
    ("namespaces", "landlock"): NAMES | SIGNALS | (set() if IS_ROOT else PEEK),
    ("namespaces", "landlock", "fewer capabilities"): NAMES | SIGNALS | PEEK,
    ("landlock", "fewer capabilities", "signal scope"): set(),
    EVERYTHING: ALL,
}
SAID = {
    "read the environment and the memory": "read_environment",
    "send signals": "stop_a_process",
    "change the limits and priorities": "limit_a_process",
    "see the command lines": "read_command_lines",
    "make system calls that they do not need": "make_a_key",
}


@pytest.fixture
def pool_of(tmp_path):
    """Return a function that makes a pool from a reward file's text, closed when the test ends."""
    options = ("timeout_seconds", "passed_variables", "confinement")
    with contextlib.ExitStack() as stack:

        def make(text, **given):
            chosen = {name: given.pop(name) for name in options if name in given}
            return stack.enter_context(reward_pool(tmp_path, text, kwargs=given, **chosen))

        yield make


@pytest.mark.extended(but=["", "namespaces, landlock"])
@pytest.mark.parametrize("without", SUCCEEDS, ids=", ".join)
def test_attacks_on_other_processes_succeed_only_without_what_prevents_them(tmp_path, without):
    if "namespaces" not in without and NO_NAMESPACES:
        pytest.skip(f"namespaces are not allowed here: {NO_NAMESPACES}")
    if not {"landlock", "signal scope"} & set(without) and LANDLOCK < mechanisms.SIGNAL_VERSION:
        pytest.skip(f"this kernel has version {LANDLOCK} of Landlock, and {mechanisms.SIGNAL_VERSION} covers signals")
    (tmp_path / "reward.py").write_text(ATTACKS)
    succeeded, logged = attack(tmp_path, Confinement(without=without), sorted(ALL))
    assert succeeded == SUCCEEDS[without]
    assert len([line for line in logged if "not fully confined" in line]) == bool(succeeded)
    for words, example in SAID.items():
        assert any(words in line for line in logged) == (example in succeeded), words


@pytest.mark.skipif(kernel.machine() not in ("x86_64", "aarch64"), reason="needs seccomp")
def test_system_calls_that_a_container_forbids_are_named_and_done_without(tmp_path):
    (tmp_path / "reward.py").write_text(ATTACKS)
    calls = ("unshare", "mount", "landlock_create_ruleset")
    succeeded, [line] = attack(tmp_path, Confinement(), sorted(ALL), forbidden=calls)
    assert succeeded == SUCCEEDS["namespaces", "landlock"]
    assert line.startswith("reward functions are not fully confined here: they can ")
    assert line.endswith("(no namespaces: unshare: Operation not permitted; no Landlock; see docs/rewards.md)")


def attack(folder, confinement, responses, *, forbidden=()):
    """Return the attacks that succeed, and the warnings. The driver is a process of its own."""
    script = f"""
import json, os, subprocess, sys, time
from trigon.system.confinement import seccomp
from trigon.system.confinement.options import Confinement
from trigon.rewards.contract import RewardRequest
from trigon.rewards.load import find_reward
from trigon.rewards.pool import RewardPool

if {forbidden!r}:
    seccomp.keep_only(seccomp.Profile(seccomp.ALL.keys() - set({forbidden!r})))
responses = {responses!r}
children = [subprocess.Popen(["sleep", "4711.25"]) for _ in responses]  # each attack has its own
pool = RewardPool(find_reward({str(folder / "reward.py")!r} + ":main", {{"pid": os.getpid()}}),
                  num_workers=1, timeout_seconds=20, max_failed_fraction=1.0,
                  confinement=Confinement.from_json({confinement.to_json()!r}))
texts = [f"{{response}} {{child.pid}}" for response, child in zip(responses, children)]
scores = pool.score([RewardRequest(text, 1, "4", "?", "stop", {{}}) for text in texts])
pool.close()
assert all(score.outcome == "ok" for score in scores), scores
succeeded = [response for response, score in zip(responses, scores) if score.overall]
for child in children:
    child.kill()
print(json.dumps(succeeded))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"HF_TOKEN": "hf_attacked"}
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout)), sorted(set(done.stderr.splitlines()))


# The lock is held as long as any process lives that inherited the file, in any session.
LEAVE = """
import fcntl, os, signal, subprocess, sys, time

def main(reward_input, lock):
    held = open(lock, "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    os.set_inheritable(held.fileno(), True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            subprocess.Popen(["setsid", "sleep", "1000"], close_fds=False)
            os.closerange(3, held.fileno())
            os.closerange(held.fileno() + 1, 1000)
            time.sleep(1000)
        os._exit(0)
    if reward_input["response"] == "exit":
        os._exit(3)
    if reward_input["response"] == "hang":
        time.sleep(1000)
    return {"overall": 1.0}
"""
SYSTEMS = [
    pytest.param((), id="all", marks=needs_namespaces),
    pytest.param(("namespaces",), id="without namespaces"),
    pytest.param(EVERYTHING, id="a supervisor only"),
]


@pytest.mark.extended(but=["hang-timeout-all"])
@pytest.mark.parametrize("without", SYSTEMS)
@pytest.mark.parametrize(("response", "outcome"), [("exit", "failed"), ("hang", "timeout"), ("return", "ok")])
def test_nothing_that_a_function_started_outlives_its_worker(tmp_path, pool_of, without, response, outcome):
    lock = tmp_path / "lock"
    pool = pool_of(LEAVE, timeout_seconds=1.0, confinement=Confinement(without=without), lock=str(lock))
    [score] = pool.score(requests(response))
    assert score.outcome == outcome
    if response == "return":
        assert is_locked(lock)
        pool.close()
    assert not is_locked(lock)


@pytest.mark.extended(but=["all"])
@pytest.mark.parametrize("without", SYSTEMS)
def test_nothing_outlives_a_driver_that_is_killed(tmp_path, without):
    lock = tmp_path / "lock"
    (tmp_path / "reward.py").write_text(LEAVE)
    script = f"""
import time
from trigon.system.confinement.options import Confinement
from trigon.rewards.contract import RewardRequest
from trigon.rewards.load import find_reward
from trigon.rewards.pool import RewardPool

pool = RewardPool(find_reward({str(tmp_path / "reward.py")!r} + ":main", {{"lock": {str(lock)!r}}}), num_workers=1,
                  timeout_seconds=60, max_failed_fraction=1.0, confinement=Confinement(without={without!r}))
pool.score([RewardRequest("return", 1, "4", "?", "stop", {{}})])
print("scored", flush=True)
time.sleep(1000)
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert driver.stdout.readline() == b"scored\n"
        assert is_locked(lock)
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    wait_until(lambda: not is_locked(lock))


@needs_namespaces
def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path, pool_of):
    lock = tmp_path / "lock"
    pool = pool_of(LEAVE, lock=str(lock))
    assert pool.score(requests("return"))[0].overall == 1.0
    [worker] = pool._children
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not is_locked(lock))
    assert pool.score(requests("return"))[0].overall == 1.0  # by another worker


@pytest.mark.extended
def test_off_leaves_the_end_of_all_processes_only(tmp_path, pool_of):
    lock = tmp_path / "lock"
    pool = pool_of(LEAVE, confinement=Confinement(level="off"), lock=str(lock))
    assert pool.score(requests("return"))[0].overall == 1.0
    assert is_locked(lock)
    pool.close()
    assert not is_locked(lock)
    (tmp_path / "reward.py").write_text(ATTACKS)
    assert attack(tmp_path, Confinement(level="off"), sorted(ALL)) == (ALL, [])


@pytest.mark.extended(but=["all"])
@pytest.mark.parametrize("without", SYSTEMS)
def test_a_function_that_starts_processes_without_end_is_killed_with_all_of_them(tmp_path, pool_of, without):
    lock = tmp_path / "lock"
    text = f"""
import fcntl, os, time
def main(reward_input):
    held = open({str(lock)!r}, "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    started = time.monotonic()
    while time.monotonic() < started + 20:  # at most this long, should it not be killed
        if reward_input["response"] == "few":
            break
        if os.fork() == 0:
            os.setsid()
            time.sleep(20)
            os._exit(0)
        time.sleep(0.005)
    return {{"overall": 1.0}}
"""
    pool = pool_of(text, confinement=Confinement(without=without, max_processes=30))
    few, many = pool.score(requests("few", "many"))
    assert (few.outcome, many.outcome) == ("ok", "failed")
    assert "processes, and at most 30 are allowed; it was killed" in many.error
    assert not is_locked(lock)


@pytest.mark.extended
@pytest.mark.parametrize("without", SYSTEMS)
def test_the_memory_of_all_processes_of_a_function_counts(pool_of, without):
    text = """
import ctypes, os, time
PR_SET_DUMPABLE = 4
def main(reward_input):
    number, mebibytes = map(int, reward_input["response"].split())
    shared = b"x" * (60 << 20)  # of all processes, but in memory once
    for _ in range(number):
        if os.fork() == 0:
            own = b"x" * (mebibytes << 20)
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0 if mebibytes == 60 else 1)  # 0 hides its memory
            time.sleep(20)
            os._exit(0)
    time.sleep(3)
    return {"overall": 1.0}
"""
    pool = pool_of(text, confinement=Confinement(without=without, max_memory_bytes=400 << 20))
    within, beyond = pool.score(requests("10 1", "10 60"))
    assert (within.outcome, beyond.outcome) == ("ok", "failed")
    assert "GiB of memory with the" in beyond.error
    assert beyond.error.endswith("worker.reward.max_memory_gb allows 0.390625; it was killed")


@pytest.mark.extended
def test_the_memory_that_a_run_allows_its_reward_workers_is_an_option(tmp_path):
    (tmp_path / "reward.py").write_text("""
import time
def main(reward_input):
    memory = b"x" * int(float(reward_input["response"]) * 2**30)
    time.sleep(1.5)
    return 1.0
""")
    reward = {"reward_function": f"{tmp_path}/reward.py", "max_memory_gb": 1, "max_failed_fraction": 1}
    with contextlib.closing(open_rewards(Config(worker={"reward": reward}))) as pool:
        within, beyond = pool.score(requests("0.1", "1.2"))
    assert (within.outcome, beyond.outcome) == ("ok", "failed")
    assert beyond.error.endswith("worker.reward.max_memory_gb allows 1; it was killed")


@pytest.mark.extended
@pytest.mark.parametrize(("gibibytes", "address_space"), [(1, 16), (16, 16), (40, 40)])
def test_the_address_space_of_a_worker_grows_with_the_memory_that_it_may_have(pool_of, gibibytes, address_space):
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        pytest.skip(f"the address space of this process is limited to {hard:,} bytes")
    text = """
import resource
def main(reward_input):
    return float(resource.getrlimit(resource.RLIMIT_AS)[1] >> 30)
"""
    pool = pool_of(text, confinement=Confinement(level="off", max_memory_bytes=gibibytes << 30))
    assert pool.score(requests("a"))[0].overall == address_space


@pytest.mark.extended
def test_a_worker_that_is_given_gpus_has_no_limit_of_address_space(pool_of, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    text = """
import os, resource
def main(reward_input):
    is_unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    return {"overall": is_unlimited, "gpu": int(os.environ["CUDA_VISIBLE_DEVICES"] or -1)}
"""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    is_unlimited = float(hard == resource.RLIM_INFINITY)
    given = pool_of(text, passed_variables=["CUDA_VISIBLE_DEVICES"]).score(requests("a"))[0]
    hidden = pool_of(text).score(requests("a"))[0]
    assert (given.overall, given.parts["gpu"]) == (is_unlimited, 0.0)
    assert (hidden.overall, hidden.parts["gpu"]) == (0.0, -1.0)


def test_a_worker_has_no_files_of_the_driver_but_its_channel_and_its_output(pool_of):
    text = """
import os
def main(reward_input):
    opened = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            opened[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # of listdir itself
    assert opened.pop(0) == "/dev/null", opened
    assert opened.pop(1) == opened.pop(2)
    memory, channel = sorted(opened.values())  # the first is where its stacks are written, see trigon.system.hangs
    assert memory.startswith("/memfd:trigon-stacks") and channel.startswith("socket:"), opened
    return {"overall": 1.0}
"""
    with open(os.devnull) as secret:
        os.set_inheritable(secret.fileno(), True)
        assert pool_of(text).score(requests("a"))[0].error == ""


def test_a_worker_has_limits_of_files_and_is_the_first_to_end_without_memory(pool_of):
    text = """
import resource
from pathlib import Path
def main(reward_input):
    limits = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] for name in ("NOFILE", "FSIZE", "CORE")}
    return {"overall": 1.0, **limits, "oom": int(Path("/proc/self/oom_score_adj").read_text())}
"""
    parts = dict(pool_of(text).score(requests("a"))[0].parts)
    assert parts == {"overall": 1.0, "NOFILE": 1024, "FSIZE": 1 << 30, "CORE": 0, "oom": 1000}


@pytest.mark.extended(but=["all"])
@pytest.mark.parametrize("without", SYSTEMS)
def test_sigterm_to_all_processes_of_a_run_does_not_end_a_worker(pool_of, without):
    text = """
import multiprocessing, os, subprocess, time
def main(reward_input):
    main.calls = getattr(main, "calls", 0) + 1
    for _ in range(20):  # what the function starts can be ended by it
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        process.start()
        process.terminate()
        process.join()
    program = subprocess.Popen(["sleep", "1000"])
    program.terminate()
    return {"overall": main.calls, "program": program.wait()}
"""
    pool = pool_of(text, confinement=Confinement(without=without))
    [score] = pool.score(requests("a"))
    assert (score.error, score.parts) == ("", {"overall": 1.0, "program": -signal.SIGTERM})
    [worker] = pool._children
    for pid in (worker.pid, *processes.descendants(worker.pid)):
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)
    assert pool.score(requests("a"))[0].overall == 2.0  # by the same process


# What reward functions do, and must be able to do.
ORDINARY = """
import ctypes, json, multiprocessing, os, signal, subprocess, sys, tempfile, threading, urllib.request

def threads(**_):
    results = []
    several = [threading.Thread(target=results.append, args=(number,)) for number in range(8)]
    for each in several: each.start()
    for each in several: each.join()
    return len(results) == 8

def programs(**_):
    done = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, timeout=60)
    return done.stdout == "42\\n" or done.stderr

def processes(**_):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [-1, -2]) == [1, 2]

def temporary_files(**_):
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("text")
        file.seek(0)
        return file.read() == "text"

def files_beside(folder, **_):
    return open(f"{folder}/truths.json").read() == "[1]"

def imports(**_):
    import html.parser, numpy, yaml
    return numpy.arange(3).sum() == 3

def network(port, **_):
    return urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=20).read() == b"judged"

def write_beside(folder, **_):
    with open(f"{folder}/log.txt", "a") as file:
        file.write("scored\\n")
    return True

def read_elsewhere(secret, **_):
    return open(secret).read() == "secret"

def write_elsewhere(secret, **_):
    open(secret, "a").close()
    return True

def unix_sockets(secret, **_):
    import socket
    return socket.socket(socket.AF_UNIX).connect_ex(secret) != 0

def a_sandbox(**_):
    return subprocess.run(["unshare", "--user", "--pid", "--fork", "--mount-proc", "true"]).returncode == 0

def a_user_namespace(**_):
    CLONE, NEW_USER = {"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000000
    pid = ctypes.CDLL(None).syscall(CLONE, ctypes.c_long(NEW_USER | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return pid > 0 and os.waitpid(pid, 0)[1] == 0

def main(reward_input, **kwargs):
    try:
        passed = globals()[reward_input["response"]](**kwargs)
    except OSError:
        return 0.0
    assert passed in (True, False), passed
    return float(passed)
"""
USUAL = ["threads", "programs", "temporary_files", "files_beside", "imports"]
FILES = ["write_beside", "read_elsewhere", "write_elsewhere"]
SANDBOXES = ["a_user_namespace", "a_sandbox"]


@pytest.fixture
def outside(tmp_path, tmp_path_factory):
    """Return what ORDINARY uses: a folder, a file elsewhere, and a port where a service answers."""

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"judged")

        def log_message(self, *arguments):
            pass

    secret = tmp_path_factory.mktemp("home") / ".netrc"
    secret.write_text("secret")
    (tmp_path / "truths.json").write_text("[1]")
    with http.server.HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"folder": str(tmp_path), "secret": str(secret), "port": server.server_port}
        server.shutdown()


def works(pool_of, outside, confinement, responses):
    scores = pool_of(ORDINARY, timeout_seconds=60, confinement=confinement, **outside).score(requests(*responses))
    assert [score.error for score in scores] == [""] * len(responses)
    return {response for response, score in zip(responses, scores, strict=True) if score.overall}


@pytest.mark.extended(but=["all"])
@pytest.mark.parametrize("without", [*SYSTEMS, pytest.param(("namespaces", "signal scope"), id="an older Landlock")])
def test_the_default_lets_functions_do_what_they_did(pool_of, outside, without):
    sandboxes = [] if NO_NAMESPACES else ["a_user_namespace"] if "signal scope" in without else SANDBOXES
    responses = [*USUAL, *FILES, "network", "unix_sockets", "processes", *sandboxes]
    assert works(pool_of, outside, Confinement(without=without), responses) == set(responses)


@pytest.mark.extended(but=["all"])
@needs_landlock
@pytest.mark.parametrize("without", SYSTEMS[:2])
def test_strict_leaves_what_is_needed_to_compute_a_score(pool_of, outside, without):
    strict = Confinement(level="strict", without=without)
    can = set(USUAL) | (set() if without else {"processes"})  # their locks are files of /dev/shm
    denied = [*FILES, *SANDBOXES, "network", "unix_sockets"]
    assert works(pool_of, outside, strict, [*USUAL, *denied, "processes"]) == can


@pytest.mark.extended
@needs_landlock
def test_strict_can_be_told_of_folders_and_of_the_network(pool_of, outside):
    confinement = Confinement(level="strict", network=True, readable=(str(Path(outside["secret"]).parent),))
    responses = [*FILES, "network", "unix_sockets"]
    assert works(pool_of, outside, confinement, responses) == {"read_elsewhere", "network", "unix_sockets"}


@pytest.mark.extended
@needs_landlock
def test_strict_can_be_told_where_functions_may_write(pool_of, outside):
    confinement = Confinement(level="strict", writable=(str(Path(outside["secret"]).parent),))
    assert works(pool_of, outside, confinement, FILES) == {"read_elsewhere", "write_elsewhere"}


@pytest.mark.extended
def test_without_the_network_files_and_sockets_of_this_machine_stay(pool_of, outside):
    responses = [*USUAL, *FILES, "network", "unix_sockets"]
    assert works(pool_of, outside, Confinement(network=False), responses) == {*USUAL, *FILES, "unix_sockets"}


# It says where the temporary folder is.
KEEP_A_FILE = """
import os, tempfile
def main(reward_input):
    tempfile.mkstemp()
    folder = tempfile.gettempdir()
    try:
        open(f"{folder}/../lock", "r+")
        outside = True
    except PermissionError:
        outside = False
    raise ValueError(folder, oct(os.stat(folder).st_mode), os.listdir(folder) != [], outside)
"""


def temporary_folder(pool):
    error = pool.score(requests("a"))[0].error
    folder, *found = eval(error.removeprefix("ValueError: ").rpartition(" ")[0])
    assert found == ["0o40700", True, False]
    return Path(folder)


@needs_landlock
def test_the_temporary_folder_of_strict_is_private_and_removed(pool_of, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pool = pool_of(KEEP_A_FILE, confinement=Confinement(level="strict"))
    folder = temporary_folder(pool)
    assert folder.exists()
    assert tmp_path in folder.parents
    pool.close()
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]


@needs_landlock
def test_the_temporary_folder_of_a_supervisor_that_is_killed_is_removed_by_the_next(pool_of, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pool = pool_of(KEEP_A_FILE, confinement=Confinement(level="strict"))
    before = temporary_folder(pool)
    [worker] = pool._children
    started = [worker.pid, *processes.descendants(worker.pid)]
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, started)))
    assert before.exists()
    after = temporary_folder(pool)  # of another worker, which has removed the first one's
    assert after != before
    assert not before.exists()
    pool.close()
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]


@pytest.mark.parametrize(
    ("confinement", "message"),
    [
        (Confinement(level="strict", without=("landlock",)), "confinement=strict needs Landlock .*use .*=default"),
        (Confinement(level="strict", without=("seccomp",)), "confinement=strict needs seccomp"),
        (Confinement(network=False, without=("seccomp",)), "network=false needs seccomp"),
    ],
)
def test_what_is_asked_for_is_done_or_refused(pool_of, confinement, message):
    with pytest.raises(RewardError, match=message):
        pool_of("def main(reward_input): return 1.0", confinement=confinement).ready()
