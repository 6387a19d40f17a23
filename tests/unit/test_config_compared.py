"""Which options a checkpoint is compared with when a run is resumed."""

import json

import pytest

from trigon.config.checks import find_problems
from trigon.config.compared import compared_options, is_accepted, schedule_depends_on_length
from trigon.config.options import options
from trigon.config.plan import fill_batch_sizes
from trigon.config.schema import Config

# Compared by the content of files (assemble/origin.py, data/stream.py).
BY_CONTENT = {
    "data.train_files",
    "data.train_weights",
    "data.val_files",
    "data.format_prompt",
    "data.override_chat_template",
    "worker.actor.model.model_path",
    "worker.actor.model.tokenizer_path",
    "worker.critic.model.model_path",
    "worker.reward.reward_function",
    "worker.reward.val_reward_function",
    "worker.reward.reward_function_kwargs",
    "worker.rollout.environment",
    "worker.rollout.environment_kwargs",
    "worker.rollout.tools",
}

# Places of files, memory, devices, kernels, limits: what they change is rounding, or which rows and
# images are usable, and these are compared themselves.
FREE = {
    "data.image_dir",
    "data.max_prompt_length",
    "data.val_batch_size",
    "data.max_image_pixels",
    "data.filter_overlong_prompts",
    "data.filter_overlong_prompts_workers",
    "data.max_bad_row_fraction",
    "worker.actor.micro_batch_size_per_device_for_update",
    "worker.actor.micro_batch_size_per_device_for_experience",
    "worker.actor.model.enable_gradient_checkpointing",
    "worker.actor.model.enable_activation_offload",
    "worker.actor.model.trust_remote_code",
    "worker.actor.model.vision_cache_gb",
    "worker.actor.model.attention_kernel",
    "worker.actor.model.compile_layers",
    "worker.actor.model.use_liger_kernel",
    "worker.actor.fsdp.mp_reduce_dtype",
    "worker.actor.fsdp.enable_full_shard",
    "worker.actor.fsdp.fsdp_size",
    "worker.actor.fsdp.enable_cpu_offload",
    "worker.actor.offload.offload_params",
    "worker.actor.offload.offload_optimizer",
    "worker.actor.ulysses_sequence_parallel_size",
    "worker.critic.micro_batch_size_per_device_for_update",
    "worker.critic.micro_batch_size_per_device_for_experience",
    "worker.critic.model.enable_gradient_checkpointing",
    "worker.critic.model.enable_activation_offload",
    "worker.critic.model.trust_remote_code",
    "worker.critic.fsdp.mp_reduce_dtype",
    "worker.critic.fsdp.enable_full_shard",
    "worker.critic.fsdp.fsdp_size",
    "worker.critic.fsdp.enable_cpu_offload",
    "worker.critic.offload.offload_params",
    "worker.critic.offload.offload_optimizer",
    "worker.hybrid_engine",
    "worker.rollout.nnodes",
    "worker.rollout.n_gpus_per_node",
    "worker.rollout.limit_images",
    "worker.rollout.gpu_memory_utilization",
    "worker.rollout.enforce_eager",
    "worker.rollout.enable_chunked_prefill",
    "worker.rollout.enable_prefix_caching",
    "worker.rollout.tensor_parallel_size",
    "worker.rollout.max_model_len",
    "worker.rollout.max_num_batched_tokens",
    "worker.rollout.max_num_seqs",
    "worker.rollout.model_runner",
    "worker.rollout.async_scheduling",
    "worker.rollout.disable_log_stats",
    "worker.rollout.disable_tqdm",
    "worker.rollout.parity_tolerance",
    "worker.rollout.weight_check_freq",
    "worker.rollout.environment_timeout_seconds",
    "worker.rollout.environment_workers",
    "worker.ref.fsdp.enable_full_shard",
    "worker.ref.fsdp.enable_cpu_offload",
    "worker.ref.offload.offload_params",
    "worker.reward.env",
    "worker.reward.concurrency",
    "worker.reward.num_cpus",
    "worker.reward.timeout_seconds",
    "worker.reward.max_failed_fraction",
    "worker.reward.max_memory_gb",
    "worker.reward.network",
    "worker.reward.confinement",
    "worker.reward.readable",
    "worker.reward.writable",
}

# Together they use every option on which numbers depend.
CONFIGS = [
    Config(algorithm={"kl_type": "adaptive", "online_filtering": True, "mismatch_correction": "mask"}),
    Config(algorithm={"max_staleness": 2}),
    Config(algorithm={"adv_estimator": "gdpo"}, worker={"actor": {"loss_type": "sapo", "loss_avg_mode": "seq_fixed"}}),
    Config(
        algorithm={"adv_estimator": "reinforce_plus_plus"},
        worker={
            "actor": {
                "loss_type": "cispo",
                "optim": {"lr_scheduler_type": "cosine"},
                "model": {"lora": {"rank": 4}},
            },
            "rollout": {"tools": ("crop",)},
        },
    ),
    Config(worker={"rollout": {"oversampling": 0.25}}),
    Config(
        algorithm={"adv_estimator": "gae"},
        worker={"critic": {"optim": {"lr_scheduler_type": "cosine"}, "model": {"lora": {"rank": 4}}}},
    ),
    Config(algorithm={"adv_estimator": "gae"}, worker={"critic": {"share_trunk": True}}),
]
CONFIGS += [fill_batch_sizes(config, 40)[0] for config in CONFIGS]  # as after the data is read


def test_every_option_is_compared_or_known_to_change_nothing():
    names = {option.name for option in options().values() if not option.name.startswith("trainer.")}
    compared = {name for config in CONFIGS for name in compared_options(config)}
    assert compared - names == {"trainer.max_try_make_batch", "trainer.critic_warmup"}
    assert not compared & (FREE | BY_CONTENT)
    assert names - compared - BY_CONTENT == FREE, "say in compared.py or here whether a run's numbers depend on it"


def test_the_values_survive_a_checkpoint():
    for config in CONFIGS:
        values = compared_options(config)
        assert json.loads(json.dumps(values, allow_nan=False)) == values


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            {"worker": {"actor": {"fsdp": {"torch_dtype": None}}}},
            {"worker": {"actor": {"fsdp": {"torch_dtype": "fp32"}}}},
        ),
        ({"algorithm": {"filter_low": 0.1}}, {"algorithm": {"filter_low": 0.2}}),  # online_filtering is off
        ({"worker": {"actor": {"tau_positive": 2.0}}}, {}),  # not sapo
        ({"trainer": {"max_steps": 3, "save_freq": 1}}, {"trainer": {"max_steps": 30, "n_gpus_per_node": 4}}),
    ],
)
def test_an_option_without_effect_and_a_default_that_is_written_out_are_no_difference(before, after):
    assert compared_options(Config(**before)) == compared_options(Config(**after))


def test_a_learning_rate_that_depends_on_the_number_of_steps():
    def depends(**optim):
        return schedule_depends_on_length(Config(worker={"actor": {"optim": optim}}))

    assert depends(lr_scheduler_type="cosine")
    assert depends(lr_warmup_ratio=0.1)
    assert not depends(lr_warmup_ratio=0.1, lr_warmup_steps=3)
    assert not depends()


def test_changes_are_accepted_by_name():
    assert is_accepted("data.seed", ("data.seed",))
    assert is_accepted("data.seed", ("all",))
    assert not is_accepted("data.seed", ("worker.rollout.seed",))


def test_a_name_that_is_no_option_is_a_problem():
    def problems(*names):
        found = find_problems(Config(trainer={"accept_changes": names}))
        return [problem for problem in found if "accept_changes" in problem]

    assert problems("all", "data.seed", "worker.reward.reward_function") == []
    [problem] = problems("optim.lr")
    assert problem == (
        "trainer.accept_changes has 'optim.lr', which is not the name of an option; did you mean worker.actor.optim.lr?"
    )
