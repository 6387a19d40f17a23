"""The plan of a run, and sizes that are not set, with numbers computed by hand."""

import pytest

from trigon.config.load import load_config
from trigon.config.plan import fill_batch_sizes, find_long_warmups, make_plan
from trigon.config.schema import Config, OptimConfig
from trigon.errors import ConfigError
from trigon.training.optim import Schedule


def config(
    *, trainer: dict | None = None, optim: dict | None = None, rollout: dict | None = None, **actor: int
) -> Config:
    """2048 + 2096 tokens, steps of 256 prompts, updates of 64, n = 6, 15 epochs."""
    return Config.model_validate(
        {
            "data": {"rollout_batch_size": 256, "max_prompt_length": 2048, "max_response_length": 2096},
            "worker": {
                "actor": {
                    "global_batch_size": 64,
                    "micro_batch_size_per_device_for_update": 2,
                    "micro_batch_size_per_device_for_experience": 8,
                    "optim": optim or {},
                    **actor,
                },
                "rollout": {"n": 6, **(rollout or {})},
            },
            "trainer": trainer or {},
        }
    )


def test_a_run_of_2101_prompts():
    plan = make_plan(config(), num_train_prompts=2101)
    assert plan.num_train_prompts == 2101
    assert (plan.steps_per_epoch, plan.total_steps) == (8, 120)
    assert (plan.prompts_per_step, plan.prompts_per_update) == (256, 64)
    assert (plan.epochs_per_step, plan.updates_per_step, plan.total_updates) == (1, 4, 480)
    assert (plan.sequences_per_step, plan.sequences_per_update) == (1536, 384)
    assert (plan.tokens_per_update_pass, plan.tokens_per_experience_pass) == (8288, 33152)
    assert plan.max_tokens_per_step == 256 * (2048 + 6 * 2096)
    assert plan.warmup_updates == 0
    plan = make_plan(config(ppo_epochs=3), num_train_prompts=256)
    assert (plan.epochs_per_step, plan.updates_per_step, plan.total_updates) == (3, 12, 180)


def test_max_steps_overrides_the_epochs():
    assert make_plan(config(trainer={"max_steps": 7}), num_train_prompts=300).total_steps == 7
    assert make_plan(config(trainer={"max_steps": 700}), num_train_prompts=300).total_steps == 700
    assert make_plan(config(trainer={"total_epochs": 3}), num_train_prompts=300).total_steps == 3


def test_warm_up_is_given_in_steps_and_counted_in_updates():
    assert make_plan(config(optim={"lr_warmup_ratio": 0.1}), num_train_prompts=2101).warmup_updates == 48
    assert make_plan(config(optim={"lr_warmup_steps": 5}), num_train_prompts=2101).warmup_updates == 20
    both = {"lr_warmup_steps": 0, "lr_warmup_ratio": 0.5}
    assert make_plan(config(optim=both), num_train_prompts=2101).warmup_updates == 0
    assert make_plan(config(optim={"lr_warmup_steps": 120}), num_train_prompts=2101).warmup_updates == 480


def test_a_warm_up_longer_than_training_keeps_its_slope_and_is_warned_of():
    short = config(optim={"lr_warmup_steps": 10, "lr": 1e-6}, trainer={"max_steps": 1})
    plan = make_plan(short, num_train_prompts=2101)
    assert (plan.total_updates, plan.warmup_updates) == (4, 40)
    cosine = OptimConfig(lr=1.0, lr_scheduler_type="cosine")
    rates = [Schedule(cosine, plan.warmup_updates, plan.total_updates).learning_rate(k) for k in (1, 4)]
    assert rates == [1 / 40, 4 / 40]
    [warning] = find_long_warmups(short, plan)
    assert "worker.actor.optim.lr_warmup_steps is 10" in warning
    assert "up to 1e-07 of 1e-06" in warning
    long_enough = config(optim={"lr_warmup_steps": 1}, trainer={"max_steps": 1})
    assert find_long_warmups(long_enough, make_plan(long_enough, num_train_prompts=2101)) == []


@pytest.mark.parametrize(
    ("num_prompts", "proposal"),
    [
        (255, "set data.rollout_batch_size=192"),
        (63, "set data.rollout_batch_size=63 worker.actor.global_batch_size=63"),
        (0, "the dataset is empty, or all its rows were skipped"),
    ],
)
def test_an_epoch_must_fill_a_step(num_prompts, proposal):
    with pytest.raises(ConfigError) as caught:
        make_plan(config(), num_train_prompts=num_prompts)
    assert str(caught.value) == (
        f"an epoch has {num_prompts} usable training prompts, which do not fill one step of "
        f"data.rollout_batch_size=256; {proposal}"
    )


# -- sizes that are not set ------------------------------------------------------------------------

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
        (2000, (), (512, 512, None, 8)),
        (40, (f"{STEP}=8",), (8, 8, None, 8)),
        (40, (f"{UPDATE}=16",), (32, 16, None, 8)),
        (2000, (f"{UPDATE}=100",), (500, 100, None, 8)),
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
