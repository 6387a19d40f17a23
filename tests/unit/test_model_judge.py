"""examples/reward_function/judge.py with a small server: faults, cache, budget, confinement."""

import asyncio
import base64
import contextlib
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from PIL import Image

from trigon.assemble.preflight import open_rewards
from trigon.config.schema import Config
from trigon.rewards.contract import RewardRequest
from trigon.system.confinement import mechanisms
from trigon.types import EncodedMedia

pytest.importorskip("openai", reason="the judge needs the package openai (the extra judge)")

FILE = Path(__file__).parents[2] / "examples" / "reward_function" / "judge.py"
KEY = "sk-test-0123456789abcdef"


_SPEC = spec_from_file_location("example_judge", FILE)
judge = module_from_spec(_SPEC)
_SPEC.loader.exec_module(judge)


class Endpoint:
    """An endpoint that replies as it is told, one reply for each request, and the last one again.

    A reply is a score, text, bytes that are no HTTP answer of the API, a status, or "hang".
    """

    def __init__(self, *replies, headers=(), seconds=0.0):
        self.replies, self.headers, self.seconds = list(replies) or [10], dict(headers), seconds
        self.requests, self.times, self.keys = [], [], []
        self.lock = threading.Lock()
        self.running = self.most_running = 0
        self.stopped = threading.Event()

    def __enter__(self):
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint.lock:
                    number = len(endpoint.requests)
                    endpoint.requests.append(body)
                    endpoint.times.append(time.monotonic())
                    endpoint.keys.append(self.headers["Authorization"])
                    endpoint.running += 1
                    endpoint.most_running = max(endpoint.most_running, endpoint.running)
                time.sleep(endpoint.seconds)
                with endpoint.lock:
                    endpoint.running -= 1
                self.reply(endpoint.replies[min(number, len(endpoint.replies) - 1)])

            def reply(self, reply):
                status, content = 200, reply
                match reply:
                    case "hang":
                        endpoint.stopped.wait(30)
                        return
                    case int() if reply > 10:
                        status, content = reply, json.dumps({"error": {"message": f"status {reply}"}}).encode()
                    case int() | str():
                        text = json.dumps({"score": reply}) if isinstance(reply, int) else reply
                        choice = {
                            "index": 0,
                            "finish_reason": "stop",
                            "message": {"role": "assistant", "content": text},
                        }
                        usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
                        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "judge"}
                        content = json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                for name, value in endpoint.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        return self

    def __exit__(self, *error):
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def reward_input(response="12", **changed):
    return {"response": response, "prompt": "How many?", "ground_truth": "12", "images": [], **changed}


def score(endpoint, *reward_inputs, **kwargs):
    """Return the reward of each completion, or its error, by one judge at the same time."""
    options = {"first_delay_seconds": 0.01, "request_seconds": 5.0, **kwargs}

    async def run():
        made = judge.Judge(endpoint.url, "judge", KEY, **options)
        async with made.client:
            return await asyncio.gather(*map(made, reward_inputs or [reward_input()]), return_exceptions=True)

    return [result["overall"] if isinstance(result, dict) else result for result in asyncio.run(run())]


def image_of(request):
    """Return the image that a request shows to the judge."""
    [picture] = [part for part in request["messages"][1]["content"] if part["type"] == "image_url"]
    encoded = picture["image_url"]["url"].removeprefix("data:image/png;base64,")
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


def test_the_judge_gets_the_question_the_truth_the_completion_and_the_images():
    image = Image.new("RGB", (40, 20), (200, 10, 10))
    with Endpoint(7) as endpoint:
        assert score(endpoint, reward_input("twelve", images=[image]), max_image_pixels=200) == [0.7]
    [request] = endpoint.requests
    assert endpoint.keys == [f"Bearer {KEY}"]
    assert (request["model"], request["temperature"], request["seed"]) == ("judge", 0.0, 0)
    _, text = request["messages"][1]["content"]
    for part in ("How many?", "<correct_answer>\n12\n", "<answer>\ntwelve\n"):
        assert part in text["text"]
    sent = image_of(request)
    assert (sent.size, sent.getpixel((0, 0))) == ((20, 10), (200, 10, 10))


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.parametrize(
    "fault",
    [
        429,
        500,
        503,
        408,
        "hang",
        "I would say that it is right.",
        '{"score": 11}',
        '{"score": true}',
        "",
        b"<html>busy</html>",
        b'{"choices": []}',
    ],
    ids=str,
)
def test_a_fault_that_passes_is_tried_again(fault):
    with Endpoint(fault, fault, 8) as endpoint:
        assert score(endpoint, request_seconds=0.5 if fault == "hang" else 5.0) == [0.8]
    assert len(endpoint.requests) == 3


@pytest.mark.faults
def test_an_endpoint_that_closes_connections_is_tried_again_and_then_an_error():
    with Endpoint() as endpoint:
        pass  # no process listens there any more
    [error] = score(endpoint, attempts=2)
    assert f"the judge at {endpoint.url} gave no score in 2 attempts; the last one: APIConnectionError" in str(error)


@pytest.mark.faults
@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_no_attempt_can_change_is_an_error_at_once(status):
    with Endpoint(status) as endpoint:
        [error] = score(endpoint)
    assert f"the judge at {endpoint.url} refused the request" in str(error)
    assert str(status) in str(error)
    assert len(endpoint.requests) == 1


def test_delays_double_up_to_a_limit_and_depend_on_the_seed_and_the_request_only():
    def delays(seed, key):
        made = judge.Judge("http://127.0.0.1:9", "judge", first_delay_seconds=1.0, max_delay_seconds=4.0, seed=seed)
        return [made.delay(attempt, key, ValueError()) for attempt in (1, 2, 3, 4, 9)]

    first = delays(0, "a")
    for seconds, longest in zip(first, (1, 2, 4, 4, 4), strict=True):
        assert longest / 2 <= seconds <= longest
    assert delays(0, "a") == first
    assert delays(0, "b") != first
    assert delays(1, "a") != first


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.parametrize(("asked", "least", "most"), [("0.5", 0.5, 3.0), ("3600", 0.7, 3.0), ("tomorrow", 0.0, 0.4)])
def test_the_delay_that_the_server_asks_for_is_kept_up_to_the_limit(asked, least, most):
    with Endpoint(429, 9, headers={"Retry-After": asked}) as endpoint:
        assert score(endpoint, max_delay_seconds=0.7) == [0.9]
    first, second = endpoint.times
    assert least <= second - first < most


def test_equal_completions_are_asked_for_once_also_at_the_same_time_and_by_a_later_run(tmp_path):
    inputs = [reward_input("a"), reward_input("b"), reward_input("a"), reward_input("a", ground_truth="13")]
    with Endpoint(5, seconds=0.1) as endpoint:
        assert score(endpoint, *inputs, cache=str(tmp_path)) == [0.5] * 4
        assert len(endpoint.requests) == 3
        assert score(endpoint, *inputs, cache=str(tmp_path)) == [0.5] * 4
        assert len(endpoint.requests) == 3
        score(endpoint, *inputs, cache=str(tmp_path), seed=1)
        assert len(endpoint.requests) == 6
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.parametrize("damaged", ["", "{", '{"reply": 3}', '{"reply": "no score"}', "[]"])
def test_a_damaged_file_of_the_cache_is_replaced(tmp_path, damaged):
    with Endpoint(5, 6) as endpoint:
        assert score(endpoint, cache=str(tmp_path)) == [0.5]
        [file] = tmp_path.glob("*/*.json")
        file.write_text(damaged)
        assert score(endpoint, cache=str(tmp_path)) == [0.6]
        assert score(endpoint, cache=str(tmp_path)) == [0.6]


def counts(folder, run="run"):
    return json.loads((folder / f"budget-{run}.json").read_text())


@pytest.mark.faults
def test_the_budget_counts_every_attempt_and_its_end_is_an_error_that_says_so(tmp_path):
    with Endpoint(500, 500, 8) as endpoint:
        assert score(endpoint, reward_input("a"), cache=str(tmp_path), max_requests=3) == [0.8]
        assert counts(tmp_path) == {"requests": 3, "tokens": 100}
        cached, error = score(endpoint, reward_input("a"), reward_input("b"), cache=str(tmp_path), max_requests=3)
        assert cached == 0.8  # costs nothing
        assert str(error).startswith("the judge's budget is used up: 3 requests, and max_requests allows 3. Raise")
        assert len(endpoint.requests) == 3
        assert score(endpoint, reward_input("b"), cache=str(tmp_path), max_requests=3, run="other") == [0.8]
    assert counts(tmp_path, "other") == {"requests": 1, "tokens": 100}


def test_the_budget_of_tokens_ends_once_it_is_reached(tmp_path):
    with Endpoint(8) as endpoint:
        options = {"cache": str(tmp_path), "max_tokens": 150}
        results = [score(endpoint, reward_input(str(number)), **options)[0] for number in range(3)]
    assert results[:2] == [0.8, 0.8]
    assert "used up: 200 tokens, and max_tokens allows 150" in str(results[2])


@pytest.mark.faults
def test_a_damaged_budget_is_an_error_that_names_its_file(tmp_path):
    (tmp_path / "budget-run.json").write_text("{")
    with Endpoint() as endpoint, pytest.raises(RuntimeError, match=r"budget-run\.json is damaged; remove it"):
        score(endpoint, cache=str(tmp_path), max_requests=1)


COUNT = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import judge
budget = judge.Budget(Path(sys.argv[2]), "run", None, None)
for number in range(int(sys.argv[3])):
    budget.take_request()
    print(number, flush=True)
"""


@pytest.mark.extended
@pytest.mark.faults
def test_no_count_is_lost_when_processes_count_at_a_time_and_one_of_them_is_killed(tmp_path):
    def start(times):
        command = [sys.executable, "-c", COUNT, str(FILE.parent), str(tmp_path), str(times)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with start(200) as first, start(200) as second, start(1_000_000) as killed:
        for _ in range(50):
            killed.stdout.readline()
        killed.kill()
        num_counted = 50 + len(killed.stdout.read().splitlines())
        assert [each.wait(60) for each in (first, second)] == [0, 0]
    # The last one may have been counted and not printed, or printed in part.
    assert counts(tmp_path)["requests"] - 400 - num_counted in (-1, 0, 1)


def test_a_budget_needs_a_folder():
    with Endpoint() as endpoint, pytest.raises(ValueError, match="counted in the cache folder; set cache"):
        score(endpoint, max_requests=1)


# -- in reward workers -----------------------------------------------------------------------------


def requests(*responses):
    """Return completions of a question about a red image."""
    file = io.BytesIO()
    Image.new("RGB", (20, 10), (200, 10, 10)).save(file, "PNG")
    fields = {"response_length": 3, "ground_truth": "12", "prompt": "?", "finish_reason": "stop", "row": {}}
    media = EncodedMedia((file.getvalue(),), (hashlib.sha256(file.getvalue()).hexdigest(),))
    return [RewardRequest(response=response, **fields, media=media) for response in responses]


def scores_by_workers(endpoint, cache, responses, monkeypatch, *, kwargs=None, **options):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    judge_kwargs = {"base_url": endpoint.url, "model": "judge", "api_key": "env:JUDGE_API_KEY", "cache": str(cache)}
    reward = {
        "reward_function": f"{FILE}:Judge",
        "reward_function_kwargs": {**judge_kwargs, "first_delay_seconds": 0.05, **(kwargs or {})},
        "num_cpus": 2,
        "concurrency": 4,
        "timeout_seconds": 30,
        "max_failed_fraction": 1,
        **options,
    }
    with contextlib.closing(open_rewards(Config(worker={"reward": reward}))) as pool:
        return pool.score(requests(*responses))


@pytest.mark.extended
@pytest.mark.faults
def test_workers_share_the_endpoint_the_cache_and_the_budget(tmp_path, monkeypatch):
    responses = [str(number) for number in range(30)]
    with Endpoint(9, seconds=0.5) as endpoint:
        kwargs = {"max_requests": 20}
        scores = scores_by_workers(endpoint, tmp_path, responses, monkeypatch, kwargs=kwargs)
        assert endpoint.most_running > 4  # more than one of the two workers has calls at a time
        assert len(endpoint.requests) == 20
        assert set(endpoint.keys) == {f"Bearer {KEY}"}
        assert counts(tmp_path) == {"requests": 20, "tokens": 2000}
        assert [each.outcome for each in scores].count("ok") == 20
        errors = {each.error for each in scores if each.outcome == "failed"}
        assert all("the judge's budget is used up: 20 requests, and max_requests allows 20" in each for each in errors)
        kwargs = {"max_requests": 30}
        again = scores_by_workers(endpoint, tmp_path, responses, monkeypatch, kwargs=kwargs)
        assert [each.overall for each in again] == [0.9] * 30
        assert len(endpoint.requests) == 30  # only those that had no score


@pytest.mark.extended
@pytest.mark.faults
def test_a_call_that_takes_too_long_costs_its_completion_alone(tmp_path, monkeypatch):
    with Endpoint("hang", 9) as endpoint:
        options = {"num_cpus": 1, "timeout_seconds": 3}
        scores = scores_by_workers(endpoint, tmp_path, "abcd", monkeypatch, **options)
    assert sorted(each.outcome for each in scores) == ["ok", "ok", "ok", "timeout"]


@pytest.mark.extended
@pytest.mark.faults
def test_the_key_is_in_no_error(tmp_path, monkeypatch):
    with Endpoint(401) as endpoint:
        [answer] = scores_by_workers(endpoint, tmp_path, "a", monkeypatch)
    assert answer.outcome == "failed"
    assert "refused the request" in answer.error
    assert KEY not in answer.error


needs_landlock = pytest.mark.skipif(
    sys.platform != "linux" or not mechanisms.find_landlock_version(),
    reason="this kernel has no Landlock, which strict needs",
)


@pytest.mark.extended
@needs_landlock
def test_it_works_with_strict_confinement_as_the_guide_says(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    strict = {"confinement": "strict", "network": True, "writable": [str(cache)]}
    with Endpoint(9) as endpoint:
        scores = scores_by_workers(endpoint, cache, "ab", monkeypatch, **strict)
        assert [(each.overall, each.error) for each in scores] == [(0.9, ""), (0.9, "")]
        assert counts(cache) == {"requests": 2, "tokens": 200}
        assert {image_of(request).getpixel((0, 0)) for request in endpoint.requests} == {(200, 10, 10)}
        scores_by_workers(endpoint, cache, "ab", monkeypatch, **strict)
        assert len(endpoint.requests) == 2
    assert os.listdir(tmp_path) == ["cache"]
