"""Keys of EasyR1's configuration files that the schema does not have: renamed and ignored keys.

Each of them is accepted with one warning. An ignored key with a value that asks for an unsupported
feature is an error. load.py reads files and applies these tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trigon.config.options import options
from trigon.config.paths import is_inline_template, path_exists
from trigon.system.terminal import nearest_key

RENAMED: Mapping[str, str] = {
    "data.gen_batch_size": "data.mini_rollout_batch_size",
    "data.train_batch_size": "data.rollout_batch_size",
    "trainer.total_episodes": "trainer.total_epochs",
    "trainer.total_training_steps": "trainer.max_steps",
    "worker.actor.disable_kl": "algorithm.disable_kl",
    "worker.actor.kl_coef": "algorithm.kl_coef",
    "worker.actor.kl_loss_coef": "algorithm.kl_coef",
    "worker.actor.kl_loss_type": "algorithm.kl_penalty",
    "worker.actor.kl_penalty": "algorithm.kl_penalty",
    "worker.actor.ppo_mini_batch_size": "worker.actor.global_batch_size",
    "worker.actor.ulysses_size": "worker.actor.ulysses_sequence_parallel_size",
    "worker.actor.use_kl_loss": "algorithm.use_kl_loss",
    "worker.reward.compute_score": "worker.reward.reward_function",
    "worker.reward.score_function": "worker.reward.reward_function",
    "worker.reward.score_function_kwargs": "worker.reward.reward_function_kwargs",
}
"""Older name: current name. The meaning and the values are the same."""

RENAMED_FILES: Mapping[str, str] = {
    "math_format.jinja": "math.jinja",
    "r1v_format.jinja": "r1v.jinja",
    "examples/score_function/": "examples/reward_function/",
}
"""Older part of the path of a shipped example: the current part."""


@dataclass(frozen=True, slots=True)
class IgnoredKey:
    """A key without effect.

    reason: why it has no effect. allowed: the values it may have; None: any value.
    advice: for any other value, why it is not supported and what to do.
    """

    reason: str
    allowed: tuple[Any, ...] | None = None
    advice: str = ""

    def rejects(self, value: Any) -> bool:
        """Return whether the value asks for a feature that is not supported."""
        return self.allowed is not None and value not in self.allowed


_ULYSSES = "worker.actor.ulysses_sequence_parallel_size applies to the reference and the critic too"
_COMPILE = IgnoredKey("log-probabilities are computed in chunks, without compiling")
_PACKED = IgnoredKey(
    "sequences are always packed without padding, up to a token budget, and results do not depend on it"
)

_OF_EACH_MODEL = {
    "dynamic_batching": _PACKED,
    "fsdp.enable_rank0_init": IgnoredKey(
        "one worker always reads the weights and broadcasts each tensor to the others"
    ),
    "fsdp.mp_buffer_dtype": IgnoredKey("buffers keep the dtype that the model gives them"),
    "fsdp.use_orig_params": IgnoredKey("torch's FSDP2 always keeps parameters as they are"),
    "padding_free": _PACKED,
    "strategy": IgnoredKey("several workers always shard the model with torch's FSDP2"),
}
_OF_EACH_TRAINED_MODEL = _OF_EACH_MODEL | {
    "global_batch_size_per_device": IgnoredKey("it is computed from other keys"),
    "optim.training_steps": IgnoredKey("updates are counted from the data; trainer.max_steps limits them"),
}
_BY_SECTION: Mapping[str, Mapping[str, IgnoredKey]] = {
    "worker.actor": {
        "clip_ratio": IgnoredKey(
            "the bounds are worker.actor.clip_ratio_low and worker.actor.clip_ratio_high",
            allowed=(None,),
            advice="there are two bounds now; set worker.actor.clip_ratio_low and worker.actor.clip_ratio_high to it",
        ),
        "use_torch_compile": _COMPILE,
        **_OF_EACH_TRAINED_MODEL,
    },
    "worker.critic": {
        "model.tokenizer_path": IgnoredKey("the critic reads the tokens of the policy"),
        "ulysses_sequence_parallel_size": IgnoredKey(_ULYSSES),
        "ulysses_size": IgnoredKey(_ULYSSES),
        **_OF_EACH_TRAINED_MODEL,
    },
    "worker.ref": {
        "fsdp.fsdp_size": IgnoredKey("worker.actor.fsdp.fsdp_size applies to the reference too"),
        "fsdp.mp_param_dtype": IgnoredKey("the reference computes in worker.ref.fsdp.torch_dtype"),
        "fsdp.mp_reduce_dtype": IgnoredKey("the reference has no gradients"),
        "micro_batch_size_per_device_for_experience": IgnoredKey(
            "worker.actor.micro_batch_size_per_device_for_experience applies to both models"
        ),
        "offload.offload_optimizer": IgnoredKey("the reference has no optimizer"),
        "ulysses_sequence_parallel_size": IgnoredKey(_ULYSSES),
        "ulysses_size": IgnoredKey(_ULYSSES),
        "use_torch_compile": _COMPILE,
        **_OF_EACH_MODEL,
    },
    "worker.reward": {
        "reward_function_name": IgnoredKey("worker.reward.reward_function names file and function"),
        "reward_type": IgnoredKey(
            "REWARD_TYPE in the file of the reward function decides",
            allowed=("function", "batch", "sequential"),
            advice="a reward model is a reward function here, such as examples/reward_function/reward_model.py: set "
            "worker.reward.reward_function",
        ),
    },
    "worker.rollout": {
        "prompt_length": IgnoredKey("data.max_prompt_length decides"),
        "response_length": IgnoredKey("data.max_response_length decides"),
        "trust_remote_code": IgnoredKey("worker.actor.model.trust_remote_code decides"),
    },
    "trainer": {
        "ray_timeline": IgnoredKey("the timing_s/* metrics give the time of each phase of a step"),
    },
}

IGNORED: Mapping[str, IgnoredKey] = {
    f"{section}.{key}": entry for section, entries in _BY_SECTION.items() for key, entry in sorted(entries.items())
}
"""Keys without effect. The name of a section stands for all keys in it."""

UNSUPPORTED_VALUES: Mapping[tuple[str, str], str] = {
    ("algorithm.adv_estimator", "ppo"): "PPO, with a critic, is gae",
    ("algorithm.adv_estimator", "reinforce"): "it is reinforce_plus_plus, or rloo with a group as the baseline",
    ("worker.rollout.dtype", "auto"): "set the dtype explicitly, so that it can be compared with the trainer's",
    ("worker.rollout.name", "hf"): "its name is transformers",
    ("worker.rollout.name", "sglang"): "the supported engines are vllm and transformers",
}
"""(Option, value) of EasyR1 or verl that is not supported: why."""

VERL_SECTIONS: Mapping[str, str] = {
    "actor_rollout_ref": "it is verl's name; the sections here are worker.actor, worker.rollout and worker.ref",
    "critic": "it is verl's name; the section here is worker.critic",
    "custom_reward_function": "it is verl's name; use worker.reward.reward_function=file.py:function",
    "reward_model": "it is verl's name; use worker.reward.reward_function=file.py:function",
}
"""Top-level sections of verl's configuration, which has another layout: what to use instead."""


OTHER_NAMES: Mapping[str, str] = {
    "batch_size": "data.rollout_batch_size",
    "default_local_dir": "trainer.save_checkpoint_path",
    "entropy_coef": "worker.actor.entropy_coeff",
    "epochs": "trainer.total_epochs",
    "epsilon": "worker.actor.clip_ratio_low",
    "epsilon_high": "worker.actor.clip_ratio_high",
    "eval_steps": "trainer.val_freq",
    "generation_batch_size": "data.rollout_batch_size",
    "gpus": "trainer.n_gpus_per_node",
    "gradient_checkpointing": "worker.actor.model.enable_gradient_checkpointing",
    "group_size": "worker.rollout.n",
    "kl_beta": "algorithm.kl_coef",
    "learning_rate": "worker.actor.optim.lr",
    "log_completions": "trainer.val_generations_to_log",
    "mask_truncated_completions": "algorithm.overlong_filtering",
    "max_actor_ckpt_to_keep": "trainer.save_limit",
    "max_ckpt_to_keep": "trainer.save_limit",
    "max_completion_length": "data.max_response_length",
    "max_new_tokens": "data.max_response_length",
    "max_tokens": "data.max_response_length",
    "mini_batch_size": "worker.actor.global_batch_size",
    "n_samples": "worker.rollout.n",
    "num_epochs": "trainer.total_epochs",
    "num_generations": "worker.rollout.n",
    "num_gpus": "trainer.n_gpus_per_node",
    "num_iterations": "worker.actor.ppo_epochs",
    "num_return_sequences": "worker.rollout.n",
    "num_samples": "worker.rollout.n",
    "num_train_epochs": "trainer.total_epochs",
    "output_dir": "trainer.save_checkpoint_path",
    "peft_config": "worker.actor.model.lora.rank",
    "per_device_train_batch_size": "worker.actor.micro_batch_size_per_device_for_update",
    "processing_class": "worker.actor.model.tokenizer_path",
    "report_to": "trainer.logger",
    "resume_from_checkpoint": "trainer.load_checkpoint_path",
    "resume_from_path": "trainer.load_checkpoint_path",
    "resume_mode": "trainer.find_last_checkpoint",
    "run_name": "trainer.experiment_name",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.save_limit",
    "scale_rewards": "algorithm.adv_estimator",
    "steps": "trainer.max_steps",
    "test_freq": "trainer.val_freq",
    "use_vllm": "worker.rollout.name",
}
"""Last part of a key as other libraries name it: the option that is meant, for suggestions."""


def nearest_option(name: str, further: Iterable[str] = ()) -> str:
    """Return the option that is probably meant. further: other keys that may be meant."""
    meant = OTHER_NAMES.get(name.rpartition(".")[2])
    return meant or nearest_key(name, [*(option.name for option in options().values()), *further])


def entry_of(name: str, table: Collection[str]) -> str | None:
    """Return the entry of RENAMED or IGNORED that a key equals or is below, or None."""
    parts = name.split(".")
    return next((key for n in range(1, len(parts) + 1) if (key := ".".join(parts[:n])) in table), None)


def renamed_file(value: str) -> str:
    """Return the current path of a shipped example if only that exists, and the value otherwise."""
    if is_inline_template(value) or path_exists(_file_of(value)):
        return value
    renamed = value
    for old, new in RENAMED_FILES.items():
        renamed = renamed.replace(old, new)
    return renamed if path_exists(_file_of(renamed)) else value


def _file_of(value: str) -> str:
    """Return the file of `file` or of `file.py:function`."""
    return value.rpartition(":")[0] or value
