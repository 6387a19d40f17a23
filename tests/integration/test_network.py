"""No other machine reaches a run on one machine, and it leaves no temporary file behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support.processes import is_running, wait_until
from support.runs import NO_VALIDATION, finish, log_of, num_lines, press_ctrl_c, start, wait_for
from support.sockets import Listener, descendants, listeners, outside_address

pytestmark = [pytest.mark.faults, pytest.mark.vllm]

TWO_WORKERS = ("trainer.n_gpus_per_node=2", "worker.rollout.tensor_parallel_size=2")

# As on a machine where these name the interface of a cluster.
OUTER = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}

WITHOUT_TOKEN = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_put(b"key", b"value", True, None)
"""


def connects(address: str, port: int) -> bool:
    """Return whether something at this address takes a connection."""
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex((address, port)) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return an empty temporary folder with a short path, for Ray's sockets."""
    path = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def segments() -> set[Path]:
    """Return the shared memory of runs: of vLLM, of multiprocessing and of Ray."""
    parts = ("trigon-", "cpushm", "psm_", "plasma")
    return {path for path in Path("/dev/shm").iterdir() if any(part in path.name for part in parts)}


def watch(
    process: subprocess.Popen[str], outside: str | None, temporary: Path
) -> tuple[set[Listener], set[Listener], dict[str, int]]:
    """Return the sockets of a run, from its start to its end, and those reached from outside.

    Also the files and folders of its temporary folder with their modes.
    """
    seen: set[Listener] = set()
    reached: set[Listener] = set()
    modes: dict[str, int] = {}
    while process.poll() is None:
        for path in temporary.iterdir():
            with suppress(FileNotFoundError):
                modes[path.name] = path.stat().st_mode & 0o777
        new = listeners(descendants(process.pid)) - seen
        seen |= new
        for each in new:
            if outside is not None and each.protocol.startswith("tcp") and connects(outside, each.port):
                reached.add(each)
        time.sleep(0.2)
    return seen, reached, modes


def is_refused_without_token(gcs_port: int) -> bool:
    """Return whether Ray's server refuses a write without the token."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", WITHOUT_TOKEN, f"127.0.0.1:{gcs_port}"]
    tried = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    return tried.returncode != 0 and "nauthenticated" in tried.stderr.replace("Unauthorized", "Unauthenticated")


@pytest.mark.extended
def test_two_workers_listen_on_the_loopback_address_only_and_leave_no_temporary_file(made, folder, temporary):
    variables = {**OUTER, "TMPDIR": str(temporary)}
    process = start(made, folder, *TWO_WORKERS, *NO_VALIDATION, steps=1, environment=variables)
    gcs: list[Listener] = []
    while not gcs and process.poll() is None:
        gcs = [each for each in listeners(descendants(process.pid)) if "gcs_server" in each.process]
        time.sleep(0.1)
    assert is_refused_without_token(gcs[0].port)
    seen, reached, modes = watch(process, outside_address(), temporary)
    finish(process, folder)
    assert {each for each in seen if not each.is_local} == set()
    assert reached == set()
    # What the test must have seen to be one: the servers of Ray, and of both ranks gloo's sockets
    # beside Ray's own.
    for part in ("gcs_server", "raylet/raylet", "RuntimeEnvAgent", "trigon.trainer.main"):
        assert any(part in each.process for each in seen), (part, seen)
    assert len({each.port for each in seen if each.process.startswith("ray::Worker")}) > 4
    private = {name for name in modes if name.startswith(f"trigon-{os.geteuid()}-")}
    assert private
    assert {modes[name] for name in private} == {0o700}
    assert list(temporary.iterdir()) == []


@pytest.mark.long
def test_one_worker_listens_on_the_loopback_address_only(made, folder, temporary):
    process = start(made, folder, *NO_VALIDATION, steps=1, environment=OUTER)
    seen, reached, _modes = watch(process, outside_address(), temporary)
    finish(process, folder)
    assert {each for each in seen if not each.is_local} == set()
    assert reached == set()
    assert seen  # vLLM's process group, by gloo


@pytest.mark.alone  # other runs have shared memory too
@pytest.mark.long
def test_files_of_a_killed_run_are_removed_at_the_next_start_and_those_of_a_living_one_stay(made, tmp_path, temporary):
    def start_in(name: str, *options: str, steps: int) -> subprocess.Popen[str]:
        variables = {"TMPDIR": str(temporary)}
        return start(made, tmp_path / name, "trainer.save_freq=-1", *options, steps=steps, environment=variables)

    segments_before = segments()
    living = start_in("living", steps=10_000)
    wait_for(lambda: num_lines(tmp_path / "living") >= 1, living, tmp_path / "living")
    of_living = set(temporary.iterdir())
    assert of_living

    killed = start_in("killed", *TWO_WORKERS, steps=10_000)
    wait_for(lambda: num_lines(tmp_path / "killed") >= 1, killed, tmp_path / "killed")
    processes = descendants(killed.pid)
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    killed.wait()
    while any(map(is_running, processes)):
        time.sleep(0.1)
    of_killed = set(temporary.iterdir()) - of_living
    assert any((path / "ray" / "session_latest").exists() for path in of_killed)

    following = start_in("following", steps=1)
    wait_for(lambda: not any(path.exists() for path in of_killed), following, tmp_path / "following")
    finish(following, tmp_path / "following")
    assert set(temporary.iterdir()) == of_living
    assert all((path / "lock").exists() for path in of_living)
    assert segments() <= segments_before

    press_ctrl_c(living)
    assert living.wait(timeout=120) == 130, log_of(tmp_path / "living").read_text()[-4000:]
    assert list(temporary.iterdir()) == []


CLUSTER = """
import time
from trigon.distributed.cluster import open_cluster
with open_cluster(nodes=1, workers_per_node=1):
    print("open", flush=True)
    time.sleep(1000)
"""


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by their commands on Linux only")
def test_no_process_of_ray_outlives_a_driver_that_is_killed(temporary):
    variables = os.environ | {"TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdout=subprocess.PIPE, text=True, env=variables) as driver:
        assert driver.stdout.readline() == "open\n"
        deadline = time.monotonic() + 60
        while sum("agent" in command(pid) for pid in descendants(driver.pid)) < 2:  # the node manager starts them
            assert time.monotonic() < deadline
            time.sleep(0.1)
        started = descendants(driver.pid)
        driver.kill()
    wait_until(lambda: not any(map(is_running, started)))


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
