"""Classes as reward functions: one object per reward worker, made with the arguments."""

import asyncio
import functools
import os

import pytest

from support.rewards import requests, reward_pool
from trigon.errors import RewardError
from trigon.rewards.callables import reward_terms

# Returns how often an object was made in its process. Making one takes longer than a score may.
SLOW_START = """
import time

REWARD_TYPE = "sequential"
made = 0

class main:
    def __init__(self, scale, folder=None):
        global made
        made += 1
        time.sleep(1.5)
        self.scale = scale

    def __call__(self, reward_input):
        return {"overall": self.scale * len(reward_input["response"]), "made": made}
"""


@pytest.mark.extended
def test_an_object_is_made_once_per_worker_before_the_time_limit_of_a_score_counts(tmp_path):
    with reward_pool(tmp_path, SLOW_START, kwargs={"scale": 2}, num_workers=2, timeout_seconds=1.0) as pool:
        scores = pool.score(requests(*["abc"] * 20))
    assert [score.overall for score in scores] == [6.0] * 20
    assert {score.parts["made"] for score in scores} == {1.0}


@pytest.mark.parametrize(
    ("text", "kwargs", "facts"),
    [
        (SLOW_START, {}, ["'scale'", "worker.reward.reward_function_kwargs"]),
        (SLOW_START, {"scale": 1, "foldre": "a"}, ["'foldre'", "did you mean folder", "accepts scale, folder"]),
        ("class main:\n    pass\n", {}, ["give it a method __call__"]),
        (
            "class main:\n    def __init__(self): raise OSError('no judge')\n    def __call__(self, reward_input): ...",
            {},
            ["OSError: no judge", 'reward.py", line 2, in __init__'],
        ),
    ],
)
def test_what_cannot_be_made_ends_the_start(tmp_path, text, kwargs, facts):
    with reward_pool(tmp_path, text, kwargs=kwargs) as pool, pytest.raises(RewardError) as caught:
        pool.ready()
    assert all(fact in str(caught.value) for fact in facts), caught.value


class Scaled:
    def __init__(self, scale=1.0):
        self.scale = scale
        self.pid = os.getpid()  # of the process that made it

    async def __call__(self, reward_input):
        await asyncio.sleep(0)
        return {"overall": self.scale * len(reward_input["response"]), "own": self.pid == os.getpid()}


@pytest.mark.parametrize(
    ("reward", "kwargs", "expected"),
    [(Scaled, {}, 3.0), (functools.partial(Scaled, scale=2.0), {}, 6.0), (Scaled, {"scale": 4.0}, 12.0)],
)
def test_one_given_in_python_is_made_in_the_worker(tmp_path, reward, kwargs, expected):
    with reward_pool(tmp_path, reward=reward_terms(reward, kwargs=kwargs)) as pool:
        [score] = pool.score(requests("abc"))
    assert score.parts == {"overall": expected, "own": 1.0}
