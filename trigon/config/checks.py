"""Checks across options: conflicting values, missing options and missing files.

They run before anything heavy is imported, and open neither datasets nor models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, assert_never, cast

from trigon.config.defaults import resolve_weight_dtype
from trigon.config.paths import (
    DATASET_SUFFIXES,
    expand_path,
    is_inline_template,
    is_python_object,
    local_path,
    nearest_path,
    path_exists,
    split_dataset,
)
from trigon.config.plan import (
    context_length,
    join_with_or,
    longest_sequence,
    num_workers,
    suggest_batch_sizes,
    workers_per_copy,
)
from trigon.config.schema import Config, Section
from trigon.errors import ConfigError
from trigon.names import SHIPPED_REWARDS, SINGLE_COMPLETION_ESTIMATORS, DeviceType

MAX_PROBLEMS = 50
"""Maximum number of problems in one message; the others are counted."""


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one ConfigError with all problems, if there are any."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        num_more = len(problems) - MAX_PROBLEMS
        lines = "".join(f"\n  - {problem}" for problem in problems[:MAX_PROBLEMS])
        lines += f"\n  - and {num_more:,} more" if num_more > 0 else ""
        raise ConfigError(f"{len(problems)} problems in the configuration:{lines}")


def find_problems(
    config: Config, *, uncertain: Collection[str] = (), python_objects: Collection[str] = ()
) -> list[str]:
    """Return the reasons for which a configuration cannot run.

    uncertain: options that have their default because the user's value is invalid or misspelt.
    Problems are left out if finding them involved one of these options.
    python_objects: the texts that stand for Python objects of the caller (paths.PYTHON_PREFIX).
    """
    checks = (
        _check_devices,
        _check_numbers,
        _check_optimizer,
        _check_algorithm,
        _check_lengths,
        _check_required,
        partial(_check_files, python_objects=python_objects),
    )
    problems: list[str] = []
    for check in checks:
        recorded = _RecordedSection(config, "", set())
        found = check(cast(Config, recorded))
        if recorded.names_read.isdisjoint(uncertain):
            problems += found
    return problems


def find_warnings(config: Config) -> tuple[str, ...]:
    """Return warnings about options that work against each other or have no effect."""
    return (*_warn_of_conflicts(config), *_warn_of_unused(config))


def find_device_warnings(config: Config, device: DeviceType) -> tuple[str, ...]:
    """Return warnings about options that suit another device than that of the run."""
    rollout = config.worker.rollout
    if rollout.name != "vllm":
        return ()
    warnings = []
    match device:
        case "cuda":
            if rollout.enable_chunked_prefill is False:
                warnings.append(
                    "worker.rollout.enable_chunked_prefill=false: vLLM does not officially support this on a GPU, "
                    "where it may crash or give wrong results; leave the option out, or set it to true"
                )
        case "cpu":
            options = (
                (f"worker.rollout.model_runner={rollout.model_runner}", rollout.model_runner != "auto"),
                ("worker.rollout.async_scheduling=true", rollout.async_scheduling is True),
                ("worker.rollout.enable_chunked_prefill=true", rollout.enable_chunked_prefill is True),
            )
            warnings += [f"{option} has no effect on the CPU" for option, is_set in options if is_set]
        case _:
            assert_never(device)
    return tuple(warnings)


class _RecordedSection:
    """A section that adds the name of each option that is read to names_read."""

    def __init__(self, section: Section, prefix: str, names_read: set[str]) -> None:
        self._section, self._prefix, self.names_read = section, prefix, names_read

    def __getattr__(self, key: str) -> Any:
        value = getattr(self._section, key)
        if isinstance(value, Section):
            return _RecordedSection(value, f"{self._prefix}{key}.", self.names_read)
        self.names_read.add(self._prefix + key)
        return value


def _check_devices(config: Config) -> list[str]:
    trainer, rollout, fsdp = config.trainer, config.worker.rollout, config.worker.actor.fsdp
    world_size = num_workers(config)
    workers = f"there are {trainer.nnodes} x {trainer.n_gpus_per_node} = {world_size} workers"
    divisors = join_with_or([number for number in range(1, world_size + 1) if world_size % number == 0])
    problems = []
    if world_size % rollout.tensor_parallel_size:
        problems.append(
            f"worker.rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but {workers} "
            f"(trainer.nnodes x trainer.n_gpus_per_node), which it must divide; set it to {divisors}"
        )
    elif rollout.tensor_parallel_size > 1 and rollout.name != "vllm":
        problems.append(
            f"worker.rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but only vllm spreads one model "
            "over several devices; set it to 1, or worker.rollout.name=vllm"
        )
    if world_size % workers_per_copy(config):
        problems.append(
            f"worker.actor.fsdp.fsdp_size is {fsdp.fsdp_size}, but {workers}, which it must divide; set it to "
            f"{divisors}, or -1 for all"
        )
    if fsdp.enable_cpu_offload and world_size == 1:
        problems.append(
            "worker.actor.fsdp.enable_cpu_offload is true, but a single worker does not shard the model and cannot "
            "keep its weights in host memory; set it to false, and worker.actor.offload.offload_params=true to move "
            "them there while completions are sampled"
        )
    return problems


def _check_numbers(config: Config) -> list[str]:
    problems = []
    data, rollout, actor = config.data, config.worker.rollout, config.worker.actor
    if data.rollout_batch_size % actor.global_batch_size:
        per_step, per_update = suggest_batch_sizes(data.rollout_batch_size, actor.global_batch_size)
        problems.append(
            f"data.rollout_batch_size ({data.rollout_batch_size} prompts per step) is not a multiple of "
            f"worker.actor.global_batch_size ({actor.global_batch_size} prompts per update); the nearest valid values: "
            f"data.rollout_batch_size={join_with_or(per_step)}, or "
            f"worker.actor.global_batch_size={join_with_or(per_update)}"
        )
    for key, top_k in (
        ("worker.rollout.top_k", rollout.top_k),
        ("worker.rollout.val_override_config.top_k", rollout.val_override_config.top_k),
    ):
        if top_k == 0:
            problems.append(f"{key} is 0, which leaves no token to sample; -1 samples from all")
    if data.train_weights and len(data.train_weights) != len(data.train_files):
        problems.append(
            f"data.train_weights has {len(data.train_weights)} weights, but data.train_files {len(data.train_files)} "
            "datasets; give one weight per dataset, or leave the weights out"
        )
    if data.val_batch_size == 0:
        problems.append("data.val_batch_size is 0; set -1 for all validation prompts at once, or at least 1")
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        problems.append(
            f"data.min_pixels ({data.min_pixels}) is above data.max_pixels ({data.max_pixels}): no image fits; "
            "lower the first or raise the second"
        )
    return problems


def _check_optimizer(config: Config) -> list[str]:
    """Return the problems of training with numbers of 16 bits, which may lose updates."""
    actor, dtype = config.worker.actor, resolve_weight_dtype(config)
    if config.trainer.val_only:
        return []
    if actor.fsdp.mp_param_dtype == "fp16":
        return [
            "worker.actor.fsdp.mp_param_dtype is fp16, whose smallest numbers are too large for most gradients: they "
            "would be 0, since gradients are not scaled here; set worker.actor.fsdp.mp_param_dtype=bf16, which has "
            "the range of fp32, or fp32"
        ]
    # Adapters are in float32, whatever the dtype of the weights.
    if dtype == "fp32" or actor.model.lora.rank > 0:
        return []
    problem = f"worker.actor.fsdp.torch_dtype is {dtype}"
    match dtype:
        case "fp16":
            return [
                f"{problem}, which no optimizer strategy can train: almost every update is rounded to nothing; set "
                "worker.actor.fsdp.torch_dtype=bf16 worker.actor.optim.strategy=adamw_bf16, or "
                "worker.actor.fsdp.torch_dtype=fp32"
            ]
        case "bf16" if actor.optim.strategy == "adamw":
            return [
                f"{problem} with worker.actor.optim.strategy=adamw, which rounds almost every update to nothing: near "
                "1, numbers in bf16 are 0.004 apart, and an update moves a weight by about the learning rate, "
                f"{actor.optim.lr:g}; set worker.actor.optim.strategy=adamw_bf16, which keeps the bits that bf16 "
                "lacks, or worker.actor.fsdp.torch_dtype=fp32"
            ]
        case "bf16":
            return []
        case _:
            assert_never(dtype)


def _check_algorithm(config: Config) -> list[str]:
    problems = []
    algorithm, rollout = config.algorithm, config.worker.rollout
    estimator = algorithm.adv_estimator
    if rollout.n < 2 and estimator not in SINGLE_COMPLETION_ESTIMATORS and not config.trainer.val_only:
        problems.append(
            f"worker.rollout.n is {rollout.n}, but {estimator} compares the completions of a group; set "
            "worker.rollout.n to at least 2, say 5, or algorithm.adv_estimator to "
            f"{' or '.join(SINGLE_COMPLETION_ESTIMATORS)}"
        )
    kl_in_reward = not algorithm.disable_kl and algorithm.kl_coef > 0 and not algorithm.use_kl_loss
    if estimator == "gdpo" and kl_in_reward:
        problems.append(
            "algorithm.adv_estimator=gdpo normalizes each part of the reward, and a KL penalty is not one of them; "
            "set algorithm.use_kl_loss=true, or algorithm.disable_kl=true"
        )
    completions = config.data.rollout_batch_size * rollout.n
    if kl_in_reward and algorithm.kl_type == "adaptive" and 0.2 * completions >= algorithm.kl_horizon:
        problems.append(
            f"algorithm.kl_horizon is {algorithm.kl_horizon:g}, but a step has data.rollout_batch_size x "
            f"worker.rollout.n = {completions} completions: the KL weight could become negative in one step; set "
            f"kl_horizon above {0.2 * completions:g}, say {10 * completions}"
        )
    if algorithm.overlong_filtering and rollout.ignore_eos:
        problems.append(
            "algorithm.overlong_filtering excludes completions that were cut, and with worker.rollout.ignore_eos=true "
            "all of them are; set one of the two to false"
        )
    if algorithm.reward_weights and not any(algorithm.reward_weights.values()):
        problems.append("algorithm.reward_weights are all 0, which makes every advantage 0; raise one of them")
    if algorithm.online_filtering and algorithm.filter_low >= algorithm.filter_high:
        problems.append(
            f"algorithm.filter_low ({algorithm.filter_low}) is not below algorithm.filter_high "
            f"({algorithm.filter_high}): no group is between them; lower the first or raise the second"
        )
    if algorithm.mismatch_correction != "off" and (rollout.top_p < 1 or rollout.top_k > 0):
        problems.append(
            f"algorithm.mismatch_correction={algorithm.mismatch_correction} compares the probabilities of engine and "
            f"trainer, and with worker.rollout.top_p={rollout.top_p}, worker.rollout.top_k={rollout.top_k} they are "
            "those of different distributions; set top_p=1 and top_k=-1, or mismatch_correction=off"
        )
    return problems


def _check_lengths(config: Config) -> list[str]:
    data, rollout = config.data, config.worker.rollout
    longest, context = longest_sequence(config), context_length(config)
    lengths = f"a prompt ({data.max_prompt_length}) and its completion can have {longest} tokens together"
    problems = []
    if context < longest:
        problems.append(
            f"worker.rollout.max_model_len is {context}, but {lengths}; set it to at least {longest}, or leave it out"
        )
    elif (
        rollout.name == "vllm" and rollout.max_num_batched_tokens < context and rollout.enable_chunked_prefill is False
    ):
        problems.append(
            f"worker.rollout.max_num_batched_tokens is {rollout.max_num_batched_tokens}, but a sequence may have "
            f"{context} tokens, and vLLM does not split it without chunked prefill ({lengths}); set it to at least "
            f"{context}, or worker.rollout.enable_chunked_prefill=true"
        )
    return problems


def _check_required(config: Config) -> list[str]:
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
    for name in config.worker.reward.env:
        if not name.isidentifier():
            problems.append(
                f"worker.reward.env has {name.partition('=')[0]!r}, but takes names of environment variables "
                "without values; export the variable, and give its name only, for example OPENAI_API_KEY"
            )
    if not config.data.train_files and not trainer.val_only:
        problems.append("data.train_files is not set; give a hub id (hiyouga/geometry3k@train), a file or a folder")
    if not config.data.val_files and (trainer.val_only or trainer.val_before_train or trainer.val_freq > 0):
        advice = (
            "give a hub id (hiyouga/geometry3k@test), a file or a folder"
            if trainer.val_only
            else "set it, or switch validation off with trainer.val_before_train=false trainer.val_freq=-1"
        )
        problems.append(f"data.val_files is not set, but validation is on; {advice}")
    return problems


def _check_files(config: Config, *, python_objects: Collection[str]) -> list[str]:
    """Return problems of missing local files and folders. Hub ids are not looked up."""
    data, model = config.data, config.worker.actor.model
    paths: dict[str, str] = {}
    missing_objects: list[str] = []
    for key, template in (
        ("data.format_prompt", data.format_prompt),
        ("data.override_chat_template", data.override_chat_template),
    ):
        if template and not is_inline_template(template):
            paths[key] = template
    train_files = () if config.trainer.val_only else data.train_files
    for key, datasets in (("data.train_files", train_files), ("data.val_files", data.val_files)):
        for number, dataset in enumerate(datasets):
            if is_python_object(dataset):
                missing_objects += [] if dataset in python_objects else [f"{key} is {dataset}"]
                continue
            location, _ = split_dataset(dataset)
            if local_path(location, suffixes=DATASET_SUFFIXES) is not None:
                paths[f"{key}[{number}]" if len(datasets) > 1 else key] = location
    for key, model_path in (
        ("worker.actor.model.model_path", model.model_path),
        ("worker.actor.model.tokenizer_path", model.tokenizer_path),
    ):
        if model_path and local_path(model_path) is not None:
            paths[key] = model_path
    reward = config.worker.reward.reward_function
    if reward and is_python_object(reward):
        missing_objects += [] if reward in python_objects else [f"worker.reward.reward_function is {reward}"]
    elif reward and reward not in SHIPPED_REWARDS:
        paths["worker.reward.reward_function"] = reward.rpartition(":")[0] or reward
    if data.image_dir:
        paths["data.image_dir"] = data.image_dir
    if config.trainer.load_checkpoint_path:
        paths["trainer.load_checkpoint_path"] = config.trainer.load_checkpoint_path
    hints = {
        "data.format_prompt": "; an inline template contains {{ content }}",
        "data.override_chat_template": "; an inline template contains {{ }}",
        "worker.reward.reward_function": f"; it is file.py:function, or one of {', '.join(SHIPPED_REWARDS)}",
    }
    return [
        f"{problem}, which a program gave to trigon.train as a Python object; give a file, or call trigon.train again"
        for problem in missing_objects
    ] + [
        f"{key}: there is no {path} (looked for {expand_path(path).absolute()})"
        f"{nearest_path(path) or hints.get(key, '')}"
        for key, path in paths.items()
        if not path_exists(path)
    ]


def _warn_of_conflicts(config: Config) -> list[str]:
    """Return warnings about options that are valid but work against each other."""
    warnings = []
    algorithm, rollout, actor = config.algorithm, config.worker.rollout, config.worker.actor
    if not algorithm.disable_kl and algorithm.use_kl_loss:
        if algorithm.kl_penalty == "kl":
            warnings.append(
                "algorithm.kl_penalty=kl in the loss has a gradient of zero on average; use low_var_kl in the loss"
            )
        if algorithm.kl_type == "adaptive":
            warnings.append(
                "algorithm.kl_type=adaptive has no effect with algorithm.use_kl_loss=true: only the weight of a KL in "
                "the reward is adapted"
            )
    if actor.loss_type == "cispo" and actor.clip_ratio_low < 1:
        warnings.append(
            f"worker.actor.clip_ratio_low={actor.clip_ratio_low} raises every cispo weight below "
            f"{1 - actor.clip_ratio_low:g} to that; the paper has no lower bound, which is clip_ratio_low=1"
        )
    if actor.loss_type in ("gspo", "gspo_token") and max(actor.clip_ratio_low, actor.clip_ratio_high) > 0.05:
        warnings.append(
            f"worker.actor.loss_type={actor.loss_type} has one ratio per completion, a mean over its tokens, which "
            f"rarely reaches clip_ratio_low={actor.clip_ratio_low} or clip_ratio_high={actor.clip_ratio_high}; "
            "the paper has 0.0003 and 0.0004"
        )
    if algorithm.adv_estimator == "dr_grpo" and actor.loss_avg_mode != "seq_fixed":
        warnings.append(
            "algorithm.adv_estimator=dr_grpo omits the standard deviation; the other half of Dr. GRPO, no length bias, "
            "is worker.actor.loss_avg_mode=seq_fixed"
        )
    if algorithm.filter_surplus == "keep" and algorithm.online_filtering and algorithm.mismatch_correction == "off":
        warnings.append(
            "algorithm.filter_surplus=keep trains on completions that are one step old; "
            "algorithm.mismatch_correction=truncate corrects for it"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        warnings.append(
            f"worker.rollout.top_p={rollout.top_p}, worker.rollout.top_k={rollout.top_k}: training samples are cut to "
            "the most likely tokens, and the trainer's log-probabilities ignore the cut"
        )
    return warnings


def _warn_of_unused(config: Config) -> list[str]:
    """Return warnings about options that have no effect without another one."""
    data, algorithm, actor = config.data, config.algorithm, config.worker.actor
    filtering = ("algorithm.online_filtering=true", algorithm.online_filtering)
    gdpo = ("algorithm.adv_estimator=gdpo", algorithm.adv_estimator == "gdpo")
    discounting = ("algorithm.adv_estimator=reinforce_plus_plus", algorithm.adv_estimator == "reinforce_plus_plus")
    cispo = ("worker.actor.loss_type=cispo", actor.loss_type == "cispo")
    seq_fixed = ("worker.actor.loss_avg_mode=seq_fixed", actor.loss_avg_mode == "seq_fixed")
    kl = ("algorithm.disable_kl=false", not algorithm.disable_kl)
    options = [
        ("data.mini_rollout_batch_size", data.mini_rollout_batch_size is not None, filtering),
        ("algorithm.filter_surplus=keep", algorithm.filter_surplus == "keep", filtering),
        ("algorithm.reward_weights", bool(algorithm.reward_weights), gdpo),
        ("algorithm.gamma", algorithm.gamma != 1, discounting),
        ("algorithm.kl_type=adaptive", algorithm.kl_type == "adaptive", kl),
        ("worker.actor.cispo_cap", actor.cispo_cap is not None, cispo),
        ("worker.actor.loss_fixed_length", actor.loss_fixed_length is not None, seq_fixed),
    ]
    return [
        f"{key} has no effect without {requirement}"
        for key, is_set, (requirement, is_met) in options
        if is_set and not is_met
    ]
