"""The pool with real processes: all contracts, order, and answers that cost themselves and nobody else."""

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
from trigon.rewards.process import MAX_OUTPUT_BYTES, child_environment, harmless
from trigon.rewards.verifiers import math as math_verifier

# Grades "good" answers with their length and misbehaves where an answer asks for it.
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
        case "deluge":
            os.write(1, b"x" * 99 + b"\\n" + b"y" * 200_000)
            return {"overall": 5.0}
    return {"overall": float(len(response)), "half": len(response) / 2}
"""
SEQUENTIAL = (
    MISBEHAVE
    + """
REWARD_TYPE = "sequential"
def main(answer):
    return misbehave(answer["response"])
"""
)
BATCH = (
    MISBEHAVE
    + """
REWARD_TYPE = "batch"
def main(answers):
    responses = [answer["response"] for answer in answers]
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

    def make(text, *, function="main", num_workers=1, timeout_seconds=20.0, max_failed_fraction=1.0, **kwargs):
        (tmp_path / "grade.py").write_text(text)
        pools.append(
            RewardPool(
                f"{tmp_path}/grade.py:{function}",
                kwargs=kwargs,
                num_workers=num_workers,
                timeout_seconds=timeout_seconds,
                max_failed_fraction=max_failed_fraction,
            )
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_scores_come_in_order_from_several_workers(pool_of):
    text = "import time\nREWARD_TYPE = 'sequential'\ndef main(a):\n  n = int(a['response']); time.sleep(n % 3 / 500); "
    pool = pool_of(text + "return {'overall': n}", num_workers=2)
    assert [score.overall for score in pool.score(requests(*map(str, range(100))))] == [*map(float, range(100))]


def test_no_answers_have_no_scores(pool_of):
    assert pool_of(BATCH).score([]) == []


def test_the_shipped_verifier_gives_what_a_direct_call_gives_from_any_thread():
    responses = [rf"<think>a</think>\boxed{{{n}}}" for n in range(40)] + ["", "é" * 10, "4", r"\boxed{4}"]
    direct = [math_verifier.compute_score({"response": r, "ground_truth": "4"}, format_weight=0.3) for r in responses]
    pool = RewardPool("math", kwargs={"format_weight": 0.3}, num_workers=1, timeout_seconds=20, max_failed_fraction=0)
    with closing(pool):
        scores = pool.score(requests(*responses))
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.extend(pool.score(requests(*responses))))
        thread.start()
        thread.join()
    assert [score.parts for score in scores] == direct
    assert [score.overall for score in scores] == [parts["overall"] for parts in direct]
    assert {(score.outcome, score.error) for score in scores} == {("ok", "")}
    assert elsewhere == scores


def test_a_function_sees_the_whole_answer(pool_of):
    text = """
REWARD_TYPE = "sequential"
def main(answer):
    expected = {"response": "\U0001f600", "response_length": 7, "ground_truth": {"a": [1, None]}, "prompt": "why?",
                "finish_reason": "length", "row": {"id": 12, "choices": ["x", "é"]}}
    return {"overall": answer == expected}
"""
    request = RewardRequest("\U0001f600", 7, {"a": [1, None]}, "why?", "length", {"id": 12, "choices": ["x", "é"]})
    assert pool_of(text).score([request])[0].overall == 1.0


def test_an_answer_of_a_megabyte_is_scored(pool_of):
    assert pool_of(BATCH).score(requests("é" * 1_000_000))[0].overall == 1_000_000.0


@pytest.mark.parametrize(
    ("returned", "parts"), [("1", {"overall": 1.0}), ("{'overall': 1, 'b': 2}", {"overall": 1.0, "b": 2.0})]
)
def test_the_legacy_contract_takes_numbers_and_dicts(pool_of, returned, parts):
    text = "def compute_score(predict_str, ground_truth, w=0):\n  if (predict_str, ground_truth, w) == ('a', '4', 5):"
    pool = pool_of(f"{text}\n    return {returned}", function="compute_score", w=5)
    assert pool.score(requests("a"))[0].parts == parts


def test_graders_that_use_alarms_work(pool_of):
    text = """
import signal, time
class Late(Exception): ...
def ring(*_): raise Late
def main(reward_input):
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(10)
    except Late:
        return {"overall": 1}
"""
    assert pool_of(text).score(requests("a"))[0].overall == 1.0


@pytest.mark.parametrize("text", [SEQUENTIAL, BATCH], ids=["sequential", "batch"])
def test_each_bad_answer_costs_itself(pool_of, text):
    bad = {
        "raise": r"KeyError: 'no such\nstep' (grade.py:10)",
        "exit": "its worker exited with code 3",
        "leave": "SystemExit: 4 (grade.py:14)",
        "nan": "returned nan under 'overall' where a finite number is due",
        "none": "returned None where a dict with 'overall' is due",
        "text": "returned '1.0' where a dict with 'overall' is due",
        "bare": "returned a dict without 'overall': {'accuracy': 1.0}",
    }
    responses = [one for name in bad for one in (name, "good", "better")]
    scores = pool_of(text, num_workers=2).score(requests(*responses))
    for response, score in zip(responses, scores, strict=True):
        if response in bad:
            assert (score.outcome, score.overall, score.parts, score.error) == ("failed", 0.0, {}, bad[response])
        else:
            assert (score.outcome, score.parts) == ("ok", {"overall": len(response), "half": len(response) / 2})


@pytest.mark.parametrize("text", [SEQUENTIAL, BATCH], ids=["sequential", "batch"])
def test_a_hung_answer_costs_itself(pool_of, text, caplog):
    scores = pool_of(text, timeout_seconds=0.5).score(requests("good", "loop", "better", "best"))
    assert [score.outcome for score in scores] == ["ok", "timeout", "ok", "ok"]
    assert [score.overall for score in scores] == [4.0, 0.0, 6.0, 4.0]
    assert scores[1].error == "no score within 0.5 s; its worker was killed"
    assert re.search('grade.py", line [78] in misbehave', caplog.text)  # where it hung


def test_a_time_limit_is_for_each_answer_not_for_the_chunk(pool_of):
    text = "import time\ndef main(reward_input):\n  time.sleep(0.15)\n  return {'overall': 1}"
    scores = pool_of(text, timeout_seconds=0.3).score(requests(*"abcdefghijkl"))  # in chunks of three
    assert {score.outcome for score in scores} == {"ok"}


@pytest.mark.parametrize(
    ("response", "error"),
    [("short", "returned 0 replies to 1 answers"), ("number", "returned 1.0 where a list of 1 dicts is due")],
)
def test_a_batch_of_the_wrong_length_is_taken_apart(pool_of, response, error):
    scores = pool_of(BATCH).score(requests("good", response, "better", "best"))
    assert [score.overall for score in scores] == [4.0, 0.0, 6.0, 4.0]
    assert scores[1].error.startswith(error)


def test_what_a_function_prints_is_shown_harmlessly_and_disturbs_nothing(pool_of, caplog):
    with caplog.at_level(logging.WARNING):
        scores = pool_of(BATCH, timeout_seconds=1.0).score(requests("good", "noise", "better"))
        pool_of(BATCH).score(requests("deluge"))
    assert [score.overall for score in scores] == [4.0, 5.0, 6.0]
    assert "[reward 0] �[31mnoise " in caplog.messages
    for line in ("[[{}", "more noise", "and more", "x" * 99):
        assert f"[reward 0] {line}" in caplog.messages
    assert f"[reward 0] ... more than {MAX_OUTPUT_BYTES} bytes printed; the rest is not shown" in caplog.messages


def test_too_many_failures_stop_with_the_first_traceback(pool_of):
    responses = ["good"] * 7 + ["raise"] * 3
    assert len(pool_of(SEQUENTIAL, max_failed_fraction=0.3).score(requests(*responses))) == 10
    with pytest.raises(RewardError) as stop:
        pool_of(SEQUENTIAL, max_failed_fraction=0.29).score(requests(*responses))
    message = str(stop.value)
    assert "grade.py could not score 3 of 10 answers, and worker.reward.max_failed_fraction allows 2" in message
    assert "(3 failed, 0 ran out of time" in message
    assert 'raise KeyError("no such\\nstep")' in message


def test_a_pool_that_stopped_scores_on(pool_of):
    pool = pool_of(BATCH, num_workers=2, timeout_seconds=0.5, max_failed_fraction=0.1)
    with pytest.raises(RewardError, match=r"\(0 failed, 1 ran out of time"):
        pool.score(requests("loop", "loop", "good"))
    assert [score.overall for score in pool.score(requests("good", "best"))] == [4.0, 4.0]


def test_what_cannot_be_handed_over_is_said(pool_of):
    pool = pool_of(BATCH)
    with pytest.warns(UserWarning, match="column 'sound' of the dataset"):
        assert pool.score(requests("good", row={"sound": b"\x00"}))[0].overall == 4.0
    assert pool.score(requests("good", row={"sound": b"\x00"}))[0].overall == 4.0  # said once
    assert "ground truth b'' (a bytes) cannot" in pool.score(requests("good", ground_truth=b""))[0].error
    assert "bytes" in pool.score(requests("é" * 3_000_000))[0].error


@pytest.mark.parametrize(
    ("text", "kwargs", "complaint"),
    [
        ("def mian(answers): ...", {}, "did you mean 'mian'?"),
        ("def main(answers", {}, "SyntaxError"),
        ("REWARD_TYPE = 'function'\ndef main(answers): ...", {}, "REWARD_TYPE is 'function'"),
        ("def main(answers, weight=1): ...", {"wieght": 2}, "did you mean 'weight'?"),
        ("def main(reward_inputs, weight): ...", {}, "missing a required argument: 'weight'"),
        ("print('about to end')\nimport os\nos._exit(5)", {}, "exited with code 5, while it loaded\nabout to end"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_scored(pool_of, text, kwargs, complaint):
    pool = pool_of(text, **kwargs)
    for use in (pool.ready, lambda: pool.score(requests("good"))):
        with pytest.raises(RewardError) as refusal:
            use()
        assert complaint in str(refusal.value)


def test_a_missing_file_and_unportable_arguments_are_refused_at_once(pool_of):
    with pytest.raises(RewardError, match="there is no file"):
        RewardPool("nowhere.py:main", kwargs={}, num_workers=1, timeout_seconds=1, max_failed_fraction=0)
    with pytest.raises(RewardError, match="cannot be handed to another process"):
        pool_of(BATCH, weight={1, 2})


def test_a_closed_pool_says_so(pool_of):
    pool = pool_of(BATCH)
    pool.close()
    with pytest.raises(RewardError, match="the reward pool is closed"):
        pool.score(requests("good"))


def test_secrets_stay_out_of_the_workers(pool_of, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_123")
    monkeypatch.setenv("HARMLESS_SETTING", "1")
    text = """
import os
def main(reward_input):
    return {"overall": 0, "secret": "HF_TOKEN" in os.environ, "setting": "HARMLESS_SETTING" in os.environ}
"""
    assert pool_of(text).score(requests("a"))[0].parts == {"overall": 0.0, "secret": 0.0, "setting": 1.0}


def test_what_looks_like_a_secret_is_taken_out_of_the_environment():
    kept = {"PATH": "/bin", "HF_HOME": "/cache", "TOKENIZERS_PARALLELISM": "false", "HTTP_PROXY": "http://proxy:1"}
    secret = [
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "WANDB_BASE_URL",
        "AWS_PROFILE",
        "DB_PASSWORD",
        "my_secret",
        "SSH_AUTH_SOCK",
    ]
    secrets = dict.fromkeys(secret, "x") | {"DATABASE_URL": "postgres://me:pw@host/db"}
    ours = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert child_environment(kept | secrets) == kept | ours


def test_lines_for_the_terminal_are_harmless():
    assert harmless("a\x1b[2J\u202eb\tc é\r".encode()) == "a�[2J�b\tc é"
    assert harmless(b"\xff") == "�"
    assert harmless(b"z" * 600) == "z" * 500 + " ... (600 characters)"


def test_a_closed_pool_leaves_no_process(pool_of):
    text = """
import os, subprocess
def main(reward_input):
    return {"overall": os.getpid(), "child": subprocess.Popen(["sleep", "60"]).pid}
"""
    pool = pool_of(text)
    parts = pool.score(requests("a"))[0].parts
    assert all(is_running(int(pid)) for pid in parts.values())
    pool.close()
    assert not is_running(int(parts["overall"]))
    while is_running(int(parts["child"])):  # killed, too, but not ours to wait for: the test's time limit ends this
        time.sleep(0.01)
