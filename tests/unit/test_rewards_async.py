"""Async reward functions with real processes: concurrency, time limits, and single failures."""

import threading
import time
from functools import partial

import pytest

from support.rewards import requests, reward_pool
from trigon.errors import RewardError

pool_of = partial(reward_pool, concurrency=16)

# Behaves as a completion says. Returns how many calls ran at a time when it started.
ASYNC = """
import asyncio, os, time

REWARD_TYPE = "sequential"
running = 0

async def main(reward_input):
    global running
    running += 1
    at_a_time = running
    try:
        return {"overall": await behave(reward_input["response"]), "at_a_time": at_a_time, "pid": os.getpid()}
    finally:
        running -= 1

async def behave(response):
    match response.split():
        case ["sleep", seconds]:
            await asyncio.sleep(float(seconds))
            return float(seconds)
        case ["block"]:
            time.sleep(1000)
        case ["exit"]:
            os._exit(3)
        case ["leave"]:
            raise SystemExit(4)
        case ["raise"]:
            raise KeyError("no such step")
        case ["own timeout"] | ["own", "timeout"]:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(1)
        case ["own", "cancel"]:
            raise asyncio.CancelledError
        case ["stubborn"]:
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass
        case ["late"]:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                return 7.0
        case ["bare"]:
            return None
    return float(len(response))
"""


def test_calls_run_at_the_same_time_up_to_the_limit_and_scores_are_in_order(tmp_path):
    seconds = [0.4 - 0.02 * number for number in range(16)]  # the last ones end first
    with pool_of(tmp_path, ASYNC, concurrency=8) as pool:
        pool.ready()
        start = time.monotonic()
        scores = pool.score(requests(*(f"sleep {each:.2f}" for each in seconds)))
        took = time.monotonic() - start
    assert [score.overall for score in scores] == [round(each, 2) for each in seconds]
    assert max(score.parts["at_a_time"] for score in scores) == 8
    assert took < sum(seconds) / 2


@pytest.mark.faults
def test_a_call_that_times_out_is_cancelled_and_costs_its_own_completion(tmp_path):
    with pool_of(tmp_path, ASYNC, timeout_seconds=0.5) as pool:
        scores = pool.score(requests("first", "sleep 1000", "sleep 0.2", "late", "last"))
        again = pool.score(requests("again"))  # by the same event loop, in the same process
    assert [score.outcome for score in scores] == ["ok", "timeout", "ok", "timeout", "ok"]
    assert scores[1].error == "no score within 0.5 s; it was cancelled"
    assert {score.parts["pid"] for score in (*scores, *again) if score.outcome == "ok"} == {scores[0].parts["pid"]}


def test_errors_cost_their_own_completion(tmp_path):
    with pool_of(tmp_path, ASYNC) as pool:
        scores = pool.score(requests("raise", "fine", "own timeout", "own cancel", "leave", "bare"))
    assert [score.outcome for score in scores] == ["failed", "ok", "failed", "failed", "failed", "failed"]
    raised, _, timeout, cancelled, left, bare = (score.error for score in scores)
    assert raised.startswith("KeyError: 'no such step' (reward.py:")
    assert timeout.startswith("TimeoutError")
    assert cancelled.startswith("CancelledError")
    assert left.startswith("SystemExit: 4")
    assert bare == "returned None for 'overall', expected a number"


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "outcome", "error"),
    [
        ("block", "timeout", "no score within 0.7 s; its worker was killed"),
        ("stubborn", "timeout", "no score within 0.7 s; its worker was killed"),
        ("exit", "failed", "its worker exited with code 3"),
    ],
)
def test_a_call_that_stops_the_event_loop_is_found_and_the_others_are_scored(tmp_path, fault, outcome, error):
    with pool_of(tmp_path, ASYNC, timeout_seconds=0.7) as pool:
        scores = pool.score(requests("sleep 0.1", "a", fault, "sleep 0.2", "bcd"))
    assert [score.overall for score in scores] == [0.1, 1.0, 0.0, 0.2, 3.0]
    assert [score.outcome for score in scores] == ["ok", "ok", outcome, "ok", "ok"]
    assert scores[2].error == error


@pytest.mark.faults
def test_a_function_that_times_out_for_everything_stops_the_run(tmp_path):
    with (
        pool_of(tmp_path, ASYNC, timeout_seconds=0.1, concurrency=4) as pool,
        pytest.raises(RewardError, match="timed out for 8 completions in a row"),
    ):
        pool.score(requests(*["sleep 1000"] * 20))


BATCH = """
import asyncio
REWARD_TYPE = "batch"
async def main(reward_inputs):
    await asyncio.sleep(0.01)
    responses = [each["response"] for each in reward_inputs]
    if "raise" in responses:
        raise ValueError("no")
    if "hang" in responses:
        await asyncio.sleep(1000)
    return [{"overall": len(each), "size": len(responses)} for each in responses]
"""


@pytest.mark.extended
def test_lists_of_a_batch_function_run_at_the_same_time_and_fail_one_by_one(tmp_path):
    with pool_of(tmp_path, BATCH, timeout_seconds=1.0) as pool:
        fine = pool.score(requests(*["fine"] * 16))
        failing = pool.score(requests(*["fine"] * 5, "raise", *["fine"] * 5, "hang", *["fine"] * 4))
    assert {(score.overall, score.parts["size"]) for score in fine} == {(4.0, 4.0)}
    assert [score.outcome for score in failing] == [*["ok"] * 5, "failed", *["ok"] * 5, "timeout", *["ok"] * 4]
    assert {score.overall for score in failing if score.outcome == "ok"} == {4.0}


OUTAGE = """
import asyncio
from pathlib import Path

REWARD_TYPE = "batch"

async def main(reward_inputs, folder):
    if not Path(folder, "back").exists():
        await asyncio.sleep(1000)
    return [{"overall": 1.0, "length": len(reward_inputs)} for _ in reward_inputs]
"""


@pytest.mark.faults
def test_lists_that_time_out_together_halve_the_length_of_a_list_once(tmp_path):
    with pool_of(tmp_path, OUTAGE, kwargs={"folder": str(tmp_path)}, timeout_seconds=0.5, concurrency=4) as pool:
        pool.ready()
        end = threading.Timer(0.4, (tmp_path / "back").touch)  # all four lists have begun
        end.start()
        during = pool.score(requests(*["a"] * 128))
        after = pool.score(requests(*["a"] * 128))
        end.join()
    assert {score.outcome for score in during} == {"ok"}
    assert {score.parts["length"] for score in after} == {16.0}


def test_a_short_call_does_not_lower_the_cpu_limit_of_a_long_one_that_runs(tmp_path):
    # A group of one, as a greedy completion is, beside a group of 50.
    text = """
import asyncio, resource
REWARD_TYPE = "group"

async def main(reward_inputs):
    await asyncio.sleep(0.3 if len(reward_inputs) > 1 else 0)
    limit, _ = resource.getrlimit(resource.RLIMIT_CPU)
    return [{"overall": 0.0, "limit": limit} for _ in reward_inputs]
"""
    with pool_of(tmp_path, text, timeout_seconds=20.0) as pool, pool.scoring(num_completions=51) as scoring:
        scoring.add(0, requests(*["a"] * 50))
        scoring.add(50, requests("a"))
        long, *_, short = scoring.result()
    assert long.parts["limit"] == short.parts["limit"] > 1000
