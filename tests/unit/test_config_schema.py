"""Values that follow from options: those of a section, and those of several sections."""

from dataclasses import replace
from pathlib import Path

import pytest

from trigon.assemble.options import (
    make_sampling_params,
    make_validation_sampling_params,
    max_completion_tokens,
    needs_old_logprobs,
)
from trigon.config.options import value_of, with_options
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
        ("worker.actor.weight_dtype", {"worker.actor.fsdp.torch_dtype": "fp16"}, "fp16"),
        # With LoRA the frozen weights have the format of the passes unless it is configured.
        ("worker.actor.weight_dtype", LORA, "bf16"),
        ("worker.actor.weight_dtype", LORA | {"worker.actor.fsdp.mp_param_dtype": "fp32"}, "fp32"),
        ("worker.ref.dtype", {"worker.ref.fsdp.torch_dtype": "fp16"}, "fp16"),
        ("parity_tolerance", FP32, 1e-3),
        ("parity_tolerance", FP32 | {"worker.actor.fsdp.torch_dtype": "bf16"}, 0.1),
        ("parity_tolerance", FP32 | {"worker.actor.fsdp.mp_param_dtype": "bf16"}, 0.1),
        ("worker.actor.max_cispo_weight", {"worker.actor.clip_ratio_high": 0.4}, 1.4),
        ("longest_sequence", {"worker.rollout.val_override_config.max_tokens": 4000}, 4512),
        ("validates_first", {"data.val_files": ("a",)}, True),
        ("group_size", {"trainer.val_only": True}, 1),
        ("trainer.run_folder", {"trainer.save_checkpoint_path": "~/run"}, Path.home() / "run"),
        # the KL is in the reward or in the loss
        ("algorithm.kl_in_reward", KL_LOSS, None),
        ("algorithm.kl_in_loss", KL_LOSS | {"algorithm.kl_penalty": "low_var_kl"}, "low_var_kl"),
        ("algorithm.kl_in_loss", KL_LOSS | {"algorithm.kl_coef": 0}, None),
        ("algorithm.kl_in_loss", KL_LOSS | {"algorithm.disable_kl": True}, None),
        ("needs_reference", {"algorithm.disable_kl": True}, False),
        ("learns_without_advantage", KL_LOSS, True),
        ("learns_without_advantage", {"worker.actor.entropy_coeff": 0.1}, True),
        ("learns_without_advantage", GAE | {"worker.critic.share_trunk": True}, True),
        # importance sampling is the default where weights may be older
        ("mismatch_correction", {"worker.rollout.oversampling": 0.5}, "truncate"),
        ("mismatch_correction", SEPARATE | {"algorithm.max_staleness": 1}, "truncate"),
        ("mismatch_correction", {"algorithm.max_staleness": 1, "algorithm.mismatch_correction": "off"}, "off"),
        # ages of tokens: of weights ahead, of carried groups, of a kept surplus
        ("oldest_age", {"algorithm.max_staleness": 4, "worker.rollout.oversampling": 0.5}, 4),
        ("oldest_age", {"worker.rollout.oversampling": 0.5, "worker.rollout.max_carried_steps": 2}, 3),
        ("oldest_age", {"algorithm.online_filtering": True, "algorithm.filter_surplus": "keep"}, 1),
        # workers
        ("num_devices", SEPARATE | {"worker.rollout.n_gpus_per_node": 4}, 5),
        ("workers_per_machine", SEPARATE | {"worker.rollout.n_gpus_per_node": 4}, 5),
        ("workers_per_copy", {"trainer.n_gpus_per_node": 4, "worker.actor.fsdp.fsdp_size": 8}, 4),
        # observations
        ("worker.rollout.role_of_observations", {"worker.rollout.tools": ("crop",)}, "tool"),
        ("worker.rollout.role_of_observations", {"worker.rollout.environment": "a:B"}, "user"),
        # the critic starts from the policy's model, and a head on its trunk has all of it
        ("critic.model.model_path", GAE | {"worker.actor.model.model_path": "a/b"}, "a/b"),
        ("critic.model.override_config", GAE | {"worker.actor.model.override_config": {"x": 1}}, {"x": 1}),
        ("critic.ppo_epochs", GAE | {"worker.actor.ppo_epochs": 2, "worker.critic.share_trunk": True}, 2),
        ("critic.optim.lr", GAE | {"worker.actor.optim.lr": 0.5, "worker.critic.share_trunk": True}, 1e-6),
    ],
)
def test_a_value_follows_from_options(name, changes, expected):
    assert value_of(made(changes), name) == expected


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


def test_overrides_of_validation_apply_even_if_they_are_zero_and_change_nothing_else():
    own = {"n": 1, "temperature": 0.0, "top_p": 0.5, "top_k": 4, "max_tokens": 9, "ignore_eos": False, "seed": 0}
    config = made(ROLLOUT, {f"worker.rollout.val_override_config.{field}": value for field, value in own.items()})
    training = make_sampling_params(made(ROLLOUT))
    assert make_sampling_params(config) == training
    assert make_validation_sampling_params(config) == replace(training, **own)
    some = made(ROLLOUT, {"worker.rollout.val_override_config.top_k": 4})
    assert make_validation_sampling_params(some) == replace(training, top_k=4)
    # Completions are those of validation only if nothing else is sampled.
    assert max_completion_tokens(config) == training.max_tokens
    assert max_completion_tokens(with_options(config, {"trainer.val_only": True})) == 9


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
