"""A reward function of validation: where it is used, and what names it."""

from contextlib import closing
from functools import partial

import pytest

from support.fake_runs import ALL_INTERVALS, changed, lines_of, open_run
from support.rewards import requests, reward_pool
from trigon.assemble.preflight import open_validation_rewards
from trigon.config.options import with_options
from trigon.loop import train
from trigon.system.secrets import VAL_REWARD

STRICT = "def main(response, ground_truth, bonus=0): return {'overall': 10 + bonus, 'strict': 1}"


@pytest.fixture
def load(load, tmp_path):
    """Return a function that loads a configuration; strict.py is the validation's function."""
    (tmp_path / "strict.py").write_text(STRICT)
    return partial(load, f"data.val_files={tmp_path / 'a.jsonl'}", "worker.reward.reward_function=math")


def test_validation_is_scored_by_its_own_function_and_training_by_the_other(parts, tmp_path):
    with (
        reward_pool(tmp_path, STRICT, max_failed_fraction=0) as pool,
        open_run(parts, tmp_path / "own", **(ALL_INTERVALS | {"save_freq": 0})) as run,
    ):
        train(changed(run, val_rewards=pool), None)
    with open_run(parts, tmp_path / "same", **(ALL_INTERVALS | {"save_freq": 0})) as run:
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
    with closing(open_validation_rewards(config)) as pool:
        [score] = pool.score(requests("4"))
    assert score.parts == {"overall": 12, "strict": 12, "strict/strict": 1}
    assert open_validation_rewards(load()) is None
    assert open_validation_rewards(with_options(config, {"data.val_files": ()})) is None
    own = load(f"{VAL_REWARD}=r1v").worker.reward
    assert (load().worker.reward.of_validation, own.of_validation) == ("math", "r1v")
