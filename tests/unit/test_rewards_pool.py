"""RewardPool with real processes: contracts, order, and failures of single completions."""

import logging
import re
import threading
import time
from contextlib import closing

import pytest

from support.processes import is_running
from trigon.errors import RewardError
from trigon.rewards.contract import RewardRequest
from trigon.rewards.pool import RewardPool
from trigon.rewards.verifiers import math as math_verifier
from trigon.system.child import MAX_OUTPUT_BYTES, sanitize_line
from trigon.system.child_variables import child_environment
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
        case "none":
            return None
        case "text":
            return "1.0"
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


def requests(*responses, **changes):
    fields = {"response_length": 3, "ground_truth": "4", "prompt": "?", "finish_reason": "stop", "row": {}}
    return [RewardRequest(response=response, **(fields | changes)) for response in responses]


@pytest.fixture
def pool_of(tmp_path):
    """Return a function that makes a pool from a reward file's text, closed when the test ends."""
    pools = []

    def make(
        text,
        *,
        function="main",
        num_workers=1,
        timeout_seconds=20.0,
        max_failed_fraction=1.0,
        passed_variables=(),
        **kwargs,
    ):
        (tmp_path / "reward.py").write_text(text)
        pools.append(
            RewardPool(
                f"{tmp_path}/reward.py:{function}",
                kwargs=kwargs,
                num_workers=num_workers,
                timeout_seconds=timeout_seconds,
                max_failed_fraction=max_failed_fraction,
                passed_variables=passed_variables,
            )
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_scores_of_several_workers_are_in_the_order_of_requests(pool_of):
    text = "import time\nREWARD_TYPE = 'sequential'\ndef main(a):\n  n = int(a['response']); time.sleep(n % 3 / 500); "
    pool = pool_of(text + "return {'overall': n}", num_workers=2)
    assert [score.overall for score in pool.score(requests(*map(str, range(100))))] == [*map(float, range(100))]


def test_no_requests_give_no_scores(pool_of):
    assert pool_of(BATCH).score([]) == []


def test_a_shipped_verifier_returns_what_a_direct_call_returns_from_any_thread():
    responses = [rf"<think>a</think>\boxed{{{n}}}" for n in range(40)] + ["", "é" * 10, "4", r"\boxed{4}"]
    direct = [math_verifier.compute_score({"response": r, "ground_truth": "4"}, format_weight=0.3) for r in responses]
    pool = RewardPool("math", kwargs={"format_weight": 0.3}, num_workers=1, timeout_seconds=20, max_failed_fraction=0)
    with closing(pool):
        scores = pool.score(requests(*responses))
        from_thread = []
        thread = threading.Thread(target=lambda: from_thread.extend(pool.score(requests(*responses))))
        thread.start()
        thread.join()
    assert [score.parts for score in scores] == direct
    assert [score.overall for score in scores] == [parts["overall"] for parts in direct]
    assert {(score.outcome, score.error) for score in scores} == {("ok", "")}
    assert from_thread == scores


def test_a_function_receives_all_fields_of_the_request(pool_of):
    text = """
REWARD_TYPE = "sequential"
def main(reward_input):
    expected = {"response": "\U0001f600", "response_length": 7, "ground_truth": {"a": [1, None]}, "prompt": "why?",
                "finish_reason": "length", "row": {"id": 12, "choices": ["x", "é"]}, "turns": [], "image_sizes": []}
    return {"overall": reward_input == expected}
"""
    request = RewardRequest("\U0001f600", 7, {"a": [1, None]}, "why?", "length", {"id": 12, "choices": ["x", "é"]})
    assert pool_of(text).score([request])[0].overall == 1.0


def test_a_completion_of_a_megabyte_is_scored(pool_of):
    assert pool_of(BATCH).score(requests("é" * 1_000_000))[0].overall == 1_000_000.0


@pytest.mark.parametrize(
    ("returned", "parts"), [("1", {"overall": 1.0}), ("{'overall': 1, 'b': 2}", {"overall": 1.0, "b": 2.0})]
)
def test_the_legacy_contract_accepts_numbers_and_dicts(pool_of, returned, parts):
    text = "def compute_score(predict_str, ground_truth, w=0):\n  if (predict_str, ground_truth, w) == ('a', '4', 5):"
    pool = pool_of(f"{text}\n    return {returned}", function="compute_score", w=5)
    assert pool.score(requests("a"))[0].parts == parts


def test_a_function_may_use_signal_alarms(pool_of):
    text = """
import signal, time
class Late(Exception): ...
def on_alarm(*_): raise Late
def main(reward_input):
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(10)
    except Late:
        return {"overall": 1}
"""
    assert pool_of(text).score(requests("a"))[0].overall == 1.0


@pytest.mark.parametrize("text", [SEQUENTIAL, BATCH], ids=["sequential", "batch"])
def test_only_the_completion_that_fails_gets_no_score(pool_of, text):
    bad = {
        "raise": r"KeyError: 'no such\nstep' (reward.py:10)",
        "exit": "its worker exited with code 3",
        "leave": "SystemExit: 4 (reward.py:14)",
        "nan": "returned nan for 'overall', expected a finite number",
        "none": "returned None, expected a number, or a dict with 'overall'",
        "text": "returned '1.0', expected a number, or a dict with 'overall'",
        "bare": "returned a dict without 'overall': {'accuracy': 1.0}",
    }
    responses = [response for name in bad for response in (name, "good", "better")]
    scores = pool_of(text, num_workers=2).score(requests(*responses))
    for response, score in zip(responses, scores, strict=True):
        if response in bad:
            assert (score.outcome, score.overall, score.parts, score.error) == ("failed", 0.0, {}, bad[response])
        else:
            assert (score.outcome, score.parts) == ("ok", {"overall": len(response), "half": len(response) / 2})


@pytest.mark.parametrize("text", [SEQUENTIAL, BATCH], ids=["sequential", "batch"])
def test_only_the_completion_that_hangs_times_out(pool_of, text, caplog):
    scores = pool_of(text, timeout_seconds=0.5).score(requests("good", "loop", "better", "best"))
    assert [score.outcome for score in scores] == ["ok", "timeout", "ok", "ok"]
    assert [score.overall for score in scores] == [4.0, 0.0, 6.0, 4.0]
    assert scores[1].error == "no score within 0.5 s; its worker was killed"
    assert re.search('reward.py", line [78] in misbehave', caplog.text)  # where it hung


def test_the_time_limit_is_for_each_completion_rather_than_the_chunk(pool_of):
    text = "import time\ndef main(reward_input):\n  time.sleep(0.15)\n  return {'overall': 1}"
    scores = pool_of(text, timeout_seconds=0.3).score(requests(*"abcdefghijkl"))  # in chunks of three
    assert {score.outcome for score in scores} == {"ok"}


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("short", "returned a list of 3 for 4 completions; scored again alone: returned a list of 0 for 1 completions"),
        ("number", "returned 1.0, expected a list of 4 dicts; scored again alone: returned 1.0, expected a list of 1 "),
    ],
)
def test_a_chunk_with_a_list_of_the_wrong_length_is_retried_singly(pool_of, response, error):
    scores = pool_of(BATCH).score(requests("good", response, *["better"] * 14))  # in chunks of four
    assert [score.overall for score in scores] == [4.0, 0.0, *[6.0] * 14]
    assert scores[1].error.startswith(error)


def test_output_of_the_function_is_logged_safely_and_does_not_affect_scores(pool_of, caplog):
    with caplog.at_level(logging.WARNING):
        scores = pool_of(BATCH, timeout_seconds=1.0).score(requests("good", "noise", "better"))
        pool_of(BATCH).score(requests("flood"))
    assert [score.overall for score in scores] == [4.0, 5.0, 6.0]
    assert r"[reward 0] \x1b[31mnoise " in caplog.messages
    for line in ("[[{}", "more noise", "and more", "x" * 99):
        assert f"[reward 0] {line}" in caplog.messages
    assert f"[reward 0] ... more than {MAX_OUTPUT_BYTES} bytes printed; the rest is not logged" in caplog.messages


def test_too_many_failures_are_an_error_with_the_first_traceback(pool_of):
    responses = ["good"] * 7 + ["raise"] * 3
    assert len(pool_of(SEQUENTIAL, max_failed_fraction=0.3).score(requests(*responses))) == 10
    with pytest.raises(RewardError) as caught:
        pool_of(SEQUENTIAL, max_failed_fraction=0.29).score(requests(*responses))
    error = str(caught.value)
    assert "reward.py could not score 3 of 10 completions, and worker.reward.max_failed_fraction allows 2" in error
    assert "(3 failed, 0 timed out" in error
    assert 'raise KeyError("no such\\nstep")' in error


def test_a_pool_is_usable_after_too_many_failures(pool_of):
    pool = pool_of(BATCH, num_workers=2, timeout_seconds=0.5, max_failed_fraction=0.1)
    with pytest.raises(RewardError, match=r"\(0 failed, 1 timed out"):
        pool.score(requests("loop", "loop", "good"))
    assert [score.overall for score in pool.score(requests("good", "best"))] == [4.0, 4.0]


def test_values_that_json_cannot_represent_are_reported(pool_of):
    pool = pool_of(BATCH)
    with pytest.warns(UserWarning, match="column 'sound' of the dataset"):
        assert pool.score(requests("good", row={"sound": b"\x00"}))[0].overall == 4.0
    assert pool.score(requests("good", row={"sound": b"\x00"}))[0].overall == 4.0  # warned once
    assert "ground truth b'' (a bytes) cannot" in pool.score(requests("good", ground_truth=b""))[0].error
    assert "bytes" in pool.score(requests("é" * 3_000_000))[0].error


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        ("def mian(reward_inputs): ...", {}, "did you mean mian?"),
        ("def main(reward_inputs", {}, "SyntaxError"),
        ("REWARD_TYPE = 'function'\ndef main(reward_inputs): ...", {}, "REWARD_TYPE is 'function'"),
        ("def main(reward_inputs, weight=1): ...", {"wieght": 2}, "did you mean 'weight'?"),
        ("def main(reward_inputs, weight): ...", {}, "missing a required argument: 'weight'"),
        ("print('about to end')\nimport os\nos._exit(5)", {}, "exited with code 5 while loading\nabout to end"),
    ],
)
def test_an_unusable_function_is_an_error_before_anything_is_scored(pool_of, text, kwargs, message):
    pool = pool_of(text, **kwargs)
    for use in (pool.ready, lambda: pool.score(requests("good"))):
        with pytest.raises(RewardError) as caught:
            use()
        assert message in str(caught.value)


CHECKED = {
    "batch": "def compute_score(inputs: list):\n    return [misbehave(single['ground_truth']) for single in inputs]\n",
    "sequential": "def compute_score(reward_input):\n    return misbehave(reward_input['ground_truth'])\n",
    "legacy": "def compute_score(predict_str, ground_truth):\n    return misbehave(ground_truth)\n",
}


@pytest.mark.parametrize("contract", CHECKED)
def test_a_check_on_dummy_completions_raises_what_is_wrong(pool_of, contract):
    pool = pool_of(MISBEHAVE + CHECKED[contract], function="compute_score", timeout_seconds=0.5)
    for ground_truth, message in {
        "raise": r"KeyError: 'no such.*step' \(reward.py:10\).* raise KeyError",
        "none": "returned None",
        "nan": "returned nan for 'overall', expected a finite number",
        "bare": "returned a dict without 'overall'",
        "exit": "its worker exited with code 3",
        "loop": "no score within 0.5 s",
    }.items():
        with pytest.raises(RewardError, match=rf"(?s)compute_score.* no score for the first row.*{message}"):
            pool.check(requests("a", "bc", ground_truth=ground_truth), described="the first row")
    pool.check(requests("a", "bc", ground_truth="good"), described="the first row")


@pytest.mark.parametrize("returned", ["scores[1:]", "scores + scores", "scores[0]"])
def test_a_check_raises_for_the_wrong_number_of_results(pool_of, returned):
    text = f"def main(reward_inputs):\n  scores = [{{'overall': 1}} for _ in reward_inputs]\n  return {returned}"
    with pytest.raises(RewardError, match=r"no score for the first row.*: returned .*; scored again alone: returned "):
        pool_of(text).check(requests("a", "bc"), described="the first row")


@pytest.mark.parametrize("text", [SEQUENTIAL, BATCH], ids=["sequential", "batch"])
def test_timeouts_of_several_groups_in_a_row_stop_the_scoring(pool_of, text):
    pool = pool_of(text, timeout_seconds=0.2)
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"reward.py timed out for 5 completions in a row .*timeout_seconds=0\.2 s"):
        pool.score(requests(*["loop"] * 200))  # all of them may fail, and would take 40 s
    assert time.monotonic() - started < 20


@pytest.mark.extended
def test_timeouts_with_a_score_in_between_do_not_stop_the_scoring(pool_of):
    scores = pool_of(SEQUENTIAL, timeout_seconds=0.5).score(requests(*["loop"] * 4, "good", *["loop"] * 2))
    assert [score.outcome for score in scores] == [*["timeout"] * 4, "ok", *["timeout"] * 2]


@pytest.mark.extended
def test_timeouts_of_one_group_do_not_stop_the_scoring(pool_of):
    pool = pool_of(SEQUENTIAL, timeout_seconds=0.5)
    with pool.scoring(num_completions=7) as scoring:
        scoring.add(0, requests(*["loop"] * 6))
        scoring.add(6, requests("good"))
        assert [score.outcome for score in scoring.result()] == ["timeout"] * 6 + ["ok"]


def test_a_missing_file_and_arguments_that_json_cannot_represent_are_immediate_errors(pool_of):
    with pytest.raises(RewardError, match="there is no file"):
        RewardPool("nowhere.py:main", kwargs={}, num_workers=1, timeout_seconds=1, max_failed_fraction=0)
    with pytest.raises(RewardError, match="cannot be sent to another process"):
        pool_of(BATCH, weight={1, 2})


def test_a_closed_pool_cannot_be_used(pool_of):
    pool = pool_of(BATCH)
    pool.close()
    with pytest.raises(RewardError, match="the reward pool is closed"):
        pool.score(requests("good"))


def test_workers_get_the_variables_that_are_allowed_or_named(pool_of, monkeypatch):
    for name in ("HF_TOKEN", "SLACK_WEBHOOK_URL", "JUDGE_MODEL", "LC_TIME"):
        monkeypatch.setenv(name, "x")
    text = """
import os
def main(reward_input):
    return {"overall": 0} | {name: name in os.environ for name in
                             ("HF_TOKEN", "SLACK_WEBHOOK_URL", "JUDGE_MODEL", "LC_TIME", "PATH")}
"""
    parts = {"overall": 0, "HF_TOKEN": 0, "SLACK_WEBHOOK_URL": 0, "JUDGE_MODEL": 1, "LC_TIME": 1, "PATH": 1}
    assert pool_of(text, passed_variables=["JUDGE_MODEL"]).score(requests("a"))[0].parts == parts


def test_variables_that_a_file_names_and_does_not_get_are_logged(pool_of, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_URL", "http://judge")
    monkeypatch.setenv("JUDGE_MODEL", "large")
    text = """
import os
URL = os.getenv("JUDGE_URL", "http://localhost")
MODEL, HOME, OTHER = os.environ["JUDGE_MODEL"], os.environ['HOME'], os.getenv("NOT_SET")
def main(reward_input): return 1.0
"""
    pool_of(text, passed_variables=["JUDGE_MODEL"])
    [message] = caplog.messages
    assert message.endswith(
        "reward.py names environment variables that reward workers do not get: JUDGE_URL; "
        "worker.reward.env=[JUDGE_URL] passes them"
    )


@pytest.mark.parametrize(
    "text",
    [
        "import os\nKEY = os.environ['OPENAI_API_KEY']\ndef main(reward_input): return {'overall': len(KEY)}",
        "import os\ndef main(reward_input): return {'overall': len(os.environ['OPENAI_API_KEY'])}",
        "import os\ndef main(reward_input):\n  if key := os.getenv('OPENAI_API_KEY'): return {'overall': len(key)}\n"
        "  raise ValueError('set the OPENAI_API_KEY variable')",
    ],
    ids=["loading", "calling", "other error"],
)
def test_an_error_about_a_withheld_variable_names_the_option_that_passes_it(pool_of, monkeypatch, text):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-123")
    with pytest.raises(RewardError, match=r"others are withheld; worker\.reward\.env=\[OPENAI_API_KEY\]"):
        pool_of(text).check(requests("a"), described="a row")
    assert pool_of(text, passed_variables=["OPENAI_API_KEY"]).score(requests("a"))[0].overall == 6.0


def test_a_secret_that_is_not_set_is_named(pool_of, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    text = "import os\ndef main(reward_input): return {'overall': len(os.environ['OPENAI_API_KEY'])}"
    with pytest.raises(RewardError, match=r"worker\.reward\.env=\[OPENAI_API_KEY\]"):
        pool_of(text).check(requests("a"), described="a row")
    with pytest.raises(RewardError, match=r"worker\.reward\.env names OPENAI_API_KEY, which is not set"):
        pool_of(text, passed_variables=["OPENAI_API_KEY"])


@pytest.mark.faults
def test_the_environment_is_a_list_of_what_is_allowed():
    kept = {
        "PATH": "/bin",
        "HF_HOME": "/cache",
        "TOKENIZERS_PARALLELISM": "false",
        "HTTP_PROXY": "http://proxy:1",
        "https_proxy": "proxy:1",
        "LANG": "de_DE@euro",
        "OPENAI_BASE_URL": "http://judge/v1",
    }
    withheld = {
        "HF_TOKEN": "hf_x",
        "OPENAI_API_KEY": "sk-x",
        "AWS_PROFILE": "x",
        "WANDB_BASE_URL": "http://wandb",
        "PGPASSWORD": "x",
        "SLACK_WEBHOOK_URL": "https://hooks.slack.com/services/x",
        "DATABASE_URL": "postgres://db",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "ANYTHING_ELSE": "x",
        "http_proxy": "http://me:pw@proxy:1",
        "ALL_PROXY": "me:pw@proxy:1",
        "HF_ENDPOINT": "https://token@mirror",
    }
    added = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert child_environment(kept | withheld) == kept | added
    passed = child_environment(kept | withheld, ["HF_TOKEN", "http_proxy"])
    assert passed == kept | added | {"HF_TOKEN": "hf_x", "http_proxy": "http://me:pw@proxy:1"}


def test_printed_lines_are_sanitized():
    assert sanitize_line("a\x1b[2J\u202eb\tc é\r".encode()) == "a\\x1b[2J\\u202eb\tc é"
    assert sanitize_line(b"\xff") == "�"
    assert sanitize_line(b"z" * 600) == "z" * 500 + " ... (100 more characters)"


def test_close_kills_all_processes(pool_of):
    text = """
import os, subprocess
def main(reward_input):
    subprocess.Popen(["sleep", "60"])
    return 1.0
"""
    pool = pool_of(text)
    assert pool.score(requests("a"))[0].overall == 1.0
    [worker] = pool._children
    pids = [worker.pid, *descendants(worker.pid)]
    assert all(is_running(pid) for pid in pids)
    assert len(pids) >= 3  # the supervisor, the worker and what it started
    pool.close()
    assert not any(is_running(pid) for pid in pids)
