"""The defaults of options that depend on other options."""

from pathlib import Path

import pytest

from trigon.config.defaults import (
    options_by_device,
    resolve_auto_micro_batch,
    resolve_cispo_cap,
    resolve_enable_chunked_prefill,
    resolve_loss_fixed_length,
    resolve_max_num_seqs,
    resolve_parity_tolerance,
    resolve_prompts_per_round,
    resolve_reference_dtype,
    resolve_run_folder,
    resolve_weight_dtype,
)
from trigon.config.options import options
from trigon.config.schema import Config


def make_config(**sections) -> Config:
    return Config(**sections)


def test_the_run_folder_is_configured_or_made_of_project_and_experiment():
    names = {"project_name": "p", "experiment_name": "e"}
    assert resolve_run_folder(make_config(trainer=names)) == Path("checkpoints/p/e")
    assert resolve_run_folder(make_config(trainer={**names, "save_checkpoint_path": "/runs/x"})) == Path("/runs/x")


def test_weights_are_stored_in_fp32_and_the_reference_in_bf16_by_default():
    config = make_config()
    assert (resolve_weight_dtype(config), resolve_reference_dtype(config)) == ("fp32", "bf16")
    fp16 = {"fsdp": {"torch_dtype": "fp16"}}
    config = make_config(worker={"actor": fp16, "ref": fp16})
    assert (resolve_weight_dtype(config), resolve_reference_dtype(config)) == ("fp16", "fp16")


@pytest.mark.parametrize(
    ("fsdp", "dtype"),
    [
        ({}, "bf16"),
        ({"mp_param_dtype": "fp32"}, "fp32"),
        ({"torch_dtype": "fp32"}, "fp32"),
        ({"mp_param_dtype": "fp32", "torch_dtype": "bf16"}, "bf16"),
    ],
)
def test_the_frozen_weights_of_lora_have_the_format_of_the_forward_pass_unless_it_is_configured(fsdp, dtype):
    config = make_config(worker={"actor": {"fsdp": fsdp, "model": {"lora": {"rank": 8}}}})
    assert resolve_weight_dtype(config) == dtype


@pytest.mark.parametrize(
    ("rollout", "fsdp", "tolerance"),
    [
        ({"dtype": "fp32"}, {"mp_param_dtype": "fp32"}, 1e-3),
        ({"dtype": "fp32"}, {"mp_param_dtype": "fp32", "torch_dtype": "bf16"}, 0.1),
        ({"dtype": "bf16"}, {"mp_param_dtype": "fp32"}, 0.1),
        ({"dtype": "fp32"}, {"mp_param_dtype": "bf16"}, 0.1),
        ({"dtype": "fp16"}, {"mp_param_dtype": "fp16"}, 0.1),
        ({}, {}, 0.1),
        ({"dtype": "fp32", "parity_tolerance": 0.5}, {"mp_param_dtype": "fp32"}, 0.5),
        ({"parity_tolerance": 1e-5}, {}, 1e-5),
    ],
)
def test_the_parity_tolerance_follows_the_dtypes_unless_it_is_configured(rollout, fsdp, tolerance):
    config = make_config(worker={"rollout": rollout, "actor": {"fsdp": fsdp}})
    assert resolve_parity_tolerance(config) == tolerance


def test_the_cispo_cap_is_one_more_than_the_upper_clip_ratio_unless_it_is_configured():
    assert resolve_cispo_cap(make_config(worker={"actor": {"clip_ratio_high": 0.4}})) == 1.4
    assert resolve_cispo_cap(make_config(worker={"actor": {"clip_ratio_high": 0.4, "cispo_cap": 6.0}})) == 6.0


def test_the_fixed_length_of_the_loss_is_the_response_limit_unless_it_is_configured():
    data = {"max_response_length": 77}
    assert resolve_loss_fixed_length(make_config(data=data)) == 77
    assert resolve_loss_fixed_length(make_config(data=data, worker={"actor": {"loss_fixed_length": 9}})) == 9


def test_a_filtering_round_samples_the_prompts_of_a_step_unless_it_is_configured():
    assert resolve_prompts_per_round(make_config(data={"rollout_batch_size": 8})) == 8
    data = {"rollout_batch_size": 8, "mini_rollout_batch_size": 3}
    assert resolve_prompts_per_round(make_config(data=data)) == 3


def test_options_with_a_default_by_device_are_null_unless_they_are_configured():
    defaults = {option.name: option.default for option in options().values()}
    assert options_by_device() == {
        "worker.rollout.max_num_seqs": {"cpu": 128, "cuda": 1024},
        "worker.rollout.enable_chunked_prefill": {"cpu": False, "cuda": True},
        "trainer.auto_micro_batch": {"cpu": False, "cuda": True},
    }
    assert {defaults[name] for name in options_by_device()} == {None}


@pytest.mark.parametrize(
    ("rollout", "trainer", "on_cpu", "on_gpu"),
    [
        ({}, {}, (128, False, False), (1024, True, True)),
        (
            {"max_num_seqs": 7, "enable_chunked_prefill": False},
            {"auto_micro_batch": False},
            (7, False, False),
            (7, False, False),
        ),
        ({"enable_chunked_prefill": True}, {"auto_micro_batch": True}, (128, True, True), (1024, True, True)),
    ],
)
def test_defaults_follow_the_device(rollout, trainer, on_cpu, on_gpu):
    config = make_config(worker={"rollout": rollout}, trainer=trainer)
    resolvers = (resolve_max_num_seqs, resolve_enable_chunked_prefill, resolve_auto_micro_batch)
    assert tuple(resolve(config, "cpu") for resolve in resolvers) == on_cpu
    assert tuple(resolve(config, "cuda") for resolve in resolvers) == on_gpu
