"""Two Ray nodes on this machine, and the processes of a run by a mark in their environment."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.runs import log_of, num_lines
from trigon.distributed.cluster import Layout, WorkerHandle, reserve

MARK = "TRIGON_TEST_RUN"
"""The environment variable with the mark of a run."""


def marked(mark: str) -> dict[int, str]:
    """Return the command lines of the processes with this mark in their environment, by id."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                processes[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return processes


def kill_worker(process: subprocess.Popen[str], folder: Path, mark: str, *, method: str, after: int) -> None:
    """Kill a worker of a run that executes this method, when `after` steps are made."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log_of(folder).read_text()[-4000:]
        found_at = time.monotonic()
        workers = [pid for pid, command in marked(mark).items() if command.startswith("ray::")]
        while num_lines(folder) >= after and time.monotonic() < found_at + 1.0:
            for pid in workers:
                with suppress(FileNotFoundError):  # it has ended meanwhile
                    if f"ray::Worker.{method}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)
                        return
            time.sleep(0.002)
        time.sleep(0.02)
    raise AssertionError(f"no worker was seen in {method}")


@contextmanager
def two_ray_nodes(folder: Path, *, num_cpus: int = 1) -> Iterator[dict[str, str]]:
    """Start two Ray nodes with this many CPUs each, and return the environment of a run on them.

    folder: for their logs. All processes of the nodes, and of runs on them, are killed at the end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mark = secrets.token_hex(8)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ray = str(Path(sys.executable).with_name("ray"))
    common = [f"--num-cpus={num_cpus}", "--disable-usage-stats", "--block"]
    head = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    environment = {**os.environ, **token, MARK: mark}
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for number, role in enumerate((head, [f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.2"])):
            log = folder / f"{number}.log"
            with log.open("w") as output:
                command = [ray, "start", *role, *common]
                nodes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
            while "Ray runtime started" not in log.read_text():
                assert nodes[-1].poll() is None, log.read_text()
                time.sleep(0.1)
        yield {**token, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        while remaining := marked(mark):
            for pid in remaining:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, signal.SIGKILL)
            for node in nodes:
                node.wait()
            time.sleep(0.1)


@contextmanager
def start_workers(layout: Layout, actor_class: Any, run_name: str) -> Iterator[list[WorkerHandle]]:
    """Run all workers of a layout, and kill them when the context ends, inside open_cluster()."""
    with reserve(layout) as reserved:
        yield reserved.start(range(layout.size), actor_class, run_name, loopback=layout.nodes == 1)
