"""Reward functions that limit their own time by signal.alarm, as math_verify does."""

import pytest

from support.rewards import requests, reward_pool

FUNCTIONS = """
import asyncio
import signal

def compare(response, ground_truth):
    def stop(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        while response == "endless":
            pass
        return 1.0 if response == ground_truth else 0.25
    except TimeoutError:
        return 0.5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

def sequential(response, ground_truth):
    return compare(response, ground_truth)

async def concurrent(reward_input):
    await asyncio.sleep(0.01)
    return compare(reward_input["response"], reward_input["ground_truth"])

class OneObject:
    def __call__(self, reward_inputs):
        return [compare(each["response"], each["ground_truth"]) for each in reward_inputs]
"""


@pytest.mark.extended
@pytest.mark.parametrize("name", ["sequential", "concurrent", "OneObject"])
def test_a_function_that_sets_an_alarm_scores_every_completion(tmp_path, name):
    with reward_pool(tmp_path, FUNCTIONS, function=name, concurrency=16) as pool:
        scores = pool.score(requests("7", "8", "endless", "7", *("7", "8") * 10, ground_truth="7"))
    assert [each.outcome for each in scores] == ["ok"] * 24
    assert [each.overall for each in scores] == [1.0, 0.25, 0.5, 1.0, *(1.0, 0.25) * 10]
