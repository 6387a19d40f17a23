"""A reward function of validation: where it is used, and what names it."""

from contextlib import closing
from functools import partial

import pytest

from support.fake_runs import ALL_INTERVALS, changed, lines_of, open_run
from trigon.assemble.preflight import open_validation_rewards
from trigon.loop import train
from trigon.rewards.contract import RewardRequest
from trigon.rewards.load import find_reward
from trigon.rewards.pool import RewardPool
from trigon.system.secrets import VAL_REWARD

STRICT = "def main(response, ground_truth, bonus=0): return {'overall': 10 + bonus, 'strict': 1}"


@pytest.fixture
def load(load, tmp_path):
    """Return a function that loads a configuration; strict.py is the validation's function."""
    (tmp_path / "strict.py").write_text(STRICT)
    return partial(load, f"data.val_files={tmp_path / 'a.jsonl'}", "worker.reward.reward_function=math")


def test_validation_is_scored_by_its_own_function_and_training_by_the_other(parts, tmp_path):
    (tmp_path / "strict.py").write_text(STRICT)
    pool = RewardPool(
        find_reward(f"{tmp_path}/strict.py:main", {}), num_workers=1, timeout_seconds=10, max_failed_fraction=0
    )
    with (
        closing(pool),
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
    pool = open_validation_rewards(config)
    with closing(pool):
        [score] = pool.score([RewardRequest("4", 1, "4", "?", "stop", {})])
    assert score.parts == {"overall": 12, "strict": 12, "strict/strict": 1}
    assert open_validation_rewards(load()) is None
    assert (
        open_validation_rewards(config.model_copy(update={"data": config.data.model_copy(update={"val_files": ()})}))
        is None
    )
    assert (load().worker.reward.of_validation, load(f"{VAL_REWARD}=r1v").worker.reward.of_validation) == (
        "math",
        "r1v",
    )
