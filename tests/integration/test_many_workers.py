"""Several workers, with real Ray, FSDP2 and vLLM: the numbers of one, whatever their number and whoever dies."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.runs import assert_learned, finish, lines, log_of, num_lines, rollouts, start

pytestmark = pytest.mark.alone

STEPS = 4
# what must differ where rows are packed apart
OF_PACKING = ("actor/micro_batches", "actor/packed_tokens", "actor/packing_fill", "moved/")
MARK = "TRIGON_TEST_RUN"


def train(
    made: Path, folder: Path, *overrides: str, steps: int = STEPS, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a run without validation, which tells nothing new here and takes time."""
    no_validation = ("data.val_files=", "trainer.val_before_train=false", "trainer.val_freq=-1")
    return start(made, folder, *no_validation, *overrides, steps=steps, environment=environment)


@pytest.fixture(scope="module")
def alone(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    finish(train(made, folder), folder)
    assert_learned(folder)
    return folder


@pytest.fixture(scope="module")
def pair(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that nothing happened to, with all of its checkpoints."""
    folder = tmp_path_factory.mktemp("pair") / "run"
    finish(train(made, folder, "trainer.n_gpus_per_node=2", "trainer.save_limit=-1"), folder)
    return folder


def assert_close(ours: list[dict], theirs: list[dict], *, tolerance: float) -> None:
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    far = {
        (line["step"], key): (line["metrics"].get(key), value)
        for line, other in zip(ours, theirs, strict=True)
        for key, value in other["metrics"].items()
        if not key.startswith(OF_PACKING)
        and not math.isclose(line["metrics"].get(key, math.nan), value, rel_tol=tolerance, abs_tol=tolerance)
    }
    assert far == {}


def from_step(folder: Path, step: int, destination: Path) -> Path:
    """Return a copy of a run's folder as if it had been killed right after the checkpoint of this step."""
    shutil.copytree(folder, destination)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(destination / f"global_step_{later}", ignore_errors=True)
    return destination


def marked(mark: str) -> dict[int, str]:
    """Return the command lines of all processes that descend from a run, by process number."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def kill_worker(process: subprocess.Popen[str], folder: Path, mark: str, *, method: str, after: int) -> None:
    """Kill a worker while it is in this method, once the run has written so many lines."""
    workers: list[int] = []
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log_of(folder).read_text()[-4000:]
        if num_lines(folder) >= after and workers:
            for pid in workers:
                try:
                    doing = Path(f"/proc/{pid}/cmdline").read_bytes()
                except FileNotFoundError:
                    continue
                if f"ray::Worker.{method}".encode() in doing:
                    os.kill(pid, signal.SIGKILL)
                    return
            time.sleep(0.001)
        else:
            workers = [pid for pid, command in marked(mark).items() if command.startswith("ray::Worker")]
            time.sleep(0.05)
    raise AssertionError(f"no worker was seen in {method}")


def test_two_workers_give_the_numbers_of_one(alone, pair):
    assert_close(lines(pair), lines(alone), tolerance=1e-5)
    assert rollouts(pair).keys() == rollouts(alone).keys()
    # Four small drawings and some hundred tokens, three times; neither pixels (677 kB each time) nor weights (3 MB).
    moved = [line["metrics"]["moved/sent_bytes"] for line in lines(pair)[1:3]]
    assert all(0 < sent < 30_000 for sent in moved), moved


def test_one_worker_goes_on_from_a_checkpoint_of_two(made, pair, tmp_path):
    folder = from_step(pair, 2, tmp_path / "run")
    finish(train(made, folder), folder)
    assert "resuming after step 2" in log_of(folder).read_text()
    assert_close(lines(folder), lines(pair), tolerance=1e-5)


def test_four_workers_with_tensor_parallelism_and_two_copies_go_on_from_a_checkpoint_of_two(made, pair, tmp_path):
    folder = from_step(pair, 2, tmp_path / "run")
    sizes = ("trainer.n_gpus_per_node=4", "worker.rollout.tensor_parallel_size=2", "worker.actor.fsdp.fsdp_size=2")
    finish(train(made, folder, *sizes), folder)
    assert_close(lines(folder), lines(pair), tolerance=1e-4)


@pytest.mark.timeout(1200)  # it starts two workers five times
def test_a_worker_killed_in_any_phase_ends_the_run_at_once_and_the_next_goes_on_exactly(made, pair, tmp_path):
    folder = tmp_path / "run"
    for lived, (method, phase) in enumerate(
        [("generate", "rollout"), ("logprobs", "logprobs"), ("step", "update"), ("write_state", "save (writing)")]
    ):
        mark = secrets.token_hex(8)
        # One step further each time, the first of them in the first.
        process = train(
            made,
            folder,
            "trainer.n_gpus_per_node=2",
            "trainer.save_freq=1",
            environment={MARK: mark},
        )
        kill_worker(process, folder, mark, method=method, after=lived)
        killed = time.monotonic()
        assert process.wait(timeout=60) == 1
        said = log_of(folder).read_text()
        assert "WorkerError: rank " in said
        assert f"in {phase}: the process died" in said
        assert "the same command goes on from the last checkpoint" in said
        while time.monotonic() - killed < 60 and marked(mark):
            time.sleep(0.1)
        assert marked(mark) == {}
    finish(train(made, folder, "trainer.n_gpus_per_node=2", "trainer.save_freq=1"), folder)
    assert_same(lines(folder), lines(pair))
    assert rollouts(folder) == rollouts(pair)


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    """Bit for bit, but for the bytes of messages, of which a kill repeats some."""

    def less(found: list[dict]) -> list[dict]:
        return [
            {"step": line["step"], "metrics": {k: v for k, v in line["metrics"].items() if not k.startswith("moved/")}}
            for line in found
        ]

    assert less(ours) == less(theirs)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Two Ray nodes on this machine, with one CPU each; returns what a run has to know to find them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mark = secrets.token_hex(8)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ray = str(Path(sys.executable).with_name("ray"))
    common = ["--num-cpus=1", "--disable-usage-stats", "--block"]
    where = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    environment = {**os.environ, **token, MARK: mark}
    folder = tmp_path_factory.mktemp("nodes")
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for number, place in enumerate((where, [f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.2"])):
            log = folder / f"{number}.log"
            with log.open("w") as output:
                command = [ray, "start", *place, *common]
                nodes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
            while "Ray runtime started" not in log.read_text():
                assert nodes[-1].poll() is None, log.read_text()
                time.sleep(0.1)
        yield {**token, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        while left := marked(mark):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            for node in nodes:
                node.wait()
            time.sleep(0.1)


def test_a_cluster_of_two_nodes_gives_the_numbers_of_one_worker(made, alone, two_nodes, tmp_path):
    folder = tmp_path / "run"
    sizes = ("trainer.nnodes=2", "worker.rollout.tensor_parallel_size=2")
    finish(train(made, folder, *sizes, steps=2, environment=two_nodes), folder)
    assert_close(lines(folder), lines(alone)[:2], tolerance=1e-5)


def test_a_cluster_that_is_too_small_is_told_what_was_asked_and_what_is_there(made, two_nodes, tmp_path):
    folder = tmp_path / "run"
    process = train(made, folder, "trainer.nnodes=2", "trainer.n_gpus_per_node=3", environment=two_nodes)
    assert process.wait(timeout=120) == 1
    said = log_of(folder).read_text()
    assert "ConfigError: trainer.nnodes=2 and trainer.n_gpus_per_node=3 ask for 2 nodes with 3 CPUs" in said
    assert "has 1 CPUs" in said
