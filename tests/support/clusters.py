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


@contextmanager
def two_ray_nodes(folder: Path, *, num_cpus: int = 1) -> Iterator[dict[str, str]]:
    """Start two Ray nodes with so many CPUs each, and return the environment of a run on them.

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
