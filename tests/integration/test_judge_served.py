"""examples/reward_function/judge.py with vLLM's server and a tiny vision model."""

import asyncio
import contextlib
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from PIL import Image

from support.served import served
from trigon.assemble.preflight import open_rewards
from trigon.config.schema import Config
from trigon.rewards.contract import RewardRequest

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.vllm]

FILE = Path(__file__).parents[2] / "examples" / "reward_function" / "judge.py"
KEY = "sk-served-0123456789"

# Without whitespace in JSON, a model with random weights reaches its end.
JSON = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})


@pytest.fixture(scope="module")
def endpoint(tiny_vlm, tmp_path_factory):
    """Return the address of the API of a server that runs while the tests of this module do."""
    pytest.importorskip("openai", reason="the judge needs the package openai (the extra judge)")
    log = tmp_path_factory.mktemp("served") / "log.txt"
    arguments = ("--served-model-name", "judge", "--structured-outputs-config", JSON)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        with served(tiny_vlm, log, *arguments, key=KEY) as address:
            yield f"{address}/v1"


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
