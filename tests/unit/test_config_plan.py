"""The plan of a run, with numbers computed by hand."""

import pytest

from trigon.config.plan import context_length, find_long_warmups, longest_sequence, make_plan, suggest_batch_sizes
from trigon.config.schema import Config
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


def test_max_steps_overrides_the_epochs():
    assert make_plan(config(trainer={"max_steps": 7}), num_train_prompts=300).total_steps == 7
    assert make_plan(config(trainer={"max_steps": 700}), num_train_prompts=300).total_steps == 700
    assert make_plan(config(trainer={"total_epochs": 3}), num_train_prompts=300).total_steps == 3


def test_ppo_epochs_multiply_the_number_of_updates():
    plan = make_plan(config(ppo_epochs=3), num_train_prompts=256)
    assert (plan.epochs_per_step, plan.updates_per_step, plan.total_updates) == (3, 12, 180)


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
    rates = [Schedule(1.0, "cosine", plan.warmup_updates, plan.total_updates, 0.0).learning_rate(k) for k in (1, 4)]
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
        (64, "set data.rollout_batch_size=64"),
        (63, "set data.rollout_batch_size=63 worker.actor.global_batch_size=63"),
        (1, "set data.rollout_batch_size=1 worker.actor.global_batch_size=1"),
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


def test_the_context_length_is_the_longest_sequence_of_training_and_validation():
    assert (longest_sequence(config()), context_length(config())) == (4144, 4144)
    assert longest_sequence(config(rollout={"val_override_config": {"max_tokens": 4000}})) == 6048
    assert longest_sequence(config(rollout={"val_override_config": {"max_tokens": 10}})) == 4144
    assert context_length(config(rollout={"max_model_len": 5000})) == 5000


def test_suggested_batch_sizes_are_the_nearest_valid_ones():
    assert suggest_batch_sizes(100, 64) == ([64, 128], [50, 100])
    assert suggest_batch_sizes(3, 2) == ([2, 4], [1, 3])
    assert suggest_batch_sizes(2, 3) == ([3], [2])
