"""Values that follow from options: those of a section, and those of several sections."""

from pathlib import Path

import pytest

from trigon.assemble.options import (
    make_sampling_params,
    make_validation_sampling_params,
    max_completion_tokens,
    needs_old_logprobs,
)
from trigon.config.options import options, value_of, with_options
from trigon.config.plan import make_plan
from trigon.config.schema import DEVICE_DEFAULTS, Config
from trigon.types import SamplingParams

GAE = {"algorithm.adv_estimator": "gae"}
KL_LOSS = {"algorithm.use_kl_loss": True}
SEPARATE = {"worker.hybrid_engine": False}
FP32 = {"worker.rollout.dtype": "fp32", "worker.actor.fsdp.mp_param_dtype": "fp32"}
LORA = {"worker.actor.model.lora.rank": 8}


def made(*changes: dict) -> Config:
    return with_options(Config(), {name: value for each in changes for name, value in each.items()})


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("worker.actor.weight_dtype", {}, "fp32"),
        ("worker.actor.weight_dtype", {"worker.actor.fsdp.torch_dtype": "fp16"}, "fp16"),
        # With LoRA the frozen weights have the format of the passes unless it is configured.
        ("worker.actor.weight_dtype", LORA, "bf16"),
        ("worker.actor.weight_dtype", LORA | {"worker.actor.fsdp.mp_param_dtype": "fp32"}, "fp32"),
        ("worker.actor.weight_dtype", LORA | {"worker.actor.fsdp.torch_dtype": "fp32"}, "fp32"),
        ("worker.critic.weight_dtype", {"worker.critic.fsdp.torch_dtype": "bf16"}, "bf16"),
        ("worker.ref.dtype", {}, "bf16"),
        ("worker.ref.dtype", {"worker.ref.fsdp.torch_dtype": "fp16"}, "fp16"),
        ("parity_tolerance", FP32, 1e-3),
        ("parity_tolerance", FP32 | {"worker.actor.fsdp.torch_dtype": "bf16"}, 0.1),
        ("parity_tolerance", FP32 | {"worker.rollout.dtype": "bf16"}, 0.1),
        ("parity_tolerance", FP32 | {"worker.actor.fsdp.mp_param_dtype": "bf16"}, 0.1),
        ("parity_tolerance", {}, 0.1),
        ("parity_tolerance", FP32 | {"worker.rollout.parity_tolerance": 0.5}, 0.5),
        ("worker.actor.max_cispo_weight", {"worker.actor.clip_ratio_high": 0.4}, 1.4),
        ("worker.actor.max_cispo_weight", {"worker.actor.cispo_cap": 6.0}, 6.0),
        ("loss_fixed_length", {"data.max_response_length": 77}, 77),
        ("loss_fixed_length", {"data.max_response_length": 77, "worker.actor.loss_fixed_length": 9}, 9),
        ("prompts_per_round", {"data.rollout_batch_size": 8}, 8),
        ("prompts_per_round", {"data.rollout_batch_size": 8, "data.mini_rollout_batch_size": 3}, 3),
        ("trainer.run_folder", {}, Path("checkpoints/easy_r1/demo")),
        ("trainer.run_folder", {"trainer.save_checkpoint_path": "/runs/x"}, Path("/runs/x")),
        ("longest_sequence", {}, 1024),
        ("longest_sequence", {"worker.rollout.val_override_config.max_tokens": 4000}, 4512),
        ("longest_sequence", {"worker.rollout.val_override_config.max_tokens": 10}, 1024),
        ("context_length", {}, 1024),
        ("context_length", {"worker.rollout.max_model_len": 5000}, 5000),
        ("validates_first", {}, False),
        ("validates_first", {"data.val_files": ("a",)}, True),
        ("validates_first", {"data.val_files": ("a",), "trainer.val_before_train": False}, False),
        ("group_size", {}, 8),
        ("group_size", {"trainer.val_only": True}, 1),
        ("group_size", {"worker.rollout.n": 5, "trainer.val_only": True}, 5),
        # the KL is in the reward or in the loss
        ("algorithm.kl_in_reward", {}, "kl"),
        ("algorithm.kl_in_reward", KL_LOSS, None),
        ("algorithm.kl_in_reward", {"algorithm.kl_coef": 0}, None),
        ("algorithm.kl_in_loss", {}, None),
        ("algorithm.kl_in_loss", KL_LOSS | {"algorithm.kl_penalty": "low_var_kl"}, "low_var_kl"),
        ("algorithm.kl_in_loss", KL_LOSS | {"algorithm.kl_coef": 0}, None),
        ("algorithm.kl_in_loss", KL_LOSS | {"algorithm.disable_kl": True}, None),
        ("needs_reference", {}, True),
        ("needs_reference", {"algorithm.disable_kl": True}, False),
        ("needs_reference", {"trainer.val_only": True}, False),
        ("has_full_kl", {"algorithm.kl_penalty": "full"}, True),
        ("learns_without_advantage", {}, False),
        ("learns_without_advantage", KL_LOSS, True),
        ("learns_without_advantage", {"worker.actor.entropy_coeff": 0.1}, True),
        ("learns_without_advantage", GAE, False),
        ("learns_without_advantage", GAE | {"worker.critic.share_trunk": True}, True),
        # importance sampling is the default where weights may be older
        ("mismatch_correction", {}, "off"),
        ("mismatch_correction", SEPARATE, "off"),
        ("mismatch_correction", {"worker.rollout.oversampling": 0.5}, "truncate"),
        ("mismatch_correction", SEPARATE | {"algorithm.max_staleness": 1}, "truncate"),
        ("mismatch_correction", {"algorithm.max_staleness": 1, "algorithm.mismatch_correction": "off"}, "off"),
        # ages of tokens: of weights ahead, of carried groups, of a kept surplus
        ("oldest_age", {}, 0),
        ("oldest_age", {"algorithm.max_staleness": 4, "worker.rollout.oversampling": 0.5}, 4),
        ("oldest_age", {"worker.rollout.oversampling": 0.5, "worker.rollout.max_carried_steps": 2}, 3),
        ("oldest_age", {"algorithm.online_filtering": True, "algorithm.filter_surplus": "keep"}, 1),
        # workers
        ("num_devices", {"trainer.n_gpus_per_node": 4}, 4),
        ("num_devices", SEPARATE | {"worker.rollout.n_gpus_per_node": 4}, 5),
        ("num_samplers", SEPARATE | {"worker.rollout.n_gpus_per_node": 4}, 4),
        ("has_workers", {}, False),
        ("has_workers", SEPARATE, True),
        ("workers_per_machine", SEPARATE | {"worker.rollout.n_gpus_per_node": 4}, 5),
        ("workers_per_copy", {"trainer.n_gpus_per_node": 4, "worker.actor.fsdp.fsdp_size": 2}, 2),
        ("workers_per_copy", {"trainer.n_gpus_per_node": 4, "worker.actor.fsdp.fsdp_size": 8}, 4),
        # observations
        ("worker.rollout.role_of_observations", {"worker.rollout.tools": ("crop",)}, "tool"),
        ("worker.rollout.role_of_observations", {"worker.rollout.environment": "a:B"}, "user"),
        # the critic starts from the policy's model, and a head on its trunk has all of it
        ("critic.model.model_path", GAE | {"worker.actor.model.model_path": "a/b"}, "a/b"),
        ("critic.model.model_path", GAE | {"worker.critic.model.model_path": "c/d"}, "c/d"),
        ("critic.model.override_config", GAE | {"worker.actor.model.override_config": {"x": 1}}, {"x": 1}),
        ("critic.ppo_epochs", GAE | {"worker.actor.ppo_epochs": 2}, 1),
        ("critic.ppo_epochs", GAE | {"worker.actor.ppo_epochs": 2, "worker.critic.share_trunk": True}, 2),
        ("critic.optim.lr", GAE | {"worker.actor.optim.lr": 0.5, "worker.critic.share_trunk": True}, 1e-6),
    ],
)
def test_a_value_follows_from_options(name, changes, expected):
    assert value_of(made(changes), name) == expected


def test_options_with_a_default_by_device_are_null_unless_they_are_configured():
    defaults = {option.name: option.default for option in options().values()}
    assert {defaults[name] for name in DEVICE_DEFAULTS} == {None}


@pytest.mark.parametrize(
    ("changes", "on_cpu", "on_gpu"),
    [
        ((None, None, None), (128, False, False), (1024, True, True)),
        ((7, False, False), (7, False, False), (7, False, False)),
        ((None, True, True), (128, True, True), (1024, True, True)),
    ],
)
def test_defaults_follow_the_device(changes, on_cpu, on_gpu):
    config = made(dict(zip(DEVICE_DEFAULTS, changes, strict=True)))
    rollout, trainer = config.worker.rollout, config.trainer
    for device, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        found = (rollout.max_num_seqs_on(device), rollout.chunks_prefill_on(device), trainer.tunes_budgets_on(device))
        assert found == expected


# -- what parts of a run take from several sections ------------------------------------------------

ROLLOUT = {f"worker.rollout.{k}": v for k, v in {"n": 5, "temperature": 0.7, "ignore_eos": True, "seed": 3}.items()}


def test_training_samples_with_the_rollout_section_and_validation_likewise():
    config = made(ROLLOUT, {"data.max_response_length": 77, "worker.rollout.top_p": 0.9, "worker.rollout.top_k": 20})
    assert make_sampling_params(config) == SamplingParams(
        n=5, temperature=0.7, top_p=0.9, top_k=20, max_tokens=77, ignore_eos=True, seed=3
    )
    assert make_validation_sampling_params(config) == make_sampling_params(config)
    remax = with_options(config, {"algorithm.adv_estimator": "remax"})
    assert make_sampling_params(remax).with_baseline
    assert not make_validation_sampling_params(remax).with_baseline


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
    config = made(ROLLOUT, {f"worker.rollout.val_override_config.{field}": value})
    training, validation = make_sampling_params(config), make_validation_sampling_params(config)
    assert getattr(validation, field) == value
    assert getattr(training, field) != value
    others = [name for name in SamplingParams.__slots__ if name != field]
    assert [getattr(validation, name) for name in others] == [getattr(training, name) for name in others]


@pytest.mark.parametrize(("val_only", "most"), [(False, 64), (True, 9)])
def test_completions_are_those_of_validation_only_if_nothing_else_is_sampled(val_only, most):
    lengths = {"data.max_response_length": 64, "worker.rollout.val_override_config.max_tokens": 9}
    assert max_completion_tokens(made(lengths, {"trainer.val_only": val_only})) == most


@pytest.mark.parametrize(
    ("per_update", "changes", "needed"),
    [
        (8, {"algorithm.disable_kl": True}, False),
        (4, {"algorithm.disable_kl": True}, True),  # two updates of a step
        (8, KL_LOSS, False),
        (8, {}, True),
        (8, {"algorithm.kl_penalty": "full"}, False),  # computed without sampled log-probabilities
    ],
)
def test_old_logprobs_are_needed_for_several_updates_or_a_sampled_kl_in_the_reward(per_update, changes, needed):
    config = made(changes, {"data.rollout_batch_size": 8, "worker.actor.global_batch_size": per_update})
    assert needs_old_logprobs(config, make_plan(config, num_train_prompts=8)) == needed
