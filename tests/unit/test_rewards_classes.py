"""Classes as reward functions: one object per reward worker, made with the arguments."""

import asyncio
import functools
import os
import re
from contextlib import closing

import pytest

from trigon.errors import RewardError
from trigon.rewards.callables import reward_source
from trigon.rewards.contract import RewardRequest
from trigon.rewards.pool import RewardPool

# Returns how often an object was made in its process. Making one takes longer than a score may.
SLOW_START = """
import time

REWARD_TYPE = "sequential"
made = 0

class Reward:
    def __init__(self, scale, folder=None):
        global made
        made += 1
        time.sleep(1.5)
        self.scale = scale

    def __call__(self, reward_input):
        return {"overall": self.scale * len(reward_input["response"]), "made": made}
"""


def requests(*responses):
    fields = {"response_length": 3, "ground_truth": "4", "prompt": "?", "finish_reason": "stop", "row": {}}
    return [RewardRequest(response=response, **fields) for response in responses]


def scores_of(reward, *responses, kwargs=None, num_workers=1, timeout_seconds=20.0):
    pool = RewardPool(
        reward,
        kwargs=kwargs or {},
        num_workers=num_workers,
        timeout_seconds=timeout_seconds,
        max_failed_fraction=0.0,
    )
    with closing(pool):
        return [(score.overall, dict(score.parts)) for score in pool.score(requests(*responses))]


def error_of(folder, text, kwargs=None):
    (folder / "reward.py").write_text(text)
    with pytest.raises(RewardError) as caught:
        scores_of(f"{folder}/reward.py:Reward", "a", kwargs=kwargs)
    return str(caught.value)


def test_an_object_is_made_once_per_worker_before_the_time_limit_of_a_score_counts(tmp_path):
    (tmp_path / "reward.py").write_text(SLOW_START)
    scores = scores_of(
        f"{tmp_path}/reward.py:Reward", *["abc"] * 20, kwargs={"scale": 2}, num_workers=2, timeout_seconds=1.0
    )
    assert [overall for overall, _ in scores] == [6.0] * 20
    assert {parts["made"] for _, parts in scores} == {1.0}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("def __call__(self, reward_inputs): return [1.0 for _ in reward_inputs]", 1.0),
        ("def __call__(self, response, ground_truth): return len(response + ground_truth)", 2.0),
        ("async def __call__(self, reward_input): return 3.0", 3.0),
    ],
)
def test_the_contract_is_that_of_its_method(tmp_path, method, expected):
    (tmp_path / "reward.py").write_text(f"class Reward:\n    {method}\n")
    assert scores_of(f"{tmp_path}/reward.py:Reward", "a")[0][0] == expected


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "missing a required argument: 'scale'; set its keyword arguments in worker.reward.reward_function_kwargs"),
        ({"scale": 1, "foldre": "a"}, "does not accept 'foldre' .*did you mean folder.*accepts scale, folder"),
    ],
)
def test_its_arguments_are_checked_before_it_is_made(tmp_path, kwargs, message):
    assert re.search(message, error_of(tmp_path, SLOW_START, kwargs), re.DOTALL)


def test_what_it_raises_ends_the_start_with_its_traceback(tmp_path):
    text = (
        "class Reward:\n    def __init__(self): raise OSError('no such judge')\n    def __call__(self, reward_input): "
    )
    error = error_of(tmp_path, f"{text}...")
    assert "failed to start: OSError: no such judge" in error
    assert 'reward.py", line 2, in __init__' in error


def test_one_without_a_method_to_call_is_an_error(tmp_path):
    assert "cannot be called; give it a method __call__" in error_of(tmp_path, "class Reward:\n    pass\n")


class Scaled:
    def __init__(self, scale=1.0):
        self.scale = scale
        self.pid = os.getpid()  # of the process that made it

    async def __call__(self, reward_input):
        await asyncio.sleep(0)
        return {"overall": self.scale * len(reward_input["response"]), "own": self.pid == os.getpid()}


@pytest.mark.parametrize(("bound", "expected"), [({}, 3.0), ({"scale": 2.0}, 6.0)])
def test_one_given_in_python_is_made_in_the_worker(bound, expected):
    reward = functools.partial(Scaled, **bound) if bound else Scaled
    [(overall, parts)] = scores_of(reward_source(reward, kwargs={}), "abc")
    assert (overall, parts["own"]) == (expected, 1.0)


def test_one_given_in_python_gets_the_arguments():
    assert scores_of(reward_source(Scaled, kwargs={"scale": 4.0}), "abc", kwargs={"scale": 4.0})[0][0] == 12.0
