"""Several reward functions with weights: configuration, scores, secrets, resuming."""

import json
import runpy
from contextlib import closing
from dataclasses import replace

import pytest

from support.rewards import requests, reward_pool
from trigon.assemble.origin import KEY, Origin
from trigon.assemble.preflight import open_rewards
from trigon.checkpoint.store import Checkpoint
from trigon.config.load import dump_config, load_config
from trigon.config.schema import WeightedReward, describe_rewards, reward_specs
from trigon.errors import CheckpointError, ConfigError
from trigon.report.run import RunRecord
from trigon.rewards.callables import reward_terms
from trigon.system.secrets import MASKED, REWARD, hide
from trigon.tools.plan.call import load_planned
from trigon.tools.push.push import _describe_reward

FUNCTIONS = """
import asyncio

def exact(response, ground_truth):
    return {"overall": float(response == ground_truth), "characters": len(response)}

def brief(reward_inputs, limit):
    return [{"overall": float(each["response_length"] < limit)} for each in reward_inputs]

async def judge(reward_input, key="none"):
    await asyncio.sleep(0.01)
    if reward_input["response"] == "fail":
        raise ValueError("no")
    return len(key)
"""
SECRET = "sk-a1b2c3d4e5f6a1b2c3d4e5f6"


@pytest.fixture(autouse=True)
def _functions(tmp_path):
    (tmp_path / "rewards.py").write_text(FUNCTIONS)


def entries(folder, *, weight=0.5, limit=10, key="k"):
    return [
        {"function": f"{folder}/rewards.py:exact"},
        {"function": f"{folder}/rewards.py:brief", "weight": weight, "kwargs": {"limit": limit}},
        {"function": f"{folder}/rewards.py:judge", "name": "style", "weight": -2, "kwargs": {"key": key}},
    ]


def override(value):
    return f"{REWARD}={json.dumps(value)}"


def scores_of(config, *responses):
    with closing(open_rewards(config)) as pool:
        return pool.score([replace(each, response_length=len(each.response)) for each in requests(*responses)])


@pytest.mark.faults
def test_functions_of_all_contracts_are_summed_and_a_failure_costs_its_completion(load, tmp_path):
    config = load(override(entries(tmp_path)), "worker.reward.max_failed_fraction=1")
    right, failed, long = scores_of(config, "4", "fail", "a long answer")
    parts = {"overall": -0.5, "exact": 1, "exact/characters": 1, "brief": 1, "style": 1}
    assert right.parts == parts
    assert long.parts == {"overall": -2.0, "exact": 0, "exact/characters": 13, "brief": 0, "style": 1}
    assert (failed.outcome, failed.error) == ("failed", "ValueError: no (rewards.py:13)")


def test_yaml_and_the_command_line_take_the_same_list_and_texts_stay_texts(load, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("worker:\n  reward:\n    reward_function:\n      - math\n      - {function: r1v, weight: 2}\n")
    from_file = load(path=path).worker.reward.reward_function
    assert from_file == (WeightedReward(function="math"), WeightedReward(function="r1v", weight=2))
    assert load(f"{REWARD}=[math, {{function: r1v, weight: 2}}]").worker.reward.reward_function == from_file
    assert load(f"{REWARD}=math").worker.reward.reward_function == "math"
    assert reward_specs(from_file) == ("math", "r1v")
    assert (describe_rewards(from_file), describe_rewards("math")) == ("1 * math + 2 * r1v", "math")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[]", "worker.reward.reward_function is not set"),
        ("[{weight: 1}]", "but must be text, or a list, each a mapping of function, name, weight, kwargs, or null"),
        ("[{function: math, weigth: 1}]", "but must be text, or a list"),
        ("[{function: math, weight: much}]", "but must be text, or a list"),
        ("[{function: math, weight: .nan}]", "but must be text, or a list"),
        ("[math, nothing.py:main]", "worker.reward.reward_function[1]: there is no nothing.py"),
    ],
)
def test_a_list_that_is_none_is_a_problem_that_says_what_is_one(load, value, problem):
    with pytest.raises(ConfigError) as caught:
        load(f"{REWARD}={value}")
    assert problem in str(caught.value)


def test_a_secret_argument_is_written_nowhere_and_asked_for_again(load, tmp_path, monkeypatch):
    value = entries(tmp_path)
    value[2]["kwargs"] = {"api_key": SECRET, "key": "env:JUDGE_KEY"}
    config = load(override(value))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    assert SECRET not in (folder / "config.yaml").read_text()
    written = RunRecord(folder).config()["worker"]["reward"]["reward_function"]
    assert written[2]["kwargs"] == {"api_key": MASKED, "key": "env:JUDGE_KEY"}
    with pytest.raises(ConfigError, match=r"reward_function\[2\]\.kwargs\.api_key .* or env:NAME, which reads it"):
        load_config(folder / "config.yaml", [])
    planned = load_planned(folder / "config.yaml", []).config.worker.reward.reward_function
    assert [(entry.weight, dict(entry.kwargs)) for entry in planned] == [(1, {}), (0.5, {}), (-2, {})]
    published = hide(REWARD, written)
    assert published[2] == {
        "function": "rewards.py:judge", "name": "style", "weight": -2.0,
        "kwargs": {"api_key": "(hidden)", "key": "env:JUDGE_KEY"},
    }  # fmt: skip
    assert _describe_reward(written) == "1 * rewards.py:exact + 0.5 * rewards.py:brief + -2 * rewards.py:judge"


@pytest.mark.faults
def test_a_resumed_run_notices_other_code_weights_and_arguments(load, tmp_path):
    def origin(checkpoint=None, **changes):
        result = Origin(load(override(entries(tmp_path, **changes))), checkpoint, lambda line: None)
        result.add_options(None)
        return result

    progress = json.loads(json.dumps({KEY: origin().state()}))
    checkpoint = Checkpoint(7, tmp_path, progress, None)
    assert origin(checkpoint).accepted == {}
    with pytest.raises(CheckpointError, match=r"reward_function was .*0\.5 \* .* and is now .*0\.6 \* "):
        origin(checkpoint, weight=0.6)
    with pytest.raises(CheckpointError, match=r"reward_function_kwargs has other content than before \(brief\.limit\)"):
        origin(checkpoint, limit=11)
    (tmp_path / "rewards.py").write_text(FUNCTIONS.replace("len(key)", "2 * len(key)"))
    with pytest.raises(CheckpointError, match=r"reward_function has other content than before \(code\)"):
        origin(checkpoint)


NONE_FOR_SOME = """
import asyncio

REWARD_TYPE = "sequential"

def accuracy(reward_input):
    return None if reward_input["response"] in ("table", "none") else 1.0

def length(reward_input):
    return None if reward_input["response"] in ("alone", "none") else {"overall": 0.5, "words": 2}

async def judge(reward_input):
    await asyncio.sleep(0)
    return None if reward_input["response"] in ("alone", "none") else 0.25
"""


@pytest.mark.parametrize("third", ["judge", "length"], ids=["async", "sync"])
def test_a_function_that_returns_none_does_not_apply_and_the_others_weigh_as_much_together(load, tmp_path, third):
    path = tmp_path / "some.py"
    path.write_text(NONE_FOR_SOME)
    functions = [
        {"function": f"{path}:accuracy", "weight": 2},
        {"function": f"{path}:length", "weight": 1},
        {"function": f"{path}:{third}", "name": "third", "weight": -1},
    ]
    config = load(override(functions), "worker.reward.max_failed_fraction=1")
    every, alone, table, none = scores_of(config, "all", "alone", "table", "none")
    value = 0.25 if third == "judge" else 0.5
    assert every.overall == 2 + 0.5 - value
    assert not any("applies" in part for part in every.parts)
    assert alone.parts == {
        "overall": 4.0, "accuracy": 1.0, "accuracy/applies": 1.0, "length/applies": 0.0, "third/applies": 0.0
    }  # fmt: skip
    assert table.overall == 2 * (0.5 - value)
    assert "accuracy" not in table.parts
    assert (none.outcome, "no function applies" in none.error) == ("failed", True)


SLOW = """
import asyncio

async def judge(reward_input):
    await asyncio.sleep(0.6)
    return 1.0

def brief(reward_inputs):
    return [0.5 for _ in reward_inputs]
"""


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["batch", "group"])
def test_calls_that_wait_for_each_other_do_not_time_out(tmp_path, kind):
    # 4 calls of each judge, 2 at a time: each takes 0.6 s of its second.
    path = tmp_path / "slow.py"
    path.write_text(f"{SLOW}\nbrief.REWARD_TYPE = {kind!r}\n")
    namespace = runpy.run_path(str(path))
    terms = reward_terms([namespace["judge"], (namespace["judge"], 2), namespace["brief"]], kwargs={})
    with (
        reward_pool(tmp_path, reward=terms, timeout_seconds=1.0, concurrency=2) as pool,
        pool.scoring(num_completions=4) as scoring,
    ):
        scoring.add(0, requests("0", "1"))
        scoring.add(2, requests("2", "3"))
        scores = scoring.result()
    assert [(score.outcome, score.overall) for score in scores] == [("ok", 3.5)] * 4
