"""examples/reward_function/judge.py with vLLM's server and a tiny vision model."""

import asyncio
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
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from PIL import Image

from trigon.build.rewards import open_rewards
from trigon.config.schema import Config
from trigon.rewards.contract import RewardRequest

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.vllm]

FILE = Path(__file__).parents[2] / "examples" / "reward_function" / "judge.py"
START_SECONDS = 300
KEY = "sk-served-0123456789"

# What `vllm serve` starts. That command asks for the metadata of a package named vllm, and fails
# with vllm-cpu 0.32. Without whitespace in JSON, a model with random weights reaches its end.
SERVER = [
    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--enforce-eager"),
    *("--served-model-name", "judge", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--limit-mm-per-prompt", json.dumps({"image": 1, "video": 0}), "--skip-mm-profiling"),
    *("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})),
]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_ready(url):
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


@pytest.fixture(scope="module")
def endpoint(tiny_vlm, tmp_path_factory):
    """Return the address of the API of a server that runs while the tests of this module do."""
    pytest.importorskip("openai", reason="the judge needs the package openai (the extra judge)")
    port, log = free_port(), tmp_path_factory.mktemp("served") / "log.txt"
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_API_KEY": KEY}
    with pytest.MonkeyPatch.context() as patch, log.open("w") as output:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        command = [*SERVER, "--model", str(tiny_vlm), "--port", str(port)]
        server = subprocess.Popen(
            command,
            env={**os.environ, **settings},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_ready(f"http://127.0.0.1:{port}"):
                assert server.poll() is None, f"the server has exited:\n{log.read_text()[-4000:]}"
                assert time.monotonic() < deadline, f"the server does not start:\n{log.read_text()[-4000:]}"
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def load_judge():
    spec = spec_from_file_location("example_judge", FILE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_server_scores_text_and_reads_the_images(endpoint, tmp_path):
    judge = load_judge()

    async def run(run, *images):
        made = judge.Judge(endpoint, "judge", KEY, cache=str(tmp_path), run=run, request_seconds=120.0)
        async with made.client:
            scores = await made({"response": "12", "prompt": "How many?", "ground_truth": "12", "images": images})
        counts = json.loads((tmp_path / f"budget-{run}.json").read_text())
        assert counts["requests"] == 1
        return scores["overall"], counts["tokens"]

    def ask(name, *images):
        return asyncio.run(run(name, *images))

    score, text_tokens = ask("text")
    assert score in {number / 10 for number in range(11)}
    small, small_tokens = ask("small", Image.new("RGB", (56, 56), (200, 10, 10)))
    large, large_tokens = ask("large", Image.new("RGB", (112, 112), (200, 10, 10)))
    # 28 x 28 pixels are a token; an image has a token at its beginning and one at its end.
    assert small_tokens - text_tokens == pytest.approx(4 + 2, abs=1)
    assert large_tokens - small_tokens == pytest.approx(12, abs=1)
    assert {small, large} <= {number / 10 for number in range(11)}


def test_reward_workers_score_with_the_server(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    kwargs = {"base_url": endpoint, "model": "judge", "api_key": "env:JUDGE_API_KEY", "cache": str(tmp_path / "cache")}
    reward = {
        "reward_function": f"{FILE}:Judge",
        "reward_function_kwargs": {**kwargs, "max_requests": 100, "request_seconds": 120},
        "num_cpus": 2,
        "concurrency": 4,
        "timeout_seconds": 300,
        "max_failed_fraction": 0,
    }
    fields = {"response_length": 3, "ground_truth": "12", "prompt": "How many?", "finish_reason": "stop", "row": {}}
    requests = [RewardRequest(response=f"{number % 12}", **fields) for number in range(24)]
    scores = []
    for _ in range(2):  # the second time all are in the cache
        with contextlib.closing(open_rewards(Config(worker={"reward": reward}))) as pool:
            scores.append([score.overall for score in pool.score(requests)])
    assert scores[0] == scores[1]
    assert scores[0][:12] == scores[0][12:]
    counts = json.loads((tmp_path / "cache" / "budget-run.json").read_text())
    assert 12 <= counts["requests"] <= 24  # two workers may ask for the same at the same time


@pytest.mark.faults
def test_a_wrong_key_and_an_unknown_model_are_errors_at_once(endpoint):
    judge = load_judge()

    async def run(model, key):
        made = judge.Judge(endpoint, model, key)
        async with made.client:
            await made({"response": "12", "prompt": "How many?", "ground_truth": "12", "images": []})

    for model, key, status in (("judge", "sk-another", "401"), ("judgement", KEY, "404")):
        with pytest.raises(RuntimeError, match=f"refused the request: .*{status}"):
            asyncio.run(run(model, key))
