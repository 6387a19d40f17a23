"""What no option can know alone: numbers that must fit together, values that are needed, files that must be there.

Runs before anything heavy is imported. Knows the schema and the file system; refuses to open datasets and models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trigon.config.plan import (
    batch_proposals,
    context_length,
    either,
    longest_sequence,
    num_workers,
    workers_per_copy,
)
from trigon.config.schema import Config
from trigon.errors import ConfigError

SHIPPED_REWARDS = ("math", "r1v", "dapo", "counting", "geoqa", "vqa", "android_gui")
"""Reward functions that need no file."""

ALONE_WILL_DO = ("reinforce_plus_plus", "remax")
"""Advantage estimators that do not compare the answers to one prompt with each other, so that one answer will do."""

DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv")
"""A dataset with one of these endings is a local file, not a hub id."""


def refuse(problems: Sequence[str]) -> None:
    """Raise one ConfigError with all the problems, if there are any."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problems in the configuration:{lines}")


def check(config: Config) -> tuple[str, ...]:
    """Return warnings about wishes that work against each other.

    Raises: ConfigError, with every problem in one message, if the configuration cannot be honoured.
    """
    refuse(
        [
            *_devices(config),
            *_arithmetic(config),
            *_algorithm(config),
            *_lengths(config),
            *_needed(config),
            *_files(config),
        ]
    )
    return (*_doubts(config), *_without_effect(config))


def _devices(config: Config) -> list[str]:
    trainer, rollout, fsdp = config.trainer, config.worker.rollout, config.worker.actor.fsdp
    world = num_workers(config)
    workers = f"there are {trainer.nnodes} x {trainer.n_gpus_per_node} = {world} workers"
    divisors = either([number for number in range(1, world + 1) if world % number == 0])
    problems = []
    if world % rollout.tensor_parallel_size:
        problems.append(
            f"worker.rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but {workers} "
            f"(trainer.nnodes x trainer.n_gpus_per_node), which it must divide; set it to {divisors}"
        )
    elif rollout.tensor_parallel_size > 1 and rollout.name != "vllm":
        problems.append(
            f"worker.rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but only vllm spreads one model "
            "over several devices; set it to 1, or worker.rollout.name=vllm"
        )
    if world % workers_per_copy(config):
        problems.append(
            f"worker.actor.fsdp.fsdp_size is {fsdp.fsdp_size}, but {workers}, which it must divide; set it to "
            f"{divisors}, or -1 for all"
        )
    if fsdp.enable_cpu_offload and world == 1:
        problems.append(
            "worker.actor.fsdp.enable_cpu_offload is true, but a single worker shards nothing and cannot keep its "
            "weights in host memory; set it to false, and worker.actor.offload.offload_params=true to move them there "
            "while completions are sampled"
        )
    return problems


def _arithmetic(config: Config) -> list[str]:
    problems = []
    data, rollout, actor = config.data, config.worker.rollout, config.worker.actor
    if data.rollout_batch_size % actor.global_batch_size:
        steps, updates = batch_proposals(data.rollout_batch_size, actor.global_batch_size)
        problems.append(
            f"data.rollout_batch_size ({data.rollout_batch_size} prompts a step) is not a multiple of "
            f"worker.actor.global_batch_size ({actor.global_batch_size} prompts an update); nearest that work: "
            f"data.rollout_batch_size={either(steps)}, or worker.actor.global_batch_size={either(updates)}"
        )
    for key, top_k in (
        ("worker.rollout.top_k", rollout.top_k),
        ("worker.rollout.val_override_config.top_k", rollout.val_override_config.top_k),
    ):
        if top_k == 0:
            problems.append(f"{key} is 0, which samples from no token; -1 samples from all")
    if data.train_weights and len(data.train_weights) != len(data.train_files):
        problems.append(
            f"data.train_weights has {len(data.train_weights)} weights, but data.train_files {len(data.train_files)} "
            "datasets; give each its weight, or leave the weights out"
        )
    if data.val_batch_size == 0:
        problems.append("data.val_batch_size is 0; set -1 for the whole validation set at once, or at least 1")
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        problems.append(
            f"data.min_pixels ({data.min_pixels}) is above data.max_pixels ({data.max_pixels}): no image fits; "
            "lower the one or raise the other"
        )
    return problems


def _algorithm(config: Config) -> list[str]:
    problems = []
    algorithm, rollout = config.algorithm, config.worker.rollout
    estimator = algorithm.adv_estimator
    if rollout.n < 2 and estimator not in ALONE_WILL_DO and not config.trainer.val_only:
        problems.append(
            f"worker.rollout.n is {rollout.n}, but {estimator} compares the answers to one prompt with each other; "
            f"set worker.rollout.n to at least 2, say 5, or algorithm.adv_estimator to {' or '.join(ALONE_WILL_DO)}"
        )
    if estimator == "gdpo" and not algorithm.disable_kl and algorithm.kl_coef > 0 and not algorithm.use_kl_loss:
        problems.append(
            "algorithm.adv_estimator=gdpo normalizes each part of the reward, and a KL penalty is none of them; set "
            "algorithm.use_kl_loss=true, or algorithm.disable_kl=true"
        )
    answers = config.data.rollout_batch_size * rollout.n
    if algorithm.kl_type == "adaptive" and 0.2 * answers >= algorithm.kl_horizon:
        problems.append(
            f"algorithm.kl_horizon is {algorithm.kl_horizon:g}, but a step has data.rollout_batch_size x "
            f"worker.rollout.n = {answers} answers: the weight would change by its whole size in one, and could become "
            f"negative; set kl_horizon above {0.2 * answers:g}, say {10 * answers}"
        )
    if algorithm.overlong_filtering and rollout.ignore_eos:
        problems.append(
            "algorithm.overlong_filtering leaves out the answers that were cut, which with worker.rollout.ignore_eos="
            "true are all; set one of them to false"
        )
    if algorithm.reward_weights and not any(algorithm.reward_weights.values()):
        problems.append("algorithm.reward_weights are all 0, so that there is nothing to learn; raise one of them")
    if algorithm.online_filtering and algorithm.filter_low >= algorithm.filter_high:
        problems.append(
            f"algorithm.filter_low ({algorithm.filter_low}) is not below algorithm.filter_high "
            f"({algorithm.filter_high}): no group lies between them; lower the one or raise the other"
        )
    if algorithm.mismatch_correction != "off" and (rollout.top_p < 1 or rollout.top_k > 0):
        problems.append(
            f"algorithm.mismatch_correction={algorithm.mismatch_correction} compares the probabilities of engine and "
            f"trainer, and with worker.rollout.top_p={rollout.top_p}, worker.rollout.top_k={rollout.top_k} they are "
            "those of different distributions; set top_p=1 and top_k=-1, or mismatch_correction=off"
        )
    return problems


def _lengths(config: Config) -> list[str]:
    data, rollout = config.data, config.worker.rollout
    if rollout.name != "vllm":
        return []
    longest, context = longest_sequence(config), context_length(config)
    in_words = f"a prompt ({data.max_prompt_length}) and its answer can have {longest} tokens together"
    problems = []
    if context < longest:
        problems.append(
            f"worker.rollout.max_model_len is {context}, but {in_words}; set it to at least {longest}, or leave it out"
        )
    elif rollout.max_num_batched_tokens < context and not rollout.enable_chunked_prefill:
        problems.append(
            f"worker.rollout.max_num_batched_tokens is {rollout.max_num_batched_tokens}, but vLLM plans for "
            f"{context} tokens in a sequence and does not split it unless told to ({in_words}); set it to at least "
            f"{context}, or worker.rollout.enable_chunked_prefill=true"
        )
    return problems


def _needed(config: Config) -> list[str]:
    problems = []
    trainer = config.trainer
    if not config.worker.actor.model.model_path:
        problems.append(
            "worker.actor.model.model_path is not set; give a hub id (Qwen/Qwen2.5-VL-3B-Instruct) or a local folder"
        )
    if not config.worker.reward.reward_function:
        problems.append(
            "worker.reward.reward_function is not set; give file.py:function, or one of the shipped "
            f"{', '.join(SHIPPED_REWARDS)}"
        )
    if not config.data.train_files:
        problems.append("data.train_files is not set; give a hub id (hiyouga/geometry3k@train), a file or a folder")
    if not config.data.val_files and (trainer.val_only or trainer.val_before_train or trainer.val_freq > 0):
        mend = (
            "give a hub id (hiyouga/geometry3k@test), a file or a folder"
            if trainer.val_only
            else "set it, or switch validation off with trainer.val_before_train=false trainer.val_freq=-1"
        )
        problems.append(f"data.val_files is not set, but validation is wanted; {mend}")
    return problems


def _files(config: Config) -> list[str]:
    """Return what is missing. Hub ids are not looked up: only what can be nothing but a local path is."""
    data, model = config.data, config.worker.actor.model
    wanted: dict[str, str] = {}
    for key, template in (
        ("data.format_prompt", data.format_prompt),
        ("data.override_chat_template", data.override_chat_template),
    ):
        if template and "{{" not in template:
            wanted[key] = template
    for key, specs in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for number, spec in enumerate(specs):
            path = spec if Path(spec).expanduser().exists() else spec.rpartition("@")[0] or spec
            if _is_local(path) or path.endswith(DATA_SUFFIXES):
                wanted[f"{key}[{number}]" if len(specs) > 1 else key] = path
    for key, place in (
        ("worker.actor.model.model_path", model.model_path),
        ("worker.actor.model.tokenizer_path", model.tokenizer_path),
    ):
        if place and _is_local(place):
            wanted[key] = place
    reward = config.worker.reward.reward_function
    if reward and reward not in SHIPPED_REWARDS:
        wanted["worker.reward.reward_function"] = reward.rpartition(":")[0] or reward
    if data.image_dir:
        wanted["data.image_dir"] = data.image_dir
    if config.trainer.load_checkpoint_path:
        wanted["trainer.load_checkpoint_path"] = config.trainer.load_checkpoint_path
    hints = {
        "data.format_prompt": "; a template written in place holds {{ content }}",
        "data.override_chat_template": "; a template written in place holds {{ }}",
        "worker.reward.reward_function": f"; it is file.py:function, or one of {', '.join(SHIPPED_REWARDS)}",
    }
    return [
        f"{key}: there is no {path} (looked for {Path(path).expanduser().absolute()}){hints.get(key, '')}"
        for key, path in wanted.items()
        if not Path(path).expanduser().exists()
    ]


def _doubts(config: Config) -> list[str]:
    doubts = []
    algorithm, rollout, actor = config.algorithm, config.worker.rollout, config.worker.actor
    if not algorithm.disable_kl and algorithm.use_kl_loss:
        if algorithm.kl_penalty == "kl":
            doubts.append(
                "algorithm.kl_penalty=kl in the loss has a gradient of zero on average; low_var_kl is meant for it"
            )
        if algorithm.kl_type == "adaptive":
            doubts.append(
                "algorithm.kl_type=adaptive has no effect with algorithm.use_kl_loss=true: only the KL in the reward "
                "is steered"
            )
    if actor.loss_type == "cispo" and actor.clip_ratio_low < 1:
        doubts.append(
            f"worker.actor.clip_ratio_low={actor.clip_ratio_low} raises every cispo weight below "
            f"{1 - actor.clip_ratio_low:g} to that; the paper has no lower bound, which is clip_ratio_low=1"
        )
    if actor.loss_type in ("gspo", "gspo_token") and max(actor.clip_ratio_low, actor.clip_ratio_high) > 0.05:
        doubts.append(
            f"worker.actor.loss_type={actor.loss_type} has a ratio for a whole answer, a mean over its tokens, which "
            f"hardly ever reaches clip_ratio_low={actor.clip_ratio_low} or clip_ratio_high={actor.clip_ratio_high}; "
            "the paper has 0.0003 and 0.0004"
        )
    if algorithm.adv_estimator == "dr_grpo" and actor.loss_avg_mode != "seq_fixed":
        doubts.append(
            "algorithm.adv_estimator=dr_grpo leaves out the standard deviation; the other half of Dr.GRPO, no bias by "
            "length, is worker.actor.loss_avg_mode=seq_fixed"
        )
    if algorithm.filter_surplus == "keep" and algorithm.online_filtering and algorithm.mismatch_correction == "off":
        doubts.append(
            "algorithm.filter_surplus=keep learns from answers that are a step old; algorithm.mismatch_correction="
            "truncate corrects for it"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        doubts.append(
            f"worker.rollout.top_p={rollout.top_p}, worker.rollout.top_k={rollout.top_k}: training samples are cut to "
            "the likeliest tokens, and the trainer's log-probabilities do not know of it"
        )
    return doubts


def _without_effect(config: Config) -> list[str]:
    """Return what was asked for, but belongs to something that was not."""
    data, algorithm, actor = config.data, config.algorithm, config.worker.actor
    with_filtering = ("algorithm.online_filtering=true", algorithm.online_filtering)
    with_gdpo = ("algorithm.adv_estimator=gdpo", algorithm.adv_estimator == "gdpo")
    with_discount = ("algorithm.adv_estimator=reinforce_plus_plus", algorithm.adv_estimator == "reinforce_plus_plus")
    with_cispo = ("worker.actor.loss_type=cispo", actor.loss_type == "cispo")
    with_fixed = ("worker.actor.loss_avg_mode=seq_fixed", actor.loss_avg_mode == "seq_fixed")
    with_kl = ("algorithm.disable_kl=false", not algorithm.disable_kl)
    wishes = [
        ("data.mini_rollout_batch_size", data.mini_rollout_batch_size is not None, with_filtering),
        ("algorithm.filter_surplus=keep", algorithm.filter_surplus == "keep", with_filtering),
        ("algorithm.reward_weights", bool(algorithm.reward_weights), with_gdpo),
        ("algorithm.gamma", algorithm.gamma != 1, with_discount),
        ("algorithm.kl_type=adaptive", algorithm.kl_type == "adaptive", with_kl),
        ("worker.actor.cispo_cap", actor.cispo_cap is not None, with_cispo),
        ("worker.actor.loss_fixed_length", actor.loss_fixed_length is not None, with_fixed),
    ]
    return [f"{key} has no effect without {owner}" for key, wished, (owner, used) in wishes if wished and not used]


def _is_local(path: str) -> bool:
    """Whether a path cannot be a hub id, which is `name` or `owner/name`."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1
