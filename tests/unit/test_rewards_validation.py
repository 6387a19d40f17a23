"""A reward function of validation: where it is used, and what names it."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from support.fake_runs import ALL_INTERVALS, changed, lines_of, open_run
from trigon.api import read_arguments
from trigon.assemble.origin import KEY, Origin
from trigon.assemble.rewards import open_validation_rewards
from trigon.checkpoint.store import Checkpoint
from trigon.config.load import dump_config
from trigon.config.rewards import validation_option
from trigon.errors import CheckpointError, ConfigError
from trigon.loop import train
from trigon.rewards.contract import RewardRequest
from trigon.rewards.pool import RewardPool
from trigon.system.secrets import VAL_REWARD, mask
from trigon.tools.eval.settings import EvaluationOptions
from trigon.tools.plan.configuration import load_planned

STRICT = "def main(response, ground_truth, bonus=0): return {'overall': 10 + bonus, 'strict': 1}"


@pytest.fixture
def load(load, tmp_path):
    """Return a function that loads a configuration; strict.py is the validation's function."""
    (tmp_path / "strict.py").write_text(STRICT)
    return partial(load, f"data.val_files={tmp_path / 'a.jsonl'}", "worker.reward.reward_function=math")


def test_validation_is_scored_by_its_own_function_and_training_by_the_other(parts, tmp_path):
    (tmp_path / "strict.py").write_text(STRICT)
    pool = RewardPool(f"{tmp_path}/strict.py:main", kwargs={}, num_workers=1, timeout_seconds=10, max_failed_fraction=0)
    with (
        closing(pool),
        open_run(parts, tmp_path / "own", intervals=replace(ALL_INTERVALS, save_every=0)) as run,
    ):
        train(changed(run, val_rewards=pool), None)
    with open_run(parts, tmp_path / "same", intervals=replace(ALL_INTERVALS, save_every=0)) as run:
        train(run, None)
    own, same = lines_of(tmp_path / "own"), lines_of(tmp_path / "same")
    validated = [step for step in own if "val/reward_score" in own[step]]
    assert validated == [step for step in same if "val/reward_score" in same[step]] == [0, 2, 3]
    assert {own[step]["val/reward_score"] for step in validated} == {10.0}
    assert {own[step]["val/strict_reward"] for step in validated} == {1.0}
    assert all("val/accuracy_reward" not in own[step] for step in validated)

    def of_training(lines):
        return [{k: v for k, v in line.items() if not k.startswith("val/")} for line in lines.values()]

    assert of_training(own) == of_training(same)


def test_the_option_opens_workers_of_its_own_with_arguments_in_the_list(load, tmp_path):
    config = load(f"{VAL_REWARD}=[{{function: {tmp_path}/strict.py, name: strict, kwargs: {{bonus: 2}}}}]")
    pool = open_validation_rewards(config)
    with closing(pool):
        [score] = pool.score([RewardRequest("4", 1, "4", "?", "stop", {})])
    assert score.parts == {"overall": 12, "strict": 12, "strict/strict": 1}
    assert open_validation_rewards(load()) is None
    assert (
        open_validation_rewards(config.model_copy(update={"data": config.data.model_copy(update={"val_files": ()})}))
        is None
    )
    assert (validation_option(load()), validation_option(load(f"{VAL_REWARD}=r1v"))) == ("math", "r1v")


def test_a_missing_file_and_secrets_of_arguments_are_treated_as_those_of_training(load, tmp_path):
    with pytest.raises(ConfigError, match=r"val_reward_function: there is no strct\.py"):
        load(f"{VAL_REWARD}=strct.py:main")
    value = {"function": "math", "kwargs": {"api_key": "sk-a1b2c3d4e5f6a1b2c3d4e5f6"}}
    assert "sk-" not in str(mask("", {"worker": {"reward": {"val_reward_function": (value,)}}}))
    (tmp_path / "config.yaml").write_text(dump_config(load(f"{VAL_REWARD}=[math]")))
    assert load_planned(tmp_path / "config.yaml", []).config.worker.reward.val_reward_function is None


def test_an_evaluation_with_a_reward_function_uses_that_one():
    assert "worker.reward.val_reward_function=null" in EvaluationOptions(reward="math").overrides()
    assert not any("val_reward" in each for each in EvaluationOptions(n=4).overrides())


@pytest.mark.faults
def test_a_resumed_run_notices_another_one(load, tmp_path):
    def origin(checkpoint=None, *overrides):
        result = Origin(load(*overrides), checkpoint, lambda line: None)
        result.add_options(None)
        return result

    own = f"{VAL_REWARD}={tmp_path}/strict.py:main"
    with_own, without = (Checkpoint(7, tmp_path, {KEY: origin(None, *each).state()}, None) for each in ([own], []))
    assert origin(with_own, own).accepted == origin(without).accepted == []
    with pytest.raises(CheckpointError, match=r"val_reward_function was null, and is now .*strict\.py:main"):
        origin(without, own)
    with pytest.raises(CheckpointError, match=r"val_reward_function was .*strict\.py:main, and is now null"):
        origin(with_own)
    (tmp_path / "strict.py").write_text(STRICT.replace("10", "11"))
    with pytest.raises(CheckpointError, match=r"val_reward_function has other content than then \(code\)"):
        origin(with_own, own)
    earlier = {name: value for name, value in without.progress[KEY]["contents"].items() if name != VAL_REWARD}
    record = {**without.progress[KEY], "contents": earlier}
    assert origin(Checkpoint(7, tmp_path, {KEY: record}, None), own).accepted == []  # of a version without it


def test_a_python_function_is_given_as_that_of_training_is():
    def strict(response, ground_truth):
        return 1.0

    given = read_arguments(
        model="owner/model",
        data=[{"prompt": "?", "answer": "1"}],
        reward="math",
        val_data=[{"prompt": "?", "answer": "1"}],
        val_reward=[(strict, 2)],
        config=None,
        loggers=None,
        options={"worker.rollout.n": 4, "data.rollout_batch_size": 8, "worker.actor.global_batch_size": 8},
        keyword_options={},
    )
    assert given.loaded.config.worker.reward.val_reward_function == "python:2 * strict"
    assert given.reward is None
    assert [(term.name, term.weight) for term in given.val_reward] == [("strict", 2.0)]
