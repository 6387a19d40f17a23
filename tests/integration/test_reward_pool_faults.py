"""RewardPool with reward functions that hang, crash, use all memory or send forged messages."""

import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from support.processes import is_locked, wait_until
from support.rewards import requests, reward_pool
from trigon.errors import RewardError

REWARD = """
import ctypes, os, signal, struct, sys, threading, time

REWARD_TYPE = {reward_type!r}

def score(reward_input):
    match reward_input["response"]:
        case "hang in C":
            return {{"overall": 7 ** (10**9) % 2}}  # holds the interpreter lock, so no Python signal handler runs
        case "segfault":
            ctypes.string_at(0)
        case "eat memory":
            return {{"overall": len(bytearray(64 << 30))}}
        case "endless recursion":
            return score(reward_input)
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
        case "leave a child and exit":  # the child holds the worker's channel open
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
        case "write forged scores into the channel":
            for fd in range(3, 1000):
                try:
                    os.write(fd, b'{{"scores": {{"overall": NaN}}}}\\n')
                except OSError:
                    pass
        case "reply with a time that no float can hold":
            frame = sys._getframe()
            while "message" not in frame.f_locals:
                frame = frame.f_back
            call, channel = frame.f_locals["message"]["call"], frame.f_locals["self"]._channel
            text = f'{{{{"call": "{{call}}", "seconds": 1{{"0" * 400}}, "results": []}}}}'.encode()
            channel.sendall(struct.pack("!II", len(text), 0) + text)
    return {{"overall": float(len(reward_input["response"]))}}

def compute_score(reward_input):
    return score(reward_input) if REWARD_TYPE == "sequential" else [score(single) for single in reward_input]
"""

BAD = {
    "hang in C": ("timeout", "no score within 1 s; its worker was killed"),
    "segfault": ("failed", "its worker died of signal 11 (Segmentation fault)"),
    "eat memory": ("failed", "MemoryError (reward.py:13)"),
    "endless recursion": ("failed", "RecursionError: maximum recursion depth exceeded"),
    "kill yourself": ("failed", "its worker was killed by the system, perhaps because memory ran out"),
    "stop yourself": ("timeout", "no score within 1 s; its worker was killed"),
    "ignore signals and sleep": ("timeout", "no score within 1 s; its worker was killed"),
    "close everything": ("failed", "its worker"),
    "leave a child and exit": ("failed", "its worker exited with code 7"),
}


pool_of = partial(reward_pool, function="compute_score", num_workers=2, timeout_seconds=1.0)


@pytest.mark.extended(but=["sequential"])
@pytest.mark.faults
@pytest.mark.parametrize("reward_type", ["sequential", "batch"])
def test_a_failure_affects_only_its_completion(tmp_path, reward_type):
    responses = [response for index, bad in enumerate(BAD) for response in ("x" * index, bad, "y" * index)]
    with pool_of(tmp_path, REWARD.format(reward_type=reward_type)) as pool:
        scores = pool.score(requests(*responses))
    for response, score in zip(responses, scores, strict=True):
        if response in BAD:
            outcome, error = BAD[response]
            assert score.outcome == outcome, (response, score)
            assert score.error.startswith(error), (response, score)
        else:
            assert (score.outcome, score.overall) == ("ok", float(len(response))), (response, score)


@pytest.mark.extended
@pytest.mark.parametrize(
    "response",
    [
        "write nonsense into the channel",
        "write forged scores into the channel",
        "reply with a time that no float can hold",
    ],
)
def test_a_forged_message_fails_its_completion_and_no_other(tmp_path, response):
    with pool_of(tmp_path, REWARD.format(reward_type="sequential"), num_workers=1) as pool:
        scores = pool.score(requests("a", response))
        assert [score.outcome for score in scores] == ["ok", "failed"]
        assert [score.overall for score in pool.score(requests("aa", "bbb"))] == [2.0, 3.0]


@pytest.mark.faults
def test_a_completion_whose_worker_is_killed_from_outside_is_scored_again(tmp_path):
    text = f"""
import os, signal
REWARD_TYPE = "sequential"
def compute_score(reward_input):
    try:
        os.close(os.open({str(tmp_path / "once")!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 1.0
    os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out
"""
    with pool_of(tmp_path, text, num_workers=1) as pool:
        scores = pool.score(requests("a", "b"))
    assert [(score.outcome, score.overall) for score in scores] == [("ok", 1.0), ("ok", 1.0)]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("num_workers", "last_killed"), [(1, 2), (1, 1000), (2, 1000)], ids=["once", "always", "beside"]
)
def test_a_worker_that_is_killed_while_it_loads_is_replaced_unless_all_are(tmp_path, num_workers, last_killed):
    text = f"""
import os, signal, time
REWARD_TYPE = "sequential"
with open({str(tmp_path / "loads")!r}, "a") as file:
    file.write("x")
if {num_workers} < os.path.getsize(file.name) <= {last_killed}:
    os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out
def compute_score(reward_input):
    if reward_input["response"] == "exit":
        os._exit(1)
    time.sleep({0.1 * (num_workers - 1)})
    return 1.0
"""
    with pool_of(tmp_path, text, num_workers=num_workers) as pool:
        if last_killed == 2:
            assert [score.outcome for score in pool.score(requests("exit", "a"))] == ["failed", "ok"]
        else:
            with pytest.raises(RewardError, match=r"was killed by the system.* while loading"):
                pool.score(requests("exit", *["a"] * (1 if num_workers == 1 else 200)))
            assert (tmp_path / "loads").read_text() == "x" * (num_workers + 3)


def test_a_running_thread_of_the_function_delays_nothing(tmp_path):
    with pool_of(tmp_path, REWARD.format(reward_type="sequential")) as pool:
        assert [score.overall for score in pool.score(requests("leave a thread", "a"))] == [14.0, 1.0]


@pytest.mark.extended
def test_chunks_of_a_slow_batch_function_are_halved_until_they_fit(tmp_path):
    text = """
import time
REWARD_TYPE = "batch"
def compute_score(reward_inputs):
    time.sleep(0.15 * len(reward_inputs))
    return [{"overall": 1, "size": len(reward_inputs)} for _ in reward_inputs]
"""
    with pool_of(tmp_path, text, num_workers=1, timeout_seconds=0.5) as pool:
        scores = pool.score(requests(*"abcdefghijklmnopqrst"))  # in chunks of five at first
        assert {score.outcome for score in scores} == {"ok"}


@pytest.mark.extended
def test_a_file_that_hangs_while_loading_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("trigon.system.child.LOAD_SECONDS", 1.0)
    with (
        pool_of(tmp_path, "import time; time.sleep(1000)") as pool,
        pytest.raises(RewardError, match=r"took more than 1 s and was killed while loading"),
    ):
        pool.ready()


@pytest.mark.extended
def test_an_idle_worker_that_exits_is_replaced_without_a_failure(tmp_path):
    text = """
import os, threading
REWARD_TYPE = "sequential"
def compute_score(reward_input):
    if reward_input["response"] == "exit later":
        threading.Timer(0.2, os._exit, (1,)).start()
    return {"overall": 1}
"""
    with pool_of(tmp_path, text, num_workers=1) as pool:
        assert pool.score(requests("exit later"))[0].outcome == "ok"
        time.sleep(1.0)
        assert [score.outcome for score in pool.score(requests("a", "b"))] == ["ok", "ok"]


@pytest.mark.parametrize("response", ["hang in C", "ignore signals and sleep"])
def test_no_worker_outlives_a_parent_that_was_killed_whatever_its_function_does(tmp_path, response):
    """tests/integration/test_reward_confinement.py has what the function has started."""
    (tmp_path / "reward.py").write_text(f"""
import fcntl, os, pathlib, signal, time
lock = open({str(tmp_path / "lock")!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX)  # held as long as a process lives that has this file
def compute_score(reward_input):
    pathlib.Path({str(tmp_path / "called")!r}).touch()
    if reward_input["response"] == "hang in C":
        7 ** (10**9)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGIO):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)
""")
    script = f"""
from trigon.rewards.contract import RewardRequest
from trigon.rewards.load import find_reward
from trigon.rewards.pool import RewardPool

pool = RewardPool(find_reward({str(tmp_path / "reward.py")!r} + ":compute_score", {{}}), num_workers=1,
                  timeout_seconds=500, max_failed_fraction=1.0)
pool.score([RewardRequest({response!r}, 1, "4", "?", "stop", {{}})])
"""
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        wait_until((tmp_path / "called").exists)
        assert is_locked(tmp_path / "lock")
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_locked(tmp_path / "lock"))
