"""Graders at their worst, in real processes: what they do to themselves must not reach the run, or the machine."""

import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from support.processes import is_running
from trigon.errors import RewardError
from trigon.rewards.contract import RewardRequest
from trigon.rewards.pool import RewardPool

pytestmark = pytest.mark.alone

GRADER = """
import ctypes, os, signal, sys, threading, time

REWARD_TYPE = {reward_type!r}

def one(answer):
    match answer["response"]:
        case "hang in C":
            return {{"overall": 7 ** (10**9) % 2}}  # holds the interpreter lock, hears no Python signal handler
        case "segfault":
            ctypes.string_at(0)
        case "eat memory":
            return {{"overall": len(bytearray(64 << 30))}}
        case "endless recursion":
            return one(answer)
        case "kill yourself":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop yourself":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "ignore signals and sleep":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGABRT):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(1000)
        case "close everything":
            os.closerange(0, 1000)
        case "leave a child and die":  # the child holds the worker's channel open
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(7)
        case "leave a thread":
            threading.Thread(target=time.sleep, args=(1000,)).start()
        case "write nonsense into the channel":
            for fd in range(3, 1000):
                try:
                    os.write(fd, b"nonsense\\n")
                except OSError:
                    pass
        case "claim to be somebody else":
            for fd in range(3, 1000):
                try:
                    os.write(fd, b'{{"parts": {{"overall": NaN}}}}\\n')
                except OSError:
                    pass
    return {{"overall": float(len(answer["response"]))}}

def compute_score(reward_input):
    return one(reward_input) if REWARD_TYPE == "sequential" else [one(answer) for answer in reward_input]
"""

BAD = {
    "hang in C": ("timeout", "no score within 1 s; its worker was killed"),
    "segfault": ("failed", "its worker died of signal 11 (Segmentation fault)"),
    "eat memory": ("failed", "MemoryError (grade.py:13)"),
    "endless recursion": ("failed", "RecursionError: maximum recursion depth exceeded"),
    "kill yourself": ("failed", "its worker was killed by the system, perhaps for want of memory"),
    "stop yourself": ("timeout", "no score within 1 s; its worker was killed"),
    "ignore signals and sleep": ("timeout", "no score within 1 s; its worker was killed"),
    "close everything": ("failed", "its worker"),
    "leave a child and die": ("failed", "its worker exited with code 7"),
}


def requests(*responses):
    return [RewardRequest(response, 1, "4", "?", "stop", {}) for response in responses]


def pool_of(folder, text, *, num_workers=2, timeout_seconds=1.0):
    (folder / "grade.py").write_text(text)
    spec = f"{folder}/grade.py:compute_score"
    return closing(
        RewardPool(spec, kwargs={}, num_workers=num_workers, timeout_seconds=timeout_seconds, max_failed_fraction=1.0)
    )


@pytest.mark.parametrize("reward_type", ["sequential", "batch"])
def test_the_worst_answers_cost_themselves_only(tmp_path, reward_type):
    responses = [one for index, bad in enumerate(BAD) for one in ("x" * index, bad, "y" * index)]
    with pool_of(tmp_path, GRADER.format(reward_type=reward_type)) as pool:
        scores = pool.score(requests(*responses))
    for response, score in zip(responses, scores, strict=True):
        if response in BAD:
            outcome, error = BAD[response]
            assert score.outcome == outcome, (response, score)
            assert score.error.startswith(error), (response, score)
        else:
            assert (score.outcome, score.overall) == ("ok", float(len(response))), (response, score)


@pytest.mark.parametrize("lie", ["write nonsense into the channel", "claim to be somebody else"])
def test_a_liar_gets_no_score_and_spoils_nobody_elses(tmp_path, lie):
    with pool_of(tmp_path, GRADER.format(reward_type="sequential"), num_workers=1) as pool:
        scores = pool.score(requests("a", lie))
        assert [score.outcome for score in scores] == ["ok", "failed"]
        assert [score.overall for score in pool.score(requests("aa", "bbb"))] == [2.0, 3.0]


def test_a_thread_left_behind_holds_nothing_up(tmp_path):
    with pool_of(tmp_path, GRADER.format(reward_type="sequential")) as pool:
        assert [score.overall for score in pool.score(requests("leave a thread", "a"))] == [14.0, 1.0]


def test_a_slow_batch_function_is_asked_in_smaller_chunks_until_it_fits(tmp_path):
    text = """
import time
REWARD_TYPE = "batch"
def compute_score(answers):
    time.sleep(0.15 * len(answers))
    return [{"overall": 1, "asked": len(answers)} for _ in answers]
"""
    with pool_of(tmp_path, text, num_workers=1, timeout_seconds=0.5) as pool:
        scores = pool.score(requests(*"abcdefghijklmnopqrst"))  # in chunks of five at first
        assert {score.outcome for score in scores} == {"ok"}


def test_a_file_that_hangs_while_it_is_loaded_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("trigon.rewards.pool.LOAD_SECONDS", 1.0)
    with (
        pool_of(tmp_path, "import time; time.sleep(1000)") as pool,
        pytest.raises(RewardError, match=r"took more than 1 s and was killed, while it loaded"),
    ):
        pool.ready()


def test_an_idle_worker_that_dies_is_replaced_and_nobody_blamed(tmp_path):
    text = """
import os, threading
REWARD_TYPE = "sequential"
def compute_score(answer):
    if answer["response"] == "die later":
        threading.Timer(0.2, os._exit, (1,)).start()
    return {"overall": 1}
"""
    with pool_of(tmp_path, text, num_workers=1) as pool:
        assert pool.score(requests("die later"))[0].outcome == "ok"
        time.sleep(1.0)
        assert [score.outcome for score in pool.score(requests("a", "b"))] == ["ok", "ok"]


@pytest.mark.parametrize("response", ["hang in C", "ignore signals and sleep", "leave a child and sleep", "idle"])
def test_no_worker_outlives_a_parent_that_was_killed(tmp_path, response):
    (tmp_path / "grade.py").write_text(f"""
import os, signal, time
def note():
    with open({str(tmp_path / "pids")!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
def compute_score(reward_input):
    note()
    match reward_input["response"]:
        case "hang in C":
            7 ** (10**9)
        case "ignore signals and sleep":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGIO):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(1000)
        case "leave a child and sleep":
            if os.fork() == 0:
                note()
            time.sleep(1000)
    return {{"overall": 1}}
""")
    script = f"""
import time
from trigon.rewards.contract import RewardRequest
from trigon.rewards.pool import RewardPool

pool = RewardPool({str(tmp_path / "grade.py")!r} + ":compute_score", kwargs={{}}, num_workers=1, timeout_seconds=500,
                  max_failed_fraction=1.0)
pool.score([RewardRequest({response!r}, 1, "4", "?", "stop", {{}})])
time.sleep(1000)
"""
    wanted = 2 if response == "leave a child and sleep" else 1
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        pids = wait_for(lambda: noted(tmp_path / "pids", wanted))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def wait_for(condition):
    """Return the first true value of condition; the test's own time limit ends a wait in vain."""
    while not (value := condition()):
        time.sleep(0.02)
    return value


def noted(file: Path, count: int) -> list[int]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [int(line) for line in lines] if len(lines) == count else []
