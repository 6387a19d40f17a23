"""Checks across options: problems, missing files and warnings."""

from pathlib import Path

import pytest

from trigon.config.checks import find_device_warnings
from trigon.config.load import load_config
from trigon.config.schema import Config
from trigon.errors import ConfigError

NEEDED = (
    "data.train_files=owner/train",
    "data.val_files=owner/val",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
    "worker.rollout.n=4",
)


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, (*NEEDED, *overrides))
    return str(caught.value)


def warnings(*overrides: str) -> tuple[str, ...]:
    return load_config(None, (*NEEDED, *overrides)).warnings


def test_the_required_options_suffice_without_a_warning():
    assert warnings() == ()


def test_defaults_alone_report_every_missing_option():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ())
    assert [line.partition(" ")[0] for line in str(caught.value).split("\n  - ")[1:]] == [
        "worker.actor.model.model_path",
        "worker.reward.reward_function",
        "data.train_files",
    ]


def test_tensor_parallel_size_must_divide_the_number_of_workers():
    assert problem("worker.rollout.tensor_parallel_size=2") == (
        "worker.rollout.tensor_parallel_size is 2, but there are 1 x 1 = 1 workers (trainer.nnodes x "
        "trainer.n_gpus_per_node), which it must divide; set it to 1"
    )
    message = problem("trainer.nnodes=3", "trainer.n_gpus_per_node=2", "worker.rollout.tensor_parallel_size=4")
    assert message.endswith("set it to 1 or 2 or 3 or 6")
    load_config(None, (*NEEDED, "trainer.n_gpus_per_node=8", "worker.rollout.tensor_parallel_size=2"))


def test_only_vllm_supports_tensor_parallelism():
    overrides = (
        "trainer.n_gpus_per_node=2",
        "worker.rollout.tensor_parallel_size=2",
        "worker.rollout.name=transformers",
    )
    assert "only vllm spreads one model over several devices" in problem(*overrides)


def test_fsdp_size_must_divide_the_number_of_workers():
    assert "worker.actor.fsdp.fsdp_size is 3, but there are 1 x 4 = 4 workers" in problem(
        "trainer.n_gpus_per_node=4", "worker.actor.fsdp.fsdp_size=3"
    )
    for fsdp_size in (-1, 0, 1, 2, 4, 8):  # as in EasyR1, 8 of 4 workers means all
        load_config(None, (*NEEDED, "trainer.n_gpus_per_node=4", f"worker.actor.fsdp.fsdp_size={fsdp_size}"))


def test_variables_for_reward_workers_are_names_without_values():
    message = problem("worker.reward.env=[HF_TOKEN, KEY=secret]")
    assert "worker.reward.env has 'KEY', but takes names of environment variables without values" in message
    assert "secret" not in message
    assert load_config(None, (*NEEDED, "worker.reward.env=A_KEY")).config.worker.reward.env == ("A_KEY",)


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_cpu_offload_of_a_single_worker_is_ignored_with_a_warning(model):
    given = (f"worker.{model}.fsdp.enable_cpu_offload=true", "algorithm.adv_estimator=gae")
    [warning] = set(warnings(*given)) - set(warnings(*given[1:]))
    assert f"worker.{model}.fsdp.enable_cpu_offload=true has no effect" in warning
    assert f"worker.{model}.offload.offload_params=true" in warning
    assert set(warnings(*given, "trainer.n_gpus_per_node=2")) == set(warnings(*given[1:], "trainer.n_gpus_per_node=2"))


def test_activation_offload_needs_gradient_checkpointing():
    offload, keep = ".enable_activation_offload=true", ".enable_gradient_checkpointing=false"
    for name, others in (("worker.actor.model", ()), ("worker.critic.model", ("algorithm.adv_estimator=gae",))):
        message = problem(name + offload, name + keep, *others)
        assert f"{name}{offload[:-5]} is true without {name}{keep[:-6]}" in message
        assert "set both to true" in message
        load_config(None, (*NEEDED, name + offload, *others))
    load_config(None, (*NEEDED, "worker.critic.model" + offload, "worker.critic.model" + keep))  # without a critic


@pytest.mark.parametrize(
    ("per_step", "per_update", "proposals"),
    [
        (100, 64, "data.rollout_batch_size=64 or 128, or worker.actor.global_batch_size=50 or 100"),
        (512, 96, "data.rollout_batch_size=480 or 576, or worker.actor.global_batch_size=64 or 128"),
        (7, 2, "data.rollout_batch_size=6 or 8, or worker.actor.global_batch_size=1 or 7"),
        (16, 64, "data.rollout_batch_size=64, or worker.actor.global_batch_size=16"),
    ],
)
def test_rollout_batch_size_must_be_a_multiple_of_global_batch_size(per_step, per_update, proposals):
    assert problem(f"data.rollout_batch_size={per_step}", f"worker.actor.global_batch_size={per_update}") == (
        f"data.rollout_batch_size ({per_step} prompts per step) is not a multiple of worker.actor.global_batch_size "
        f"({per_update} prompts per update); the nearest valid values: {proposals}; or leave out one of them"
    )


def test_grpo_needs_two_completions_but_validation_does_not():
    assert "set worker.rollout.n to at least 2" in problem("worker.rollout.n=1")
    assert warnings("worker.rollout.n=1", "trainer.val_only=true") == ()


def test_max_model_len_must_hold_prompt_and_completion():
    too_short = problem("worker.rollout.max_model_len=1000")
    assert problem("worker.rollout.max_model_len=1000", "worker.rollout.name=transformers") == too_short
    assert too_short == (
        "worker.rollout.max_model_len is 1000, but a prompt (512) and its completion can have 1024 tokens together; "
        "set it to at least 1024, or leave it out"
    )
    assert "set it to at least 1524" in problem(
        "worker.rollout.max_model_len=1024", "worker.rollout.val_override_config.max_tokens=1012"
    )
    assert warnings("worker.rollout.max_model_len=1024") == ()


def test_a_batch_of_vllm_must_hold_a_sequence_without_chunked_prefill():
    small, off = "worker.rollout.max_num_batched_tokens=1000", "worker.rollout.enable_chunked_prefill=false"
    assert "set it to at least 1024, or worker.rollout.enable_chunked_prefill=true" in problem(small, off)
    assert "set it to at least 9000" in problem("worker.rollout.max_model_len=9000", off)
    assert warnings(small, "worker.rollout.enable_chunked_prefill=true") == warnings(small) == ()
    assert warnings(small, off, "worker.rollout.name=transformers") == ()


def device_warnings(device, **rollout):
    return find_device_warnings(Config(worker={"rollout": rollout}), device)


def test_options_of_vllm_without_effect_on_the_cpu_are_warned_about():
    options = {"model_runner": "v2", "async_scheduling": True, "enable_chunked_prefill": True}
    assert device_warnings("cpu", **options) == (
        "worker.rollout.model_runner=v2 has no effect on the CPU",
        "worker.rollout.async_scheduling=true has no effect on the CPU",
        "worker.rollout.enable_chunked_prefill=true has no effect on the CPU",
    )
    assert device_warnings("cuda", **options) == device_warnings("cpu", **options, name="transformers") == ()
    assert device_warnings("cpu", async_scheduling=False) == device_warnings("cpu") == ()


def test_chunked_prefill_that_is_switched_off_is_warned_about_on_a_gpu():
    [warning] = device_warnings("cuda", enable_chunked_prefill=False)
    assert "does not officially support this on a GPU" in warning
    assert device_warnings("cpu", enable_chunked_prefill=False) == ()
    assert device_warnings("cuda") == device_warnings("cuda", enable_chunked_prefill=True) == ()
    assert device_warnings("cuda", enable_chunked_prefill=False, name="transformers") == ()


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("worker.rollout.top_k=0", "worker.rollout.top_k is 0, which leaves no token to sample; -1 samples from all"),
        ("worker.rollout.val_override_config.top_k=0", "worker.rollout.val_override_config.top_k is 0"),
        ("data.val_batch_size=0", "data.val_batch_size is 0; set -1"),
        (
            "data.min_pixels=5000000 data.max_pixels=4194304",
            "data.min_pixels (5000000) is above data.max_pixels (4194304)",
        ),
    ],
)
def test_invalid_numbers_are_rejected(override, part):
    assert part in problem(*override.split())


def test_validation_prompts_are_required_only_if_validation_is_on():
    without = ("data.val_files=",)
    off = ("trainer.val_before_train=false", "trainer.val_freq=-1")
    on = "trainer.val_before_train=true"
    assert "leave out trainer.val_before_train and trainer.val_freq" in problem(*without, on)
    assert problem("data.val_files=null", on) == problem(*without, on)
    assert warnings("data.val_files=null", *off) == warnings(*without) == ()
    assert "data.val_files is not set" in problem(*without, off[0], "trainer.val_freq=5")
    assert "data.val_files is not set" in problem(*without, *off, "trainer.val_only=true")
    assert warnings(*without, *off) == ()


def test_training_prompts_are_required():
    assert "data.train_files is not set" in problem("data.train_files=")
    assert warnings("data.train_files=", "trainer.val_only=true") == ()
    assert warnings("data.train_files=missing/train.parquet", "trainer.val_only=true") == ()


@pytest.mark.parametrize(
    ("key", "value", "missing"),
    [
        ("data.format_prompt", "prompt.jinja", "prompt.jinja"),
        ("data.override_chat_template", "chat.jinja", "chat.jinja"),
        ("data.train_files", "rows.parquet", "rows.parquet"),
        ("data.train_files", "rows/a.jsonl@train", "rows/a.jsonl"),
        ("data.val_files", "./rows", "./rows"),
        ("data.val_files", "a/b/c@test", "a/b/c"),
        ("data.image_dir", "pictures", "pictures"),
        ("worker.actor.model.model_path", "./model", "./model"),
        ("worker.actor.model.model_path", "/nowhere/model", "/nowhere/model"),
        ("worker.reward.reward_function", "score.py:compute", "score.py"),
        ("worker.reward.reward_function", "maths", "maths"),
        ("worker.reward.writable", "judge-cache", "judge-cache"),
        ("trainer.load_checkpoint_path", "runs/global_step_3", "runs/global_step_3"),
    ],
)
def test_a_missing_file_is_reported_with_its_absolute_path(tmp_path, monkeypatch, key, value, missing):
    monkeypatch.chdir(tmp_path)
    assert problem(f"{key}={value}").startswith(f"{key}: there is no {missing} (looked for {tmp_path / missing})")


def test_a_missing_path_is_named_with_its_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen-3b" / "final").mkdir(parents=True)
    (tmp_path / "rows.parquet").touch()
    key = "worker.actor.model.model_path"
    for given, meant in (
        ("./models/qwen-2b", "models/qwen-3b"),
        ("./model/qwen-3b/final", "models/qwen-3b/final"),
        (f"{tmp_path}/models/qwen3b/final", f"{tmp_path}/models/qwen-3b/final"),
        (f"{tmp_path}/models/qwen3b/other", f"{tmp_path}/models/qwen-3b"),
    ):
        assert problem(f"{key}={given}").endswith(f"; did you mean {meant}?")
    assert problem("data.train_files=row.parquet").endswith("; did you mean rows.parquet?")
    assert "did you mean" not in problem(f"{key}=./nothing/of/this/name")


def test_a_path_may_start_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    key = "worker.actor.model.model_path"
    assert problem(f"{key}=~/model") == f"{key}: there is no ~/model (looked for {tmp_path / 'model'})"
    (tmp_path / "model").mkdir()
    assert warnings(f"{key}=~/model") == ()


def test_existing_files_and_hub_ids_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.parquet", "score.py", "prompt.jinja", "odd@name.json"):
        Path(name).touch()
    Path("model").mkdir()
    overrides = (
        "data.train_files=rows.parquet@train",
        "data.val_files=odd@name.json",
        "data.format_prompt=prompt.jinja",
        "data.override_chat_template={{ messages }}",
        "worker.actor.model.model_path=./model",
        "worker.actor.model.tokenizer_path=Qwen/Qwen2.5-VL-3B-Instruct",
        "worker.reward.reward_function=score.py:compute",
    )
    assert warnings(*overrides) == ()
    assert warnings(*overrides, "worker.reward.reward_function=score.py", "data.train_files=owner/data@train") == ()


def test_an_inline_template_is_not_looked_up_as_a_file():
    assert warnings("data.format_prompt={{ content }} Answer: please.") == ()


def test_conflicting_kl_and_sampling_options_give_warnings():
    in_the_loss = "algorithm.use_kl_loss=true"
    assert "gradient of zero on average" in warnings(in_the_loss)[0]
    assert warnings(in_the_loss, "algorithm.kl_penalty=low_var_kl") == ()
    assert (
        "only the weight of a KL in the reward"
        in warnings(in_the_loss, "algorithm.kl_penalty=mse", "algorithm.kl_type=adaptive")[0]
    )
    assert warnings("algorithm.kl_type=adaptive") == ()
    assert warnings(in_the_loss, "algorithm.disable_kl=true") == ()
    assert "cut to the most likely tokens" in warnings("worker.rollout.top_p=0.9")[0]
    assert "cut to the most likely tokens" in warnings("worker.rollout.top_k=20")[0]


# -- number formats --------------------------------------------------------------------------------

BF16 = "worker.actor.fsdp.torch_dtype=bf16"
FP16 = "worker.actor.fsdp.torch_dtype=fp16"
ADAMW_BF16 = "worker.actor.optim.strategy=adamw_bf16"


def test_adamw_does_not_train_bf16_weights():
    assert problem(BF16) == (
        "worker.actor.fsdp.torch_dtype is bf16 with worker.actor.optim.strategy=adamw, which rounds almost every "
        "update to nothing: near 1, numbers in bf16 are 0.004 apart, and an update moves a weight by about the "
        "learning rate, 1e-06; set worker.actor.optim.strategy=adamw_bf16, which keeps the bits that bf16 lacks, or "
        "worker.actor.fsdp.torch_dtype=fp32"
    )
    assert warnings(BF16, ADAMW_BF16) == ()
    assert warnings("worker.actor.fsdp.torch_dtype=fp32") == ()


def test_no_strategy_trains_fp16_weights():
    for overrides in ((FP16,), (FP16, ADAMW_BF16)):
        message = problem(*overrides)
        assert message.startswith("worker.actor.fsdp.torch_dtype is fp16, which no optimizer strategy can train")
        assert message.endswith(
            "set worker.actor.fsdp.torch_dtype=bf16 worker.actor.optim.strategy=adamw_bf16, or "
            "worker.actor.fsdp.torch_dtype=fp32"
        )


def test_gradients_in_fp16_are_refused():
    compute = "worker.actor.fsdp.mp_param_dtype=fp16"
    for overrides in ((compute,), (compute, "worker.actor.model.lora.rank=8")):
        message = problem(*overrides)
        assert message.startswith("worker.actor.fsdp.mp_param_dtype is fp16, whose smallest numbers are too large")
        assert "gradients are not scaled here; set worker.actor.fsdp.mp_param_dtype=bf16" in message
    assert warnings(compute, "trainer.val_only=true") == ()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_weights_that_are_not_trained_may_have_16_bits(dtype):
    assert warnings(dtype, "worker.actor.model.lora.rank=8") == ()  # the adapters are in float32
    assert warnings(dtype, "trainer.val_only=true") == ()


# -- algorithms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["grpo", "grpo_passk", "rloo", "dr_grpo", "grpo_batch", "opo"])
def test_an_estimator_that_compares_completions_needs_two(estimator):
    message = problem("worker.rollout.n=1", f"algorithm.adv_estimator={estimator}")
    assert f"worker.rollout.n is 1, but {estimator} compares" in message
    assert "reinforce_plus_plus or remax" in message


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "remax"])
def test_one_completion_suffices_for_other_estimators(estimator):
    assert warnings("worker.rollout.n=1", f"algorithm.adv_estimator={estimator}") == ()


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.adv_estimator=grpo_pask", "grpo_passk"),
        ("algorithm.adv_estimator=reinforce++", "reinforce_plus_plus"),
        ("algorithm.adv_estimator=drgrpo", "dr_grpo"),
        ("worker.actor.loss_type=gspo-token", "gspo_token"),
        ("worker.actor.loss_type=csipo", "cispo"),
        ("worker.actor.loss_avg_mode=sequence", "seq"),
        ("algorithm.kl_penalty=low_var", "low_var_kl"),
        ("algorithm.mismatch_correction=truncated", "truncate"),
    ],
)
def test_a_misspelled_choice_suggests_the_nearest(override, nearest):
    assert f"did you mean {nearest}?" in problem(override)


@pytest.mark.parametrize(
    "override",
    [
        "worker.actor.cispo_cap=0.2",
        "worker.actor.clip_ratio_low=1.5",
        "worker.actor.clip_ratio_dual=1",
        "worker.actor.tau_positive=0",
        "worker.actor.entropy_coeff=-0.1",
        "algorithm.kl_coef=-1",
        "algorithm.gamma=0",
        "algorithm.mismatch_low=1.1",
        "algorithm.mismatch_high=0.9",
        "data.mini_rollout_batch_size=0",
        "data.train_weights=[0]",
    ],
)
def test_a_number_out_of_range_is_rejected(override):
    key, _, _ = override.partition("=")
    assert key in problem(override)


def test_gdpo_does_not_allow_a_kl_in_the_reward():
    gdpo = "algorithm.adv_estimator=gdpo"
    assert "a KL penalty is not one of them" in problem(gdpo, "algorithm.kl_coef=0.01")
    assert warnings(gdpo, "algorithm.use_kl_loss=true", "algorithm.kl_penalty=low_var_kl") == ()


def test_the_lower_filter_bound_must_be_below_the_upper_one():
    filtering = "algorithm.online_filtering=true"
    assert "no group is between them" in problem(filtering, "algorithm.filter_low=0.9", "algorithm.filter_high=0.9")


def test_a_mismatch_correction_needs_uncut_sampling():
    correction = "algorithm.mismatch_correction=truncate"
    assert "different distributions" in problem(correction, "worker.rollout.top_p=0.9")
    assert "different distributions" in problem(correction, "worker.rollout.top_k=50")
    assert warnings(correction) == ()


def test_reward_weights_must_not_all_be_zero():
    gdpo = ("algorithm.adv_estimator=gdpo", "algorithm.disable_kl=true")
    assert "which makes every advantage 0" in problem(*gdpo, "algorithm.reward_weights={accuracy: 0}")


def test_an_adaptive_kl_weight_cannot_become_negative():
    adaptive = ("algorithm.kl_type=adaptive", "data.rollout_batch_size=512", "worker.actor.global_batch_size=128")
    assert "could become negative in one step; set kl_horizon above 409.6" in problem(
        *adaptive, "algorithm.kl_horizon=100"
    )
    assert warnings(*adaptive, "algorithm.kl_horizon=10000") == ()


@pytest.mark.parametrize("other", ["algorithm.disable_kl=true", "algorithm.use_kl_loss=true", "algorithm.kl_coef=0"])
def test_an_adaptive_kl_weight_that_is_not_used_is_not_checked(other):
    adaptive = ("algorithm.kl_type=adaptive", "data.rollout_batch_size=512", "worker.actor.global_batch_size=128")
    warnings(*adaptive, "algorithm.kl_horizon=100", other)  # raises nothing


def test_overlong_filtering_conflicts_with_ignore_eos():
    assert "with worker.rollout.ignore_eos=true all of them are" in problem(
        "algorithm.overlong_filtering=true", "worker.rollout.ignore_eos=true"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.filter_surplus=keep", "no effect without algorithm.online_filtering=true"),
        ("algorithm.gamma=0.9", "no effect without algorithm.adv_estimator=reinforce_plus_plus"),
        ("data.mini_rollout_batch_size=8", "no effect without algorithm.online_filtering=true"),
        ("worker.actor.cispo_cap=5", "no effect without worker.actor.loss_type=cispo"),
        ("worker.actor.loss_fixed_length=5", "no effect without worker.actor.loss_avg_mode=seq_fixed"),
        ("algorithm.reward_weights={a: 1}", "no effect without algorithm.adv_estimator=gdpo"),
        ("worker.actor.loss_type=cispo", "raises every cispo weight below 0.8"),
        ("worker.actor.loss_type=gspo", "the paper has 0.0003 and 0.0004"),
        ("algorithm.adv_estimator=dr_grpo", "worker.actor.loss_avg_mode=seq_fixed"),
    ],
)
def test_an_ineffective_or_conflicting_option_gives_one_warning(override, expected):
    [warning] = warnings(override)
    assert expected in warning


def test_options_that_fit_together_give_no_warning():
    assert warnings("worker.actor.loss_type=cispo", "worker.actor.clip_ratio_low=1", "worker.actor.cispo_cap=5") == ()
    gspo = (
        "worker.actor.loss_type=gspo_token",
        "worker.actor.clip_ratio_low=3e-4",
        "worker.actor.clip_ratio_high=4e-4",
    )
    assert warnings(*gspo) == ()
    assert warnings("algorithm.adv_estimator=dr_grpo", "worker.actor.loss_avg_mode=seq_fixed") == ()


def test_a_kept_surplus_suggests_a_mismatch_correction():
    keep = ("algorithm.online_filtering=true", "algorithm.filter_surplus=keep")
    [warning] = warnings(*keep)
    assert "one step old" in warning
    assert warnings(*keep, "algorithm.mismatch_correction=truncate") == ()


def test_train_weights_needs_one_weight_per_dataset():
    message = problem("data.train_files=[a.jsonl,b.jsonl]", "data.train_weights=[1,2,0.5]")
    assert "data.train_weights has 3 weights, but data.train_files 2 datasets" in message


# -- oversampling ----------------------------------------------------------------------------------

OVERSAMPLING = "worker.rollout.oversampling=0.25"


@pytest.mark.parametrize(
    "override",
    ["worker.rollout.tools=[crop]", "algorithm.online_filtering=true", "algorithm.adv_estimator=remax"],
)
def test_oversampling_composes(override):
    assert warnings(OVERSAMPLING, override) == ()


def test_oversampling_of_an_engine_that_gains_nothing_is_warned_of():
    [warning] = warnings(OVERSAMPLING, "worker.rollout.name=transformers")
    assert "worker.rollout.oversampling" in warning
    assert "one prompt after the other" in warning


def test_importance_sampling_is_the_default_with_oversampling():
    assert warnings(OVERSAMPLING) == ()
    assert "corrects for it" in warnings(OVERSAMPLING, "algorithm.mismatch_correction=off")[0]
    message = problem(OVERSAMPLING, "worker.rollout.top_p=0.9")
    assert message.startswith("algorithm.mismatch_correction=truncate, the default with worker.rollout.oversampling,")
    message = problem("worker.hybrid_engine=false", "algorithm.max_staleness=1", "worker.rollout.top_k=9")
    assert "algorithm.mismatch_correction=truncate, the default with algorithm.max_staleness=1," in message
    assert "worker.rollout.max_carried_steps has no effect" in warnings("worker.rollout.max_carried_steps=2")[0]
    assert warnings(OVERSAMPLING, "worker.rollout.max_carried_steps=2") == ()
