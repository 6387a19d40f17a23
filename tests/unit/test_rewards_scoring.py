"""Answers that are graded while others are still to come, by real processes: the scores are those of score()."""

import os
import random
import sys
import time
from pathlib import Path

import pytest

from support.processes import is_running
from trigon.errors import RewardError
from trigon.rewards.contract import RewardRequest
from trigon.rewards.pool import RewardPool

# Tells by files what it does, and does what the answer's ground truth says.
GRADER = """
import os, pathlib, time

REWARD_TYPE = "sequential"

def main(answer):
    notes = pathlib.Path(answer["row"]["notes"])
    (notes / "pids").mkdir(exist_ok=True)
    (notes / "pids" / answer["response"]).write_text(str(os.getpid()))
    (notes / f"asked {answer['response']}").touch()
    match answer["ground_truth"]:
        case "hang":
            time.sleep(1000)
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("no")
        case float(seconds):
            time.sleep(seconds)
    (notes / f"graded {answer['response']}").touch()
    return {"overall": float(len(answer["response"]))}
"""

# Scores that depend on which answers came together, as they should not: what shows that the same ones do.
LISTS = """
REWARD_TYPE = "batch"

def main(answers):
    numbers = [int(answer["response"]) for answer in answers]
    if -1 in numbers:
        raise ValueError("an answer that spoils its list")
    return [{"overall": n, "first": numbers[0], "last": numbers[-1], "asked": len(numbers)} for n in numbers]
"""


@pytest.fixture(scope="module")
def open_pool(tmp_path_factory):
    """Return a function that makes a pool from a reward file's text, closed when the last test has ended."""
    pools = []

    def make(text, *, num_workers=1, timeout_seconds=20.0, max_failed_fraction=1.0):
        file = tmp_path_factory.mktemp("reward") / "grade.py"
        file.write_text(text)
        pools.append(
            RewardPool(
                f"{file}:main",
                kwargs={},
                num_workers=num_workers,
                timeout_seconds=timeout_seconds,
                max_failed_fraction=max_failed_fraction,
            )
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def pool(open_pool):
    return open_pool(GRADER, num_workers=2)


@pytest.fixture(scope="module")
def lists(open_pool):
    return open_pool(LISTS, num_workers=2)


def request(response, notes="", truth="4", **row):
    return RewardRequest(response, 1, truth, "?", "stop", {"notes": str(notes), **row})


def wait_for(path: Path) -> None:
    """Return once there is such a file; the test's own time limit ends a wait in vain."""
    while not path.exists():
        time.sleep(0.005)


def test_an_answer_is_graded_before_the_next_is_there(pool, tmp_path):
    with pool.scoring(num_answers=3) as scoring:
        for place, response in [(2, "aaa"), (0, "a"), (1, "aa")]:
            scoring.add(place, [request(response, tmp_path)])
            wait_for(tmp_path / f"graded {response}")
        scores = scoring.result()
    assert [score.overall for score in scores] == [1.0, 2.0, 3.0]
    assert scores == pool.score([request("a" * length, tmp_path) for length in (1, 2, 3)])


def test_nothing_is_hurried_by_a_thread_that_keeps_the_interpreter_to_itself(open_pool, tmp_path):
    pool = open_pool(GRADER, num_workers=2, timeout_seconds=0.4)
    with pool.scoring(num_answers=2) as scoring:
        scoring.add(0, [request("first", tmp_path, 0.1), request("second", tmp_path, 0.2)])
        for name in ("first", "second"):
            wait_for(tmp_path / f"asked {name}")
        interval = sys.getswitchinterval()
        sys.setswitchinterval(10)
        try:  # beyond the limit of 0.4 s, after which both replies lie there unread
            released = time.monotonic() + 0.8
            while time.monotonic() < released:
                pass
        finally:
            sys.setswitchinterval(interval)
        assert [score.outcome for score in scoring.result()] == ["ok", "ok"]


def arrivals(num_groups, *, without=()):
    """Return orders in which groups may end."""
    groups = [group for group in range(num_groups) if group not in without]
    return [groups, groups[::-1], *(random.Random(seed).sample(groups, len(groups)) for seed in range(4))]


def scored(pool, numbers, groups, *, each):
    with pool.scoring(num_answers=len(numbers)) as scoring:
        for group in groups:
            answers = numbers[group * each : (group + 1) * each]
            scoring.add(group * each, [request(str(number)) for number in answers])
        return scoring.result()


def test_a_function_that_is_handed_lists_gets_the_same_lists_whatever_ends_first(lists):
    numbers = [*range(40)]  # in lists of 5, which are made of two groups of 4 each
    numbers[13] = -1  # it spoils its list, whose others are then asked alone
    expected = lists.score([request(str(number)) for number in numbers])
    assert {score.parts["asked"] for score in expected if score.outcome == "ok"} == {1, 5}
    assert [score.outcome for score in expected].count("failed") == 1
    for groups in arrivals(10):
        assert scored(lists, numbers, groups, each=4) == expected


def test_a_list_lacks_what_is_lost_and_nothing_else_changes(lists):
    numbers = [*range(40)]
    orders = arrivals(10, without=(2, 7))
    expected = scored(lists, numbers, orders[0], each=4)
    assert [score.overall for score in expected] == [n for n in numbers if n // 4 not in (2, 7)]
    assert [score.parts["asked"] for score in expected[:8]] == [5] * 5 + [3] * 3  # 0 to 4; 5, 6, 7 without 8 and 9
    for groups in orders[1:]:
        assert scored(lists, numbers, groups, each=4) == expected


def test_answers_that_are_asked_one_by_one_are_scored_the_same_whatever_ends_first(pool, tmp_path):
    answers = [request("x" * length, tmp_path, "raise" if length % 4 == 3 else "4") for length in range(1, 25)]
    expected = pool.score(answers)
    assert [score.outcome for score in expected] == ["ok", "ok", "failed", "ok"] * 6
    for groups in arrivals(6)[1:3]:
        with pool.scoring(num_answers=24) as scoring:
            for group in groups:
                scoring.add(4 * group, answers[4 * group : 4 * group + 4])
            assert scoring.result() == expected


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_who_leaves_in_the_middle_leaves_nobody_at_work_and_the_pool_usable(pool, tmp_path, error):
    def sample():
        with pool.scoring(num_answers=9) as scoring:
            scoring.add(0, [request("good", tmp_path), request("endless", tmp_path, "hang")])
            wait_for(tmp_path / "asked endless")
            raise error

    with pytest.raises(error):
        sample()
    assert not is_running(int((tmp_path / "pids" / "endless").read_text()))
    assert [score.overall for score in pool.score([request("aa", tmp_path)] * 5)] == [2.0] * 5


def test_who_does_not_want_the_result_need_not_wait_for_it(pool, tmp_path):
    with pool.scoring(num_answers=1) as scoring:
        scoring.add(0, [request("endless", tmp_path, "hang")])
        wait_for(tmp_path / "asked endless")
    assert not is_running(int((tmp_path / "pids" / "endless").read_text()))
    assert pool.score([request("a", tmp_path)])[0].overall == 1.0


def test_a_grader_that_dies_or_hangs_meanwhile_costs_its_answer_alone(open_pool, tmp_path):
    pool = open_pool(GRADER, num_workers=1, timeout_seconds=0.5)
    with pool.scoring(num_answers=7) as scoring:
        for place, truth in ((4, "exit"), (1, "hang")):
            answers = [request("good", tmp_path), request(f"{place}", tmp_path, truth), request("better", tmp_path)]
            scoring.add(place - 1, answers)
            wait_for(tmp_path / f"asked {place}")
            pid = int((tmp_path / "pids" / f"{place}").read_text())
            while is_running(pid):  # its limit is kept while nobody asks for the result
                time.sleep(0.005)
        scoring.add(6, [request("last", tmp_path)])
        scores = scoring.result()
    assert [score.outcome for score in scores] == ["ok", "timeout", "ok", "ok", "failed", "ok", "ok"]
    assert [score.overall for score in scores] == [4.0, 0.0, 6.0, 4.0, 0.0, 6.0, 4.0]
    assert scores[4].error == "its worker exited with code 3"


@pytest.mark.parametrize(
    ("num_bad", "num_lost", "is_enough"), [(3, 0, True), (4, 0, False), (3, 2, False), (2, 2, True), (0, 10, True)]
)
def test_too_many_failures_are_told_by_their_share_of_all_whatever_comes_first(
    open_pool, tmp_path, num_bad, num_lost, is_enough
):
    pool = open_pool(GRADER, max_failed_fraction=0.3)
    answers = [request("good", tmp_path, "raise" if place < num_bad else "4") for place in range(10 - num_lost)]
    places = [*range(len(answers))]

    def outcomes(order):
        with pool.scoring(num_answers=10) as scoring:
            for place in order:
                scoring.add(place, [answers[place]])
            return [score.outcome for score in scoring.result()]

    for order in (places, places[::-1]):
        if is_enough:
            assert outcomes(order) == ["failed"] * num_bad + ["ok"] * (len(answers) - num_bad)
        else:
            with pytest.raises(RewardError, match=r'(?s)grade.py could not score .* raise ValueError\("no"\)'):
                outcomes(order)


def test_too_many_failures_stop_who_would_add_more(open_pool, tmp_path):
    pool = open_pool(GRADER, max_failed_fraction=0.001)

    def add_many():
        with pool.scoring(num_answers=1000) as scoring:
            scoring.add(0, [request("bad", tmp_path, "raise"), request("worse", tmp_path, "raise")])
            for place in range(2, 1000):
                scoring.add(place, [request("good", tmp_path)])
                time.sleep(0.02)

    with pytest.raises(RewardError, match=r"could not score 2 of 1000 answers, and .* allows 1 "):
        add_many()


def test_what_cannot_be_handed_over_is_said_to_the_caller(pool, tmp_path):
    with pool.scoring(num_answers=2) as scoring:
        with pytest.warns(UserWarning, match="column 'sound' of the dataset"):
            scoring.add(1, [request("good", tmp_path, sound=b"\x00")])
        scoring.add(0, [request("good", tmp_path, truth=b"")])
        refused, good = scoring.result()
    assert good.overall == 4.0
    assert "cannot be handed" in refused.error


def test_a_function_that_cannot_be_used_is_refused_before_anything_is_sampled(open_pool):
    with pytest.raises(RewardError, match="did you mean 'mian'"), open_pool("def mian(a): ...").scoring(num_answers=1):
        raise AssertionError("this is where sampling would begin")


def test_a_place_is_filled_once(pool, tmp_path):
    with pool.scoring(num_answers=2) as scoring:
        scoring.add(1, [request("a", tmp_path)])
        scoring.add(1, [request("a", tmp_path)])
        with pytest.raises(AssertionError, match="1 came twice"):
            scoring.result()


def test_nothing_is_left_open(open_pool):
    before = set(os.listdir("/proc/self/fd"))
    pool = open_pool(GRADER)
    pool.score([request("a", "/tmp")])
    pool.close()
    assert set(os.listdir("/proc/self/fd")) <= before
