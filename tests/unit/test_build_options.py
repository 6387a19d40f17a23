"""The settings that are made from a configuration."""

import pytest
import torch

from trigon.algorithms.importance import Correction
from trigon.algorithms.kl import AdaptiveKl
from trigon.algorithms.losses import LossSettings
from trigon.assemble.options import (
    kl_is_in_reward,
    make_advantage_settings,
    make_group_filter,
    make_initial_kl,
    make_intervals,
    make_loss_terms,
    make_sampling_params,
    make_validation_sampling_params,
    max_completion_tokens,
    needs_old_logprobs,
    needs_reference,
)
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.loop import Intervals
from trigon.models.dtypes import DTYPES
from trigon.rollout.filtering import GroupFilter
from trigon.training.step import LossTerms
from trigon.training.train_groups import AdvantageSettings
from trigon.types import SamplingParams


def make_config(**sections) -> Config:
    return Config(**sections)


def test_training_samples_with_the_rollout_section():
    config = make_config(
        data={"max_response_length": 77},
        worker={"rollout": {"n": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "ignore_eos": True, "seed": 3}},
    )
    assert make_sampling_params(config) == SamplingParams(
        n=5, temperature=0.7, top_p=0.9, top_k=20, max_tokens=77, ignore_eos=True, seed=3
    )


def test_validation_samples_as_training_without_overrides():
    config = make_config(data={"max_response_length": 77}, worker={"rollout": {"n": 5, "temperature": 0.7, "seed": 3}})
    assert make_validation_sampling_params(config) == make_sampling_params(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("temperature", 0.0),
        ("top_p", 0.5),
        ("top_k", 4),
        ("max_tokens", 9),
        ("ignore_eos", False),
        ("seed", 0),
    ],
)
def test_an_override_of_validation_applies_even_if_it_is_zero_and_changes_nothing_else(field, value):
    rollout = {"n": 5, "temperature": 0.7, "ignore_eos": True, "seed": 3}
    config = make_config(worker={"rollout": {**rollout, "val_override_config": {field: value}}})
    training, validation = make_sampling_params(config), make_validation_sampling_params(config)
    assert getattr(validation, field) == value
    assert getattr(training, field) != value
    others = [name for name in SamplingParams.__slots__ if name != field]
    assert [getattr(validation, name) for name in others] == [getattr(training, name) for name in others]


@pytest.mark.parametrize(("val_only", "most"), [(False, 64), (True, 9)])
def test_completions_are_those_of_validation_only_if_nothing_else_is_sampled(val_only, most):
    config = make_config(
        data={"max_response_length": 64},
        worker={"rollout": {"val_override_config": {"max_tokens": 9}}},
        trainer={"val_only": val_only},
    )
    assert max_completion_tokens(config) == most


KL = [
    # disable_kl, kl_coef, use_kl_loss -> needs a reference, in the reward, estimator in the loss
    (False, 0.01, False, True, True, None),
    (False, 0.01, True, True, False, "low_var_kl"),
    (False, 0.0, False, False, False, None),
    (False, 0.0, True, False, False, None),
    (True, 0.01, False, False, False, None),
    (True, 0.01, True, False, False, None),
]


@pytest.mark.parametrize(("disable_kl", "kl_coef", "use_kl_loss", "needs", "in_reward", "in_loss"), KL)
def test_the_kl_is_in_the_reward_or_in_the_loss(disable_kl, kl_coef, use_kl_loss, needs, in_reward, in_loss):
    config = make_config(
        algorithm={
            "disable_kl": disable_kl,
            "kl_coef": kl_coef,
            "use_kl_loss": use_kl_loss,
            "kl_penalty": "low_var_kl",
        }
    )
    assert needs_reference(config) == needs
    assert kl_is_in_reward(config) == in_reward
    assert make_loss_terms(config).kl_estimator == in_loss


@pytest.mark.parametrize(
    ("global_batch_size", "algorithm", "needed"),
    [
        (8, {"disable_kl": True}, False),
        (4, {"disable_kl": True}, True),  # two updates of a step
        (8, {"use_kl_loss": True}, False),
        (8, {"use_kl_loss": False}, True),
        (8, {"use_kl_loss": False, "kl_penalty": "full"}, False),  # computed without sampled log-probabilities
    ],
)
def test_old_logprobs_are_needed_for_several_updates_or_a_sampled_kl_in_the_reward(
    global_batch_size, algorithm, needed
):
    config = make_config(
        data={"rollout_batch_size": 8}, algorithm=algorithm, worker={"actor": {"global_batch_size": global_batch_size}}
    )
    assert needs_old_logprobs(config, make_plan(config, num_train_prompts=8)) == needed


def test_the_loss_has_the_options_of_the_actor_section():
    config = make_config(
        data={"max_response_length": 77},
        algorithm={
            "use_kl_loss": True,
            "kl_coef": 0.02,
            "kl_penalty": "mse",
            "mismatch_correction": "mask",
            "mismatch_level": "sequence",
            "mismatch_low": 0.9,
            "mismatch_high": 1.1,
        },
        worker={
            "actor": {
                "clip_ratio_low": 0.1,
                "clip_ratio_high": 0.4,
                "clip_ratio_dual": 5.0,
                "loss_avg_mode": "seq_fixed",
                "loss_type": "cispo",
                "cispo_cap": 6.0,
                "tau_positive": 1.5,
                "tau_negative": 2.5,
                "entropy_coeff": 0.003,
            }
        },
    )
    assert make_loss_terms(config) == LossTerms(
        policy=LossSettings(
            kind="cispo", clip_low=0.1, clip_high=0.4, clip_dual=5.0, cap=6.0, tau_positive=1.5, tau_negative=2.5
        ),
        averaging="seq_fixed",
        fixed_length=77,
        kl_estimator="mse",
        kl_coefficient=0.02,
        entropy_coefficient=0.003,
        correction=Correction("mask", "sequence", 0.9, 1.1),
    )


def test_options_of_the_loss_that_are_not_set_have_their_defaults():
    terms = make_loss_terms(make_config(worker={"actor": {"clip_ratio_high": 0.4, "loss_fixed_length": 9}}))
    assert (terms.policy.cap, terms.fixed_length, terms.correction, terms.entropy_coefficient) == (1.4, 9, None, 0.0)


def test_the_group_filter_has_the_options_of_online_filtering():
    assert make_group_filter(make_config()) is None
    filtering = {"online_filtering": True, "filter_key": "accuracy", "filter_low": 0.1, "filter_high": 0.8}
    data = {"rollout_batch_size": 8}
    config = make_config(data=data, algorithm=filtering, trainer={"max_try_make_batch": -1})
    assert make_group_filter(config) == GroupFilter(
        key="accuracy", low=0.1, high=0.8, prompts_per_round=8, max_rounds=0, keep_surplus=False
    )
    config = make_config(
        data={**data, "mini_rollout_batch_size": 3},
        algorithm={**filtering, "filter_surplus": "keep"},
        trainer={"max_try_make_batch": 5},
    )
    group_filter = make_group_filter(config)
    assert (group_filter.prompts_per_round, group_filter.max_rounds, group_filter.keep_surplus) == (3, 5, True)


def test_the_advantage_settings_have_the_options_of_the_algorithm():
    settings = make_advantage_settings(make_config(algorithm={"disable_kl": True}))
    assert settings == AdvantageSettings(
        estimator="grpo", gamma=1.0, weights=None, kl_in_reward=None, mask_overlong=False
    )
    algorithm = {
        "adv_estimator": "gdpo",
        "gamma": 0.9,
        "reward_weights": {"accuracy": 2.0},
        "kl_penalty": "full",
        "overlong_filtering": True,
    }
    assert make_advantage_settings(make_config(algorithm=algorithm)) == AdvantageSettings(
        "gdpo", 0.9, {"accuracy": 2.0}, "full", True
    )


@pytest.mark.parametrize(("kl_type", "horizon"), [("fixed", 0.0), ("adaptive", 500.0)])
def test_only_an_adaptive_kl_has_a_horizon(kl_type, horizon):
    config = make_config(algorithm={"kl_type": kl_type, "kl_coef": 0.02, "kl_target": 0.3, "kl_horizon": 500.0})
    assert make_initial_kl(config) == AdaptiveKl(coefficient=0.02, target=0.3, horizon=horizon)


@pytest.mark.parametrize("never", [0, -1])
def test_a_frequency_of_0_or_minus_1_is_never(never):
    config = make_config(
        data={"val_files": "owner/data"}, trainer={"val_freq": never, "save_freq": never, "val_generations_to_log": 3}
    )
    assert make_intervals(config, can_validate=True) == Intervals(
        validate_first=True,
        validate_only=False,
        validate_every=0,
        validate_last=True,
        save_every=0,
        generations_shown=3,
        train_samples_every=0,
        token_groups=config.trainer.rollout_tokens,
    )


def test_without_validation_prompts_there_is_no_validation():
    config = make_config(trainer={"val_freq": 5, "val_before_train": True, "save_freq": 2})
    intervals = make_intervals(config, can_validate=False)
    assert (intervals.validate_first, intervals.validate_every, intervals.validate_last) == (False, 0, False)
    assert intervals.save_every == 2


def test_the_intervals_are_those_of_the_trainer_section():
    config = make_config(trainer={"val_freq": 5, "val_before_train": False, "save_freq": 2, "val_only": True})
    intervals = make_intervals(config, can_validate=True)
    assert (intervals.validate_first, intervals.validate_only, intervals.validate_every) == (False, True, 5)


def test_every_dtype_option_has_a_torch_dtype():
    assert {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16} == DTYPES
    for name in ("float32", "bfloat16", "float16"):
        dtype = make_config(worker={"rollout": {"dtype": name}}).worker.rollout.dtype
        assert DTYPES[dtype] == getattr(torch, name)
