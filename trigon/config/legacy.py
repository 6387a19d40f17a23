"""Keys that EasyR1's files hold and the schema does not: renamed ones, and ones with nothing to switch.

Every entry of both tables is accepted with one warning. A retired key whose value asks for what this version cannot do
is refused, with the reason. Knows names and values only; load.py reads files and applies the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "worker.actor.use_kl_loss": "algorithm.use_kl_loss",
    "worker.reward.compute_score": "worker.reward.reward_function",
    "worker.reward.score_function": "worker.reward.reward_function",
    "worker.reward.score_function_kwargs": "worker.reward.reward_function_kwargs",
}
"""Older name: the name today. The meaning and the values are the same."""

RENAMED_FILES: Mapping[str, str] = {
    "math_format.jinja": "math.jinja",
    "r1v_format.jinja": "r1v.jinja",
    "examples/score_function/": "examples/reward_function/",
}
"""Older part of a path to a shipped example: that part today."""


@dataclass(frozen=True, slots=True)
class Retired:
    """A key with nothing to switch.

    because: why it has no effect. only: the values that can be honoured by doing nothing; None: all of them.
    instead: for any other value, why it cannot be honoured and what to do.
    """

    because: str
    only: tuple[Any, ...] | None = None
    instead: str = ""

    def refuses(self, value: Any) -> bool:
        """Whether the value asks for something that doing nothing would not give."""
        return self.only is not None and value not in self.only


_AUTOMATIC = "it is worked out from other keys"
_CRITIC = "none of the algorithms here has a critic"
_FSDP_2 = "torch's FSDP2 always keeps parameters as they are"
_PACKED = "sequences are always packed without padding, up to a token budget, and results do not depend on it"
_RANK_0 = "one worker always reads the weights, and sends each tensor to the others"
_STRATEGY = "several workers always shard the model by torch's FSDP2"
_ULYSSES = Retired(
    "sequences are not split over devices",
    only=(1,),
    instead="this version has no sequence parallelism; set it to 1 or leave it out",
)

RETIRED: Mapping[str, Retired] = {
    "algorithm.lam": Retired(f"{_CRITIC}, whose errors it would weigh"),
    "worker.actor.clip_ratio": Retired(
        "the bounds are worker.actor.clip_ratio_low and worker.actor.clip_ratio_high",
        only=(None,),
        instead="one bound is now two; set worker.actor.clip_ratio_low and worker.actor.clip_ratio_high to it",
    ),
    "worker.actor.dynamic_batching": Retired(_PACKED),
    "worker.actor.fsdp.enable_rank0_init": Retired(_RANK_0),
    "worker.actor.fsdp.mp_buffer_dtype": Retired("buffers keep the format the model's own code gives them"),
    "worker.actor.fsdp.use_orig_params": Retired(_FSDP_2),
    "worker.actor.global_batch_size_per_device": Retired(_AUTOMATIC),
    "worker.actor.optim.training_steps": Retired("updates are counted from the data; trainer.max_steps limits them"),
    "worker.actor.padding_free": Retired(_PACKED),
    "worker.actor.strategy": Retired(_STRATEGY),
    "worker.actor.ulysses_sequence_parallel_size": _ULYSSES,
    "worker.actor.ulysses_size": _ULYSSES,
    "worker.actor.use_torch_compile": Retired("log-probabilities are computed in chunks, without compiling"),
    "worker.critic": Retired(_CRITIC),
    "worker.hybrid_engine": Retired(
        "trainer and engine always share the device",
        only=(True,),
        instead="trainer and engine share the device in this version; set it to true",
    ),
    "worker.ref.dynamic_batching": Retired(_PACKED),
    "worker.ref.fsdp.enable_rank0_init": Retired(_RANK_0),
    "worker.ref.fsdp.fsdp_size": Retired("the reference is sharded as worker.actor.fsdp.fsdp_size says"),
    "worker.ref.fsdp.mp_buffer_dtype": Retired("buffers keep the format the model's own code gives them"),
    "worker.ref.fsdp.mp_param_dtype": Retired("the reference computes in worker.ref.fsdp.torch_dtype"),
    "worker.ref.fsdp.mp_reduce_dtype": Retired("the reference has no gradients"),
    "worker.ref.fsdp.use_orig_params": Retired(_FSDP_2),
    "worker.ref.micro_batch_size_per_device_for_experience": Retired(
        "worker.actor.micro_batch_size_per_device_for_experience serves both models"
    ),
    "worker.ref.offload.offload_optimizer": Retired("the reference has no optimizer"),
    "worker.ref.padding_free": Retired(_PACKED),
    "worker.ref.strategy": Retired(_STRATEGY),
    "worker.ref.ulysses_size": _ULYSSES,
    "worker.ref.use_torch_compile": Retired("log-probabilities are computed in chunks, without compiling"),
    "worker.reward.reward_function_name": Retired("worker.reward.reward_function names file and function"),
    "worker.reward.reward_type": Retired(
        "the file of the reward function decides, by its REWARD_TYPE",
        only=("function", "batch", "sequential"),
        instead="this version scores with a function, not a model; set worker.reward.reward_function",
    ),
    "worker.rollout.prompt_length": Retired("data.max_prompt_length decides"),
    "worker.rollout.response_length": Retired("data.max_response_length decides"),
    "worker.rollout.trust_remote_code": Retired("worker.actor.model.trust_remote_code decides"),
    "trainer.critic_warmup": Retired(
        _CRITIC,
        only=(0,),
        instead="there is no critic to warm up; set it to 0",
    ),
    "trainer.ray_timeline": Retired("the timing_s/* metrics say what each step spent its time on"),
}
"""A key, or a section with all it holds: why it has no effect."""

ABSENT: Mapping[tuple[str, str], str] = {
    ("algorithm.adv_estimator", "gae"): "it needs a critic, and this version has none",
    ("worker.rollout.dtype", "auto"): "name the format, so that it can be compared with the trainer's",
    ("worker.rollout.name", "hf"): "its name is transformers",
    ("worker.rollout.name", "sglang"): "this version samples with vllm or transformers",
}
"""Option and value that EasyR1 or verl has and this version has not: why."""

FOREIGN_SECTIONS: Mapping[str, str] = {
    "actor_rollout_ref": "it is verl's name; the sections here are worker.actor, worker.rollout and worker.ref",
    "critic": f"it is verl's name; {_CRITIC}",
    "custom_reward_function": "it is verl's name; use worker.reward.reward_function=file.py:function",
    "reward_model": "it is verl's name; use worker.reward.reward_function=file.py:function",
}
"""Outermost sections of verl's own layout, which is another language: what to write instead."""


def retired_key(name: str) -> str | None:
    """Return the entry of RETIRED that a key is or lies under, or None."""
    parts = name.split(".")
    return next((key for n in range(1, len(parts) + 1) if (key := ".".join(parts[:n])) in RETIRED), None)


def renamed_file(value: str) -> str:
    """Return the path of a shipped example as it is today, where the older one is gone and that one is there."""
    if "{{" in value or _file_of(value).exists():
        return value
    renamed = value
    for old, new in RENAMED_FILES.items():
        renamed = renamed.replace(old, new)
    return renamed if _file_of(renamed).exists() else value


def _file_of(value: str) -> Path:
    """Return the file of `file` or of `file.py:function`."""
    return Path(value.rpartition(":")[0] or value).expanduser()
