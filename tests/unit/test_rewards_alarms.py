"""Reward functions that limit their own time by signal.alarm, as math_verify does."""

from contextlib import closing

import pytest

from trigon.rewards.contract import RewardRequest
from trigon.rewards.load import find_reward
from trigon.rewards.pool import RewardPool

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


@pytest.fixture
def score(tmp_path):
    file = tmp_path / "alarms.py"
    file.write_text(FUNCTIONS)

    def score(name, responses):
        options = {"timeout_seconds": 20.0, "max_failed_fraction": 1.0, "concurrency": 16}
        with closing(RewardPool(find_reward(f"{file}:{name}", {}), num_workers=1, **options)) as pool:
            return pool.score([RewardRequest(text, 1, "7", "?", "stop", {}) for text in responses])

    return score


@pytest.mark.extended
@pytest.mark.parametrize("name", ["sequential", "concurrent", "OneObject"])
def test_a_function_that_sets_an_alarm_scores_every_completion(score, name):
    scores = score(name, ["7", "8", "endless", "7", *("7", "8") * 10])
    assert [each.outcome for each in scores] == ["ok"] * 24
    assert [each.overall for each in scores] == [1.0, 0.25, 0.5, 1.0, *(1.0, 0.25) * 10]
