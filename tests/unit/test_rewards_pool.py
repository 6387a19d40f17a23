"""RewardPool with real processes: contracts, order, and failures of single completions."""

import logging
import os
import re
import time

import pytest

from support.processes import is_running
from support.rewards import requests, reward_pool
from trigon.errors import RewardError
from trigon.rewards.contract import RewardRequest
from trigon.system.child import MAX_OUTPUT_BYTES, sanitize_line
from trigon.system.processes import descendants

# Scores completions by their length, and fails in the way that a completion names.
MISBEHAVE = """
import os, sys, time

def misbehave(response):
    match response:
        case "loop":
            while True:
                pass
        case "raise":
            raise KeyError("no such\\nstep")
        case "exit":
            os._exit(3)
        case "leave":
            sys.exit(4)
        case "nan":
            return {"overall": float("nan")}
        case "bare":
            return {"accuracy": 1.0}
        case "noise":
            print("\\x1b[31mnoise", "\\n[[{}", flush=True)
            os.write(1, b"more noise\\n")
            os.write(2, b"and more\\n")
            return {"overall": 5.0}
        case "flood":
            os.write(1, b"x" * 99 + b"\\n" + b"y" * 200_000)
            return {"overall": 5.0}
    return {"overall": float(len(response)), "half": len(response) / 2}
"""
SEQUENTIAL = (
    MISBEHAVE
    + """
REWARD_TYPE = "sequential"
def main(reward_input):
    return misbehave(reward_input["response"])
"""
)
BATCH = (
    MISBEHAVE
    + """
REWARD_TYPE = "batch"
def main(reward_inputs):
    responses = [reward_input["response"] for reward_input in reward_inputs]
    if "short" in responses:
        return [misbehave(response) for response in responses if response != "short"]
    if "number" in responses:
        return 1.0
    return [misbehave(response) for response in responses]
"""
)
BOTH = pytest.mark.parametrize("text", [SEQUENTIAL, BATCH], ids=["sequential", "batch"])

SAME = "reward_input['response'] == reward_input['ground_truth']"
# Each scores 5 for the ground truth and 0 for another response; the weight is an argument.
CONTRACTS = {
    "sequential": f"REWARD_TYPE = 'sequential'\ndef main(reward_input, w): return w * ({SAME})",
    "batch": f"REWARD_TYPE = 'batch'\ndef main(several, w): return [w * ({SAME}) for reward_input in several]",
    "batch by its name": f"def main(reward_inputs, w): return [w * ({SAME}) for reward_input in reward_inputs]",
    "group": f"REWARD_TYPE = 'group'\ndef main(several, w): return [w * ({SAME}) for reward_input in several]",
    "older names": "def main(predict_str, ground_truth, w): return {'overall': w * (predict_str == ground_truth)}",
    "two arguments": "def main(response, ground_truth, w): return w * (response == ground_truth)",
    "annotated": f"def main(reward_input: dict, w: float) -> float: return w * ({SAME})",
    "its own event loop": f"""
import asyncio
async def judge(reward_input): return {SAME}
def main(reward_input, w): return w * asyncio.run(judge(reward_input))
""",
    "class": f"""
class main:
    def __init__(self, w): self.w = w
    def __call__(self, reward_input): return self.w * ({SAME})
""",
    "class of older names": """
class main:
    def __init__(self, w): self.w = w
    def __call__(self, response, ground_truth): return self.w * (response == ground_truth)
""",
}


@pytest.mark.extended(but=["batch-", "group-async", "class-"])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@pytest.mark.parametrize("text", CONTRACTS.values(), ids=CONTRACTS)
def test_every_contract(tmp_path, text, is_async):
    if is_async:
        text = text.replace("def main", "async def main").replace("def __call__", "async def __call__")
        text = text.replace("asyncio.run(judge(reward_input))", "await judge(reward_input)")
    with reward_pool(tmp_path, text, kwargs={"w": 5}) as pool:
        assert [score.overall for score in pool.score(requests("4", "5"))] == [5.0, 0.0]


def test_scores_of_several_workers_are_in_the_order_of_requests(tmp_path):
    text = "import time\nREWARD_TYPE = 'sequential'\ndef main(a):\n  n = int(a['response']); time.sleep(n % 3 / 500); "
    with reward_pool(tmp_path, f"{text}return {{'overall': n}}", num_workers=2) as pool:
        assert [score.overall for score in pool.score(requests(*map(str, range(100))))] == [*map(float, range(100))]
        assert pool.score([]) == []


def test_a_function_receives_all_fields_of_the_request(tmp_path):
    text = """
REWARD_TYPE = "sequential"
def main(reward_input):
    expected = {"response": "\U0001f600", "response_length": 7, "ground_truth": {"a": [1, None]}, "prompt": "why?",
                "finish_reason": "length", "row": {"id": 12, "choices": ["x", "é"]}, "turns": [], "image_sizes": []}
    return {"overall": reward_input == expected}
"""
    request = RewardRequest("\U0001f600", 7, {"a": [1, None]}, "why?", "length", {"id": 12, "choices": ["x", "é"]})
    with reward_pool(tmp_path, text) as pool:
        assert pool.score([request])[0].overall == 1.0


@pytest.mark.extended(but=["sequential"])
@BOTH
def test_only_the_completion_that_fails_or_hangs_gets_no_score(tmp_path, text, caplog):
    bad = {
        "raise": r"KeyError: 'no such\nstep' (reward.py:10)",
        "exit": "its worker exited with code 3",
        "leave": "SystemExit: 4 (reward.py:14)",
        "nan": "returned nan for 'overall', expected a finite number",
        "bare": "returned a dict without 'overall': {'accuracy': 1.0}",
        "loop": "no score within 0.5 s; its worker was killed",
    }
    responses = [response for name in bad for response in (name, "good", "better")]
    with reward_pool(tmp_path, text, num_workers=2, timeout_seconds=0.5) as pool:
        scores = pool.score(requests(*responses))
    for response, score in zip(responses, scores, strict=True):
        if response in bad:
            outcome = "timeout" if response == "loop" else "failed"
            assert (score.outcome, score.overall, score.parts, score.error) == (outcome, 0.0, {}, bad[response])
        else:
            assert (score.outcome, score.parts) == ("ok", {"overall": len(response), "half": len(response) / 2})
    assert re.search('reward.py", line [78] in misbehave', caplog.text)  # where it hung


WITHOUT_TEXT = """
import os
class NoText(Exception):
    def __str__(self): return self.args[1]
    __repr__ = __str__
def judge(response):
    if response == "raise": raise NoText("x")
    if response == "return": return NoText("x")
    return {"overall": 10**5000 if response == "long" else os.getpid()}
"""


@pytest.mark.parametrize("start", ["def", "async def"], ids=["", "async"])
def test_what_has_no_text_costs_its_completion_and_ends_no_worker(tmp_path, start):
    text = f"{WITHOUT_TEXT}\n{start} main(reward_input): return judge(reward_input['response'])"
    with reward_pool(tmp_path, text) as pool:
        first, raised, returned, long, last = pool.score(requests("a", "raise", "return", "long", "a"))
    assert raised.error.startswith("NoText: its text cannot be made")
    assert returned.error == "returned a value of type NoText, expected a number, or a dict with 'overall'"
    assert long.error == "returned a value of type int for 'overall', expected a finite number"
    assert (first.outcome, first.overall) == ("ok", last.overall)  # the same process


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("short", "returned a list of 3 for 4 completions; scored again alone: returned a list of 0 for 1 completions"),
        (
            "number",
            "returned 1.0, expected a list of 4 scores; scored again alone: returned 1.0, expected a list of 1",
        ),
    ],
)
def test_a_batch_with_a_list_of_the_wrong_length_is_scored_again_one_by_one(tmp_path, response, error):
    with reward_pool(tmp_path, BATCH) as pool:
        scores = pool.score(requests("good", response, *["better"] * 14))  # in batches of four
    assert [score.overall for score in scores] == [4.0, 0.0, *[6.0] * 14]
    assert scores[1].error.startswith(error)


def test_a_function_that_returns_another_number_of_scores_is_found_before_training(tmp_path):
    text = "def main(reward_inputs: list): return [1.0]"
    with reward_pool(tmp_path, text) as pool, pytest.raises(RewardError, match="a list of 1 for 2 completions"):
        pool.check(requests("a", "b"), described="the first row")


def test_a_batch_function_may_return_an_array(tmp_path):
    text = "import numpy\ndef main(inputs: list): return numpy.array([len(x['response']) for x in inputs])"
    with reward_pool(tmp_path, text) as pool:
        assert [score.overall for score in pool.score(requests("a", "bcd"))] == [1.0, 3.0]


def test_output_of_the_function_is_logged_safely_and_does_not_affect_scores(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), reward_pool(tmp_path, BATCH) as pool:
        scores = pool.score(requests("good", "noise", "better"))
        pool.score(requests("flood"))
    assert [score.overall for score in scores] == [4.0, 5.0, 6.0]
    assert r"[reward 0] \x1b[31mnoise " in caplog.messages
    for line in ("[[{}", "more noise", "and more", "x" * 99):
        assert f"[reward 0] {line}" in caplog.messages
    assert f"[reward 0] ... more than {MAX_OUTPUT_BYTES} bytes printed; the rest is not logged" in caplog.messages
    assert sanitize_line("a\x1b[2J\u202eb\tc é\r".encode()) == "a\\x1b[2J\\u202eb\tc é"
    assert sanitize_line(b"\xff") == "�"
    assert sanitize_line(b"z" * 600) == "z" * 500 + " ... (100 more characters)"


@pytest.mark.extended
def test_too_many_failures_are_an_error_with_the_first_traceback_and_the_pool_stays_usable(tmp_path):
    responses = ["good"] * 7 + ["raise"] * 3
    with reward_pool(tmp_path, SEQUENTIAL, max_failed_fraction=0.3) as pool:
        assert len(pool.score(requests(*responses))) == 10
    with reward_pool(tmp_path, SEQUENTIAL, num_workers=2, timeout_seconds=0.5, max_failed_fraction=0.29) as pool:
        with pytest.raises(RewardError) as caught:
            pool.score(requests(*responses))
        with pytest.raises(RewardError, match=r"\(0 failed, 1 timed out"):
            pool.score(requests("loop", "loop", "good"))
        assert [score.overall for score in pool.score(requests("good", "best"))] == [4.0, 4.0]
    error = str(caught.value)
    assert "reward.py could not score 3 of 10 completions, and worker.reward.max_failed_fraction allows 2" in error
    assert "(3 failed, 0 timed out" in error
    assert 'raise KeyError("no such\\nstep")' in error


def test_a_wrong_return_value_is_told_in_one_line_without_frames_of_the_worker(tmp_path):
    function = "def main(response, ground_truth): return None"
    with reward_pool(tmp_path, function, max_failed_fraction=0.0) as pool, pytest.raises(RewardError) as caught:
        pool.score(requests("good"))
    assert str(caught.value).endswith("returned None, expected a number, or a dict with 'overall'")
    assert "\n" not in str(caught.value)


def test_values_that_json_cannot_represent_are_reported_and_long_ones_are_scored(tmp_path, caplog):
    with reward_pool(tmp_path, BATCH) as pool:
        for _ in range(2):
            assert pool.score(requests("good", row={"sound": b"\x00"}))[0].overall == 4.0
        assert caplog.text.count("column 'sound' of the dataset") == 1
        assert "ground truth b'' (a bytes) cannot" in pool.score(requests("good", ground_truth=b""))[0].error
        assert "bytes" in pool.score(requests("é" * 3_000_000))[0].error
        assert pool.score(requests("é" * 1_000_000))[0].overall == 1_000_000.0


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        ("def mian(reward_inputs): ...", {}, "did you mean mian?"),
        ("def main(reward_inputs, weight=1): ...", {"wieght": 2}, "did you mean weight?"),
        ("print('about to end')\nimport os\nos._exit(5)", {}, "exited with code 5 while loading\nabout to end"),
    ],
)
def test_an_unusable_function_is_an_error_before_anything_is_scored(tmp_path, text, kwargs, message):
    with reward_pool(tmp_path, text, kwargs=kwargs) as pool:
        for use in (pool.ready, lambda: pool.score(requests("good"))):
            with pytest.raises(RewardError) as caught:
                use()
            assert message in str(caught.value)


@pytest.mark.extended
def test_a_check_on_dummy_completions_raises_what_is_wrong(tmp_path):
    main = "def main(predict_str, ground_truth):\n    return misbehave(ground_truth)\n"
    with reward_pool(tmp_path, MISBEHAVE + main, timeout_seconds=0.5) as pool:
        for ground_truth, message in {
            "raise": r"KeyError: 'no such.*step' \(reward.py:10\).* raise KeyError",
            "bare": "returned a dict without 'overall'",
            "exit": "its worker exited with code 3",
            "loop": "no score within 0.5 s",
        }.items():
            with pytest.raises(RewardError, match=rf"(?s)main.* no score for the first row.*{message}"):
                pool.check(requests("a", "bc", ground_truth=ground_truth), described="the first row")
        pool.check(requests("a", "bc", ground_truth="good"), described="the first row")


@pytest.mark.extended
@BOTH
def test_timeouts_of_several_groups_in_a_row_stop_the_scoring(tmp_path, text):
    with reward_pool(tmp_path, text, timeout_seconds=0.2) as pool:
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"reward.py timed out for 5 completions in a row .*timeout_seconds=0\.2"):
            pool.score(requests(*["loop"] * 200))  # all of them may fail, and would take 40 s
        assert time.monotonic() - started < 20


def test_close_kills_all_processes_and_closes_all_files(tmp_path):
    text = """
import os, subprocess
def main(reward_input):
    subprocess.Popen(["sleep", "60"])
    return 1.0
"""
    before = set(os.listdir("/proc/self/fd"))
    with reward_pool(tmp_path, text) as pool:
        assert pool.score(requests("a"))[0].overall == 1.0
        [worker] = pool._children
        pids = [worker.pid, *descendants(worker.pid)]
        assert all(is_running(pid) for pid in pids)
        assert len(pids) >= 3  # the supervisor, the worker and what it started
    assert not any(is_running(pid) for pid in pids)
    assert set(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(RewardError, match="the reward pool is closed"):
        pool.score(requests("good"))


def test_workers_get_the_variables_that_are_allowed_or_named_and_an_error_names_the_option(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "SLACK_WEBHOOK_URL", "JUDGE_MODEL", "LC_TIME"):
        monkeypatch.setenv(name, "x")
    text = """
import os
def main(reward_input):
    return {"overall": 0} | {name: name in os.environ for name in
                             ("HF_TOKEN", "SLACK_WEBHOOK_URL", "JUDGE_MODEL", "LC_TIME", "PATH")}
"""
    parts = {"overall": 0, "HF_TOKEN": 0, "SLACK_WEBHOOK_URL": 0, "JUDGE_MODEL": 1, "LC_TIME": 1, "PATH": 1}
    with reward_pool(tmp_path, text, passed_variables=["JUDGE_MODEL"]) as pool:
        assert pool.score(requests("a"))[0].parts == parts
    for text in (
        "import os\nKEY = os.environ['HF_TOKEN']\ndef main(reward_input): return 1.0",
        "import os\ndef main(reward_input): return len(os.environ['HF_TOKEN'])",
    ):
        with (
            reward_pool(tmp_path, text) as pool,
            pytest.raises(RewardError, match=r"worker\.reward\.env=\[HF_TOKEN\]"),
        ):
            pool.check(requests("a"), described="a row")
