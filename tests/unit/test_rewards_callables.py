"""Reward functions given as Python objects: what travels to the reward workers, errors, weights."""

import asyncio
import functools
import sys
import tempfile
import textwrap
import threading
import types
from pathlib import Path

import pytest

from support.rewards import requests, reward_pool
from trigon.errors import RewardError
from trigon.rewards.callables import describe_reward, reward_terms
from trigon.system import user_code


def parts_of(reward, *responses, kwargs=None):
    """Return the scores of these completions by real reward workers."""
    terms = reward_terms(reward, kwargs=kwargs or {})
    with tempfile.TemporaryDirectory() as folder, reward_pool(Path(folder), reward=terms) as pool:
        scores = pool.score(requests(*responses, row={"id": 7}))
    assert {score.error for score in scores} == {""}
    return [dict(score.parts) for score in scores]


def in_main(code, name):
    """Return a function as a notebook defines it: in a module that no process can import."""
    module = types.ModuleType("__main__")
    exec(textwrap.dedent(code), vars(module))
    return vars(module)[name]


def test_lambdas_closures_partials_and_callable_objects_travel():
    bonus = {"4": 2}

    class Scorer:
        def __init__(self, weight):
            self.weight = weight

        def __call__(self, reward_input):
            return {"overall": self.weight * len(reward_input["response"]), "id": reward_input["row"]["id"]}

    def scaled(response, ground_truth, scale):
        return scale * (response == ground_truth)

    assert parts_of(lambda response, ground_truth: bonus.get(response, 0), "4", "5") == [{"overall": 2}, {"overall": 0}]
    assert parts_of(functools.partial(scaled, scale=3), "4", "5") == [{"overall": 3}, {"overall": 0}]
    assert parts_of(scaled, "4", kwargs={"scale": 5}) == [{"overall": 5}]
    assert parts_of(Scorer(0.5), "four") == [{"overall": 2.0, "id": 7.0}]


def test_a_function_of_a_notebook_travels_with_the_functions_and_modules_it_uses():
    code = """
        import math
        LIMIT = 3
        def helper(text): return min(len(text), LIMIT)
        def score(completion): return math.sqrt(helper(completion["response"]) ** 2)
    """
    assert parts_of(in_main(code, "score"), "ab", "abcdef") == [{"overall": 2.0}, {"overall": 3.0}]
    batch = """
        REWARD_TYPE = "batch"
        def score(samples): return [{"overall": len(samples[0]["response"])}] * len(samples)
    """
    assert parts_of(in_main(batch, "score"), "abc") == [{"overall": 3.0}]  # REWARD_TYPE of its module


def test_several_functions_are_summed_by_weight_and_name_their_parts():
    def accuracy(response, ground_truth):
        return {"overall": float(response == ground_truth), "length": len(response)}

    def brevity(reward_inputs):
        return [1.0 / len(each["response"]) for each in reward_inputs]

    assert parts_of([(accuracy, 2.0), (brevity, -0.5), lambda completion: 10], "4", "no") == [
        {"overall": 11.5, "accuracy": 1.0, "accuracy/length": 1.0, "brevity": 1.0, "lambda": 10.0},
        {"overall": 9.75, "accuracy": 0.0, "accuracy/length": 2.0, "brevity": 0.5, "lambda": 10.0},
    ]
    without_batch = parts_of([(accuracy, 1), (accuracy, 1)], "4")
    assert without_batch == [
        {"overall": 2.0, "accuracy": 1.0, "accuracy/length": 1.0, "accuracy_2": 1.0, "accuracy_2/length": 1.0}
    ]


def test_what_cannot_be_pickled_is_an_error_that_names_its_type():
    lock, judge = threading.Lock(), in_main("def judge(completion): return client", "judge")
    judge.__globals__["client"] = lock
    with pytest.raises(RewardError, match=r"'judge' cannot be sent .*_thread\.lock"):
        reward_terms(judge, kwargs={})
    with pytest.raises(RewardError, match=r"'score' cannot be sent .*_thread\.lock"):
        reward_terms(functools.partial(in_main("def score(x, lock): ...", "score"), lock=lock), kwargs={})


def test_what_is_too_large_is_an_error(monkeypatch):
    monkeypatch.setattr(user_code, "MAX_PICKLE_BYTES", 1 << 20)
    table = b"x" * (2 << 20)
    with pytest.raises(RewardError, match=r"has 2 MiB with the variables that it uses, .* at most 1 MiB are sent"):
        reward_terms(lambda completion: len(table), kwargs={})


def test_async_functions_and_objects_travel_alone_and_in_sums():
    async def judge(completion):
        await asyncio.sleep(0)
        return len(completion["response"])

    class Judge:
        async def __call__(self, response, ground_truth):
            return {"overall": len(response), "same": response == ground_truth}

    async def all_of_them(reward_inputs):
        return [1.0 for _ in reward_inputs]

    assert parts_of(Judge(), "4", "four") == [{"overall": 1, "same": 1}, {"overall": 4, "same": 0}]
    mixed = [judge, (Judge(), 0.5), (all_of_them, 2), (lambda response, ground_truth: len(response), 10)]
    first, second = parts_of(mixed, "4", "four")
    assert first == {"overall": 13.5, "judge": 1, "Judge": 1, "Judge/same": 1, "all_of_them": 1, "lambda": 1}
    assert second == {"overall": 48, "judge": 4, "Judge": 4, "Judge/same": 0, "all_of_them": 1, "lambda": 4}


def test_one_of_several_may_be_a_file_or_a_dict_with_a_name_and_arguments(tmp_path):
    def scaled(response, ground_truth, scale):
        return scale * (response == ground_truth)

    def overall(response, ground_truth):
        return 1.0

    (tmp_path / "mine.py").write_text("def score(response, ground_truth): return 3.0")
    entry = {"function": scaled, "name": "right", "weight": 0.5, "kwargs": {"scale": 4}}
    terms = [entry, (f"{tmp_path}/mine.py:score", 1), ("math", 10), (overall, 0.0)]
    assert parts_of(terms, "4") == [
        {"overall": 5, "right": 4, "score": 3, "math": 0, "math/accuracy": 0, "math/format": 0, "overall_2": 1}
    ]
    assert describe_reward([entry, "math"]) == "0.5 * right + 1 * math"
    wrong = {
        "reward is 3; give a function": 3,
        "each entry is a function": [{"function": scaled, "wieght": 1}],
        "'much' as the weight of 'math'": [("math", "much")],
        "nan as the weight of 'len'": [(len, float("nan"))],
        "fits no contract": lambda data_source, solution: 1,
        "there is no file": "rewadr.py:f",
    }
    for message, reward in wrong.items():
        with pytest.raises(RewardError, match=message):
            reward_terms(reward, kwargs={})


def test_a_function_whose_module_a_worker_lacks_is_an_error_with_the_module(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("def score(completion): return 1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    source = reward_terms(only_here.score, kwargs={})
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
    with (
        reward_pool(tmp_path, reward=source) as pool,
        pytest.raises(RewardError, match=r"'score', given in Python, cannot be loaded .* \(it imports 'only_here'"),
    ):
        pool.ready()
