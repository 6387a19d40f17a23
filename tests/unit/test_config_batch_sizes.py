"""Group and batch sizes that are not set: they follow from the data and from each other."""

from pathlib import Path

import pytest

from trigon.config.batch_sizes import fill_batch_sizes
from trigon.config.compared import compared_options
from trigon.config.load import load_config
from trigon.config.plan import make_plan
from trigon.errors import ConfigError

ROOT = Path(__file__).parents[2]
NEEDED = (
    "data.train_files=owner/train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
)
STEP, UPDATE = "data.rollout_batch_size", "worker.actor.global_batch_size"
CRITIC, GROUP = "worker.critic.global_batch_size", "worker.rollout.n"
GAE = "algorithm.adv_estimator=gae"


def sizes(num_prompts, *overrides):
    """Return the prompts of a step, of an update, of the critic's update, and the group size."""
    config, _ = fill_batch_sizes(load_config(None, (*NEEDED, *overrides)).config, num_prompts)
    worker = config.worker
    return (
        config.data.rollout_batch_size,
        worker.actor.global_batch_size,
        worker.critic.global_batch_size,
        worker.rollout.n,
    )


@pytest.mark.parametrize(
    ("num_prompts", "overrides", "expected"),
    [
        (40, (), (40, 40, None, 8)),
        (3, (), (3, 3, None, 8)),
        (2000, (), (512, 512, None, 8)),
        (40, (f"{GROUP}=5",), (40, 40, None, 5)),
        (40, (f"{STEP}=8",), (8, 8, None, 8)),
        (40, (f"{UPDATE}=16",), (32, 16, None, 8)),
        (2000, (f"{UPDATE}=100",), (500, 100, None, 8)),
        (2000, (f"{UPDATE}=600",), (600, 600, None, 8)),
        (40, (f"{STEP}=32", f"{UPDATE}=16"), (32, 16, None, 8)),
        # EasyR1's defaults: 256 prompts of an update; one completion where none are compared.
        (2000, (f"{STEP}=512",), (512, 256, None, 8)),
        (2000, (f"{STEP}=300",), (300, 300, None, 8)),
        (40, ("algorithm.adv_estimator=remax",), (40, 40, None, 1)),
        (40, (GAE,), (40, 40, 40, 1)),
        (2000, (GAE, f"{STEP}=512"), (512, 256, 256, 1)),
        (40, (GAE, f"{UPDATE}=4", f"{CRITIC}=6"), (36, 4, 6, 1)),
        (40, (GAE, f"{UPDATE}=4", "worker.critic.share_trunk=true"), (40, 4, 4, 1)),
    ],
)
def test_sizes_that_are_not_set_follow_from_the_data_and_from_each_other(num_prompts, overrides, expected):
    assert sizes(num_prompts, *overrides) == expected
    plan = make_plan(load_config(None, (*NEEDED, *overrides)).config, num_train_prompts=num_prompts)
    per_step, per_update, per_critic_update, group = expected
    assert (plan.prompts_per_step, plan.prompts_per_update) == (per_step, per_update)
    assert plan.sequences_per_step == per_step * group
    assert plan.critic.prompts_per_update == (per_critic_update or 1)
    assert plan.total_steps == num_prompts // per_step * 15


def test_a_file_of_easyr1_keeps_its_sizes():
    config = load_config(ROOT / "examples" / "config.yaml", NEEDED).config
    filled, chosen = fill_batch_sizes(config, 2101)
    assert (filled, chosen) == (config, {})
    assert sizes(2101, f"{STEP}=512", f"{UPDATE}=128", f"{GROUP}=5") == (512, 128, None, 5)


def test_an_update_that_the_data_does_not_fill_is_an_error_with_a_remedy():
    config = load_config(None, (*NEEDED, f"{UPDATE}=64")).config
    with pytest.raises(ConfigError, match=rf"{STEP}=40 {UPDATE}=40"):
        make_plan(config, num_train_prompts=40)


def test_validation_and_evaluation_sample_one_completion_unless_it_is_set():
    config = load_config(None, (*NEEDED, "trainer.val_only=true", "data.val_files=owner/val")).config
    assert compared_options(config)[GROUP] == 1


def test_sizes_are_compared_on_resuming_once_they_are_known():
    unknown = compared_options(load_config(None, NEEDED).config)
    assert {STEP, UPDATE}.isdisjoint(unknown)
    known = compared_options(fill_batch_sizes(load_config(None, NEEDED).config, 40)[0])
    assert (known[STEP], known[UPDATE], known[GROUP]) == (40, 40, 8)
