"""Checks across options: conflicting values, missing options and missing files.

They run before anything heavy is imported, and open neither datasets nor models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, assert_never, cast

from trigon.config.batch_sizes import (
    GROUP_SIZE,
    compares_groups,
    resolve_group_size,
    resolve_prompts_per_step,
    resolve_prompts_per_update,
)
from trigon.config.compared import find_unknown_names
from trigon.config.critic_checks import CRITIC_CHECKS, warn_of_critic
from trigon.config.defaults import resolve_mismatch_correction, resolve_weight_dtype
from trigon.config.episode_checks import EPISODE_CHECKS, warn_of_episodes
from trigon.config.files import FILE_CHECKS, REQUIRED_CHECKS
from trigon.config.names import SINGLE_COMPLETION_ESTIMATORS, DeviceType
from trigon.config.offload_checks import OFFLOAD_CHECKS, warn_of_cpu_offload
from trigon.config.plan import (
    context_length,
    join_with_or,
    longest_sequence,
    num_samplers,
    num_workers,
    suggest_batch_sizes,
    workers_per_copy,
)
from trigon.config.pool_checks import POOL_CHECKS, describe_samplers, warn_of_pools
from trigon.config.schema import Config, Section
from trigon.errors import ConfigError

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


def find_problems(config: Config, *, uncertain: Collection[str] = ()) -> list[str]:
    """Return the reasons for which a configuration cannot run.

    uncertain: options that have their default because the user's value is invalid or misspelt.
    Checks that read one of these options are left out; each is small, so that the others find what
    else is wrong.
    """
    problems: list[str] = []
    for check in _CHECKS:
        recorded = _RecordedSection(config, "", set())
        found = check(cast(Config, recorded))
        if recorded.names_read.isdisjoint(uncertain):
            problems += found
    return problems


def find_warnings(config: Config, *, uncertain: Collection[str] = ()) -> tuple[str, ...]:
    """Return warnings about options that work against each other or have no effect.

    uncertain: as for find_problems; those about the number of workers are left out.
    """
    return (
        *(() if {"trainer.nnodes", "trainer.n_gpus_per_node"}.intersection(uncertain) else warn_of_cpu_offload(config)),
        *_warn_of_conflicts(config),
        *_warn_of_unused(config),
        *warn_of_critic(config),
        *warn_of_episodes(config),
        *warn_of_pools(config),
    )


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


def _check_tensor_parallel_size(config: Config) -> list[str]:
    rollout = config.worker.rollout
    if num_samplers(config) % rollout.tensor_parallel_size:
        workers, divisors = describe_samplers(config)
        return [
            f"worker.rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but {workers}, which it must "
            f"divide; set it to {divisors}"
        ]
    if rollout.tensor_parallel_size > 1 and rollout.name != "vllm":
        return [
            f"worker.rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but only vllm spreads one model "
            "over several devices; set it to 1, or worker.rollout.name=vllm"
        ]
    return []


def _check_fsdp_size(config: Config) -> list[str]:
    if num_workers(config) % workers_per_copy(config) == 0:
        return []
    workers, divisors = _describe_workers(config)
    return [
        f"worker.actor.fsdp.fsdp_size is {config.worker.actor.fsdp.fsdp_size}, but {workers}, which it must divide; "
        f"set it to {divisors}, or -1 for all"
    ]


def _check_sequence_parallel_size(config: Config) -> list[str]:
    size = config.worker.actor.ulysses_sequence_parallel_size
    if num_workers(config) % size == 0:
        return []
    workers, divisors = _describe_workers(config)
    return [
        f"worker.actor.ulysses_sequence_parallel_size is {size}, but {workers}, which it must divide; set it to "
        f"{divisors}"
    ]


def _describe_workers(config: Config) -> tuple[str, str]:
    """Return how many workers there are, and the divisors of their number, as text."""
    trainer, world_size = config.trainer, num_workers(config)
    divisors = join_with_or([number for number in range(1, world_size + 1) if world_size % number == 0])
    return f"there are {trainer.nnodes} x {trainer.n_gpus_per_node} = {world_size} workers", divisors


def _check_batch_sizes(config: Config) -> list[str]:
    per_step, per_update = resolve_prompts_per_step(config), resolve_prompts_per_update(config)
    if per_step % per_update == 0:
        return []
    steps, updates = suggest_batch_sizes(per_step, per_update)
    return [
        f"data.rollout_batch_size ({per_step} prompts per step) is not a multiple of worker.actor.global_batch_size "
        f"({per_update} prompts per update); the nearest valid values: data.rollout_batch_size="
        f"{join_with_or(steps)}, or worker.actor.global_batch_size={join_with_or(updates)}; or leave out one of them"
    ]


def _check_top_k(config: Config) -> list[str]:
    rollout = config.worker.rollout
    values = {
        "worker.rollout.top_k": rollout.top_k,
        "worker.rollout.val_override_config.top_k": rollout.val_override_config.top_k,
    }
    return [
        f"{key} is 0, which leaves no token to sample; -1 samples from all"
        for key, top_k in values.items()
        if top_k == 0
    ]


def _check_train_weights(config: Config) -> list[str]:
    data = config.data
    if not data.train_weights or len(data.train_weights) == len(data.train_files):
        return []
    return [
        f"data.train_weights has {len(data.train_weights)} weights, but data.train_files {len(data.train_files)} "
        "datasets; give one weight per dataset, or leave the weights out"
    ]


def _check_val_batch_size(config: Config) -> list[str]:
    if config.data.val_batch_size != 0:
        return []
    return ["data.val_batch_size is 0; set -1 for all validation prompts at once, or at least 1"]


def _check_pixels(config: Config) -> list[str]:
    data = config.data
    if data.min_pixels is None or data.max_pixels is None or data.min_pixels <= data.max_pixels:
        return []
    return [
        f"data.min_pixels ({data.min_pixels}) is above data.max_pixels ({data.max_pixels}): no image fits; "
        "lower the first or raise the second"
    ]


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


def _check_group_size(config: Config) -> list[str]:
    n = resolve_group_size(config)
    if n >= 2 or not compares_groups(config) or config.trainer.val_only:
        return []
    return [
        f"worker.rollout.n is {n}, but {config.algorithm.adv_estimator} compares the completions of a group; set "
        "worker.rollout.n to at least 2, or leave it out, which is "
        f"{GROUP_SIZE}; or set algorithm.adv_estimator to {' or '.join(SINGLE_COMPLETION_ESTIMATORS)}"
    ]


def _check_kl_in_reward(config: Config) -> list[str]:
    algorithm = config.algorithm
    if algorithm.disable_kl or algorithm.kl_coef <= 0 or algorithm.use_kl_loss:
        return []
    if algorithm.adv_estimator == "gdpo":
        return [
            "algorithm.adv_estimator=gdpo normalizes each part of the reward, and a KL penalty is not one of them; "
            "set algorithm.use_kl_loss=true, or algorithm.disable_kl=true"
        ]
    completions = resolve_prompts_per_step(config) * resolve_group_size(config)
    if algorithm.kl_type != "adaptive" or 0.2 * completions < algorithm.kl_horizon:
        return []
    return [
        f"algorithm.kl_horizon is {algorithm.kl_horizon:g}, but a step has data.rollout_batch_size x "
        f"worker.rollout.n = {completions} completions: the KL weight could become negative in one step; set "
        f"kl_horizon above {0.2 * completions:g}, say {10 * completions}"
    ]


def _check_overlong_filtering(config: Config) -> list[str]:
    if not (config.algorithm.overlong_filtering and config.worker.rollout.ignore_eos):
        return []
    return [
        "algorithm.overlong_filtering excludes completions that were cut, and with worker.rollout.ignore_eos=true "
        "all of them are; set one of the two to false"
    ]


def _check_reward_weights(config: Config) -> list[str]:
    weights = config.algorithm.reward_weights
    if not weights or any(weights.values()):
        return []
    return ["algorithm.reward_weights are all 0, which makes every advantage 0; raise one of them"]


def _check_group_filter(config: Config) -> list[str]:
    algorithm = config.algorithm
    if not algorithm.online_filtering or algorithm.filter_low < algorithm.filter_high:
        return []
    return [
        f"algorithm.filter_low ({algorithm.filter_low}) is not below algorithm.filter_high "
        f"({algorithm.filter_high}): no group is between them; lower the first or raise the second"
    ]


def _check_mismatch_correction(config: Config) -> list[str]:
    correction, rollout = resolve_mismatch_correction(config), config.worker.rollout
    if correction == "off" or (rollout.top_p >= 1 and rollout.top_k <= 0):
        return []
    staleness = f"algorithm.max_staleness={config.algorithm.max_staleness}"
    older = "worker.rollout.oversampling" if rollout.oversampling > 0 else staleness
    default = "" if config.algorithm.mismatch_correction else f", the default with {older},"
    return [
        f"algorithm.mismatch_correction={correction}{default} compares the probabilities of engine and "
        f"trainer, and with worker.rollout.top_p={rollout.top_p}, worker.rollout.top_k={rollout.top_k} they are "
        "those of different distributions; set top_p=1 and top_k=-1, or mismatch_correction=off"
    ]


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


_CHECKS: tuple[Callable[[Config], list[str]], ...] = (
    _check_tensor_parallel_size,
    _check_fsdp_size,
    _check_sequence_parallel_size,
    *OFFLOAD_CHECKS,
    _check_batch_sizes,
    _check_top_k,
    _check_train_weights,
    _check_val_batch_size,
    _check_pixels,
    _check_optimizer,
    _check_group_size,
    _check_kl_in_reward,
    _check_overlong_filtering,
    _check_reward_weights,
    _check_group_filter,
    _check_mismatch_correction,
    _check_lengths,
    find_unknown_names,
    *CRITIC_CHECKS,
    *POOL_CHECKS,
    *EPISODE_CHECKS,
    *REQUIRED_CHECKS,
    *FILE_CHECKS,
)


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
    correction = resolve_mismatch_correction(config)
    if algorithm.filter_surplus == "keep" and algorithm.online_filtering and correction == "off":
        warnings.append(
            "algorithm.filter_surplus=keep trains on completions that are one step old; "
            "algorithm.mismatch_correction=truncate corrects for it"
        )
    if rollout.oversampling > 0 and rollout.name == "transformers":
        warnings.append(
            f"worker.rollout.oversampling={rollout.oversampling:g} saves no time with "
            "worker.rollout.name=transformers, which samples one prompt after the other"
        )
    if rollout.oversampling > 0 and correction == "off":
        warnings.append(
            f"worker.rollout.oversampling={rollout.oversampling:g} trains on tokens of older weights; "
            "algorithm.mismatch_correction=truncate, the default with it, corrects for it"
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
    oversampling = ("worker.rollout.oversampling above 0", config.worker.rollout.oversampling > 0)
    gdpo = ("algorithm.adv_estimator=gdpo", algorithm.adv_estimator == "gdpo")
    discounts = algorithm.adv_estimator in ("reinforce_plus_plus", "gae")
    discounting = ("algorithm.adv_estimator=reinforce_plus_plus or gae", discounts)
    cispo = ("worker.actor.loss_type=cispo", actor.loss_type == "cispo")
    seq_fixed = ("worker.actor.loss_avg_mode=seq_fixed", actor.loss_avg_mode == "seq_fixed")
    kl = ("algorithm.disable_kl=false", not algorithm.disable_kl)
    options = [
        ("worker.rollout.max_carried_steps", config.worker.rollout.max_carried_steps != 4, oversampling),
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
