"""RewardPool.scoring() with real processes: scores do not depend on when completions are added."""

import random
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from support.processes import is_locked, wait_until
from support.rewards import reward_pool
from trigon.errors import RewardError
from trigon.rewards.contract import RewardRequest

# Writes files that show its progress, and behaves as the ground truth of a completion says. Its
# process locks a file while it lives: in another namespace it does not know its id.
REWARD = """
import fcntl, os, pathlib, time

REWARD_TYPE = "sequential"
locks = []

def main(reward_input):
    notes = pathlib.Path(reward_input["row"]["notes"])
    (notes / "locks").mkdir(exist_ok=True)
    locks.append((notes / "locks" / reward_input["response"]).open("w"))
    fcntl.flock(locks[-1], fcntl.LOCK_SH)
    (notes / f"started {reward_input['response']}").touch()
    match reward_input["ground_truth"]:
        case "hang":
            time.sleep(1000)
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("no")
        case float(seconds):
            time.sleep(seconds)
    (notes / f"scored {reward_input['response']}").touch()
    return {"overall": float(len(reward_input["response"]))}
"""

# Returns the composition of its chunk, to show that it does not change.
BATCH = """
REWARD_TYPE = "batch"

def main(reward_inputs):
    numbers = [int(reward_input["response"]) for reward_input in reward_inputs]
    if -1 in numbers:
        raise ValueError("a completion that fails its chunk")
    return [{"overall": n, "first": numbers[0], "last": numbers[-1], "size": len(numbers)} for n in numbers]
"""


@pytest.fixture(scope="module")
def open_pool(tmp_path_factory):
    """Return a function that makes a pool from a reward file's text, closed after the last test."""
    with ExitStack() as stack:
        yield lambda text, **options: stack.enter_context(
            reward_pool(tmp_path_factory.mktemp("reward"), text, **options)
        )


@pytest.fixture(scope="module")
def pool(open_pool):
    return open_pool(REWARD, num_workers=2)


@pytest.fixture(scope="module")
def batch_pool(open_pool):
    return open_pool(BATCH, num_workers=2)


def request(response, notes="", truth="4", **row):
    return RewardRequest(response, 1, truth, "?", "stop", {"notes": str(notes), **row})


def wait_for(path: Path) -> None:
    """Return once the file exists; otherwise the time limit of the test applies."""
    while not path.exists():
        time.sleep(0.005)


def test_a_completion_is_scored_before_the_next_is_added(pool, tmp_path):
    with pool.scoring(num_completions=3) as scoring:
        for index, response in [(2, "aaa"), (0, "a"), (1, "aa")]:
            scoring.add(index, [request(response, tmp_path)])
            wait_for(tmp_path / f"scored {response}")
        scores = scoring.result()
    assert [score.overall for score in scores] == [1.0, 2.0, 3.0]
    assert scores == pool.score([request("a" * length, tmp_path) for length in (1, 2, 3)])


def test_no_timeout_while_another_thread_holds_the_interpreter_lock(open_pool, tmp_path):
    pool = open_pool(REWARD, num_workers=2, timeout_seconds=0.4)
    with pool.scoring(num_completions=2) as scoring:
        scoring.add(0, [request("first", tmp_path, 0.1), request("second", tmp_path, 0.2)])
        for name in ("first", "second"):
            wait_for(tmp_path / f"started {name}")
        interval = sys.getswitchinterval()
        sys.setswitchinterval(10)
        try:  # longer than the limit of 0.4 s; both results arrive in time but are not read
            released = time.monotonic() + 0.8
            while time.monotonic() < released:
                pass
        finally:
            sys.setswitchinterval(interval)
        assert [score.outcome for score in scoring.result()] == ["ok", "ok"]


def arrivals(num_groups, *, without=()):
    """Return orders in which groups may finish."""
    groups = [group for group in range(num_groups) if group not in without]
    return [groups, groups[::-1], random.Random(0).sample(groups, len(groups))]


def score_in_order(pool, numbers, groups, *, group_size):
    with pool.scoring(num_completions=len(numbers)) as scoring:
        for group in groups:
            completions = numbers[group * group_size : (group + 1) * group_size]
            scoring.add(group * group_size, [request(str(number)) for number in completions])
        return scoring.result()


def test_chunks_of_a_batch_function_do_not_depend_on_the_order_of_groups(batch_pool):
    numbers = [*range(40)]  # in chunks of 5, each with completions of two groups of 4
    numbers[13] = -1  # it fails its chunk, whose others are then scored one by one
    expected = batch_pool.score([request(str(number)) for number in numbers])
    assert {score.parts["size"] for score in expected if score.outcome == "ok"} == {1, 5}
    assert [score.outcome for score in expected].count("failed") == 1
    for groups in arrivals(10):
        assert score_in_order(batch_pool, numbers, groups, group_size=4) == expected


def test_a_chunk_omits_missing_completions_and_no_other_chunk_changes(batch_pool):
    numbers = [*range(40)]
    orders = arrivals(10, without=(2, 7))
    expected = score_in_order(batch_pool, numbers, orders[0], group_size=4)
    assert [score.overall for score in expected] == [n for n in numbers if n // 4 not in (2, 7)]
    assert [score.parts["size"] for score in expected[:8]] == [5] * 5 + [3] * 3  # 0 to 4; 5, 6, 7 without 8 and 9
    for groups in orders[1:]:
        assert score_in_order(batch_pool, numbers, groups, group_size=4) == expected


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_leaving_the_context_stops_the_workers_and_the_pool_is_usable(pool, tmp_path, error):
    with pytest.raises(error) if error else nullcontext(), pool.scoring(num_completions=9) as scoring:
        scoring.add(0, [request("good", tmp_path), request("endless", tmp_path, "hang")])
        wait_for(tmp_path / "started endless")
        if error:
            raise error
    wait_until(lambda: not is_locked(tmp_path / "locks" / "endless"))
    assert [score.overall for score in pool.score([request("aa", tmp_path)] * 5)] == [2.0] * 5


@pytest.mark.extended
def test_a_crash_or_hang_before_result_affects_only_its_completion(open_pool, tmp_path):
    pool = open_pool(REWARD, timeout_seconds=0.5)
    with pool.scoring(num_completions=7) as scoring:
        for index, truth in ((4, "exit"), (1, "hang")):
            completions = [request("good", tmp_path), request(f"{index}", tmp_path, truth), request("better", tmp_path)]
            scoring.add(index - 1, completions)
            wait_for(tmp_path / f"started {index}")
            while is_locked(tmp_path / "locks" / f"{index}"):  # the time limit holds before result() is called
                time.sleep(0.005)
        scoring.add(6, [request("last", tmp_path)])
        scores = scoring.result()
    assert [score.outcome for score in scores] == ["ok", "timeout", "ok", "ok", "failed", "ok", "ok"]
    assert [score.overall for score in scores] == [4.0, 0.0, 6.0, 4.0, 0.0, 6.0, 4.0]
    assert scores[4].error == "its worker exited with code 3"


@pytest.mark.parametrize(
    ("num_bad", "num_missing", "is_allowed"), [(3, 0, True), (4, 0, False), (3, 2, False), (2, 2, True), (0, 10, True)]
)
def test_the_failed_fraction_does_not_depend_on_the_order(open_pool, tmp_path, num_bad, num_missing, is_allowed):
    pool = open_pool(REWARD, max_failed_fraction=0.3)
    completions = [request("good", tmp_path, "raise" if index < num_bad else "4") for index in range(10 - num_missing)]
    indices = [*range(len(completions))]

    def outcomes(order):
        with pool.scoring(num_completions=10) as scoring:
            for index in order:
                scoring.add(index, [completions[index]])
            return [score.outcome for score in scoring.result()]

    for order in (indices, indices[::-1]):
        if is_allowed:
            assert outcomes(order) == ["failed"] * num_bad + ["ok"] * (len(completions) - num_bad)
        else:
            with pytest.raises(RewardError, match=r'(?s)reward.py could not score .* raise ValueError\("no"\)'):
                outcomes(order)


def test_the_scores_of_a_group_are_found_once_all_of_them_are_there(pool, tmp_path):
    with pool.scoring(num_completions=4) as scoring:
        scoring.add(0, [request("a", tmp_path), request("aa", tmp_path)])
        while (scores := scoring.find_scores(range(2))) is None:
            time.sleep(0.005)
        assert [score.overall for score in scores] == [1.0, 2.0]
        scoring.add(2, [request("aaa", tmp_path)])
        wait_for(tmp_path / "scored aaa")
        assert scoring.find_scores(range(2, 4)) is None
        scoring.result()
        assert scoring.find_scores(range(2, 3)) is not None
