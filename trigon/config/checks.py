"""Checks across options: conflicting values, missing options and missing files.

They run before anything heavy is imported, and open neither datasets nor models. Each check is
small, so that a wrong value hides few others: see find_problems.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, assert_never, cast

from trigon.config.compared import find_unknown_names, warn_of_unused
from trigon.config.files import PATH_OPTIONS, find_missing
from trigon.config.names import BUILT_IN_TOOLS, SHIPPED_REWARDS, SINGLE_COMPLETION_ESTIMATORS, DeviceType
from trigon.config.options import options, value_of
from trigon.config.paths import expand_path, is_python_object, nearest_path
from trigon.config.plan import suggest_batch_sizes, too_long_critic_warmup
from trigon.config.schema import GROUP_SIZE, TRUNK_OPTIONS, Config, Section, TrainedConfig, reward_specs
from trigon.errors import ConfigError
from trigon.system.terminal import did_you_mean

MAX_PROBLEMS = 50
"""Maximum number of problems in one message; the others are counted."""

_SEPARATE, _GAE = "worker.hybrid_engine=false", "algorithm.adv_estimator=gae"
_ENVIRONMENT, _TOOLS = "worker.rollout.environment", "worker.rollout.tools"


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
    Checks that read one of these options are left out.
    """
    return _run(_CHECKS, config, uncertain)


def find_warnings(
    config: Config, *, on_purpose: Collection[str] = (), uncertain: Collection[str] = ()
) -> tuple[str, ...]:
    """Return warnings about options that work against each other or have no effect.

    on_purpose: names of the options that are set outside of a file, which may be a copy of all
    defaults or of EasyR1's. uncertain: as for find_problems, for warnings about the number of
    workers.
    """
    return (
        *_run([_warn_of_cpu_offload], config, uncertain),
        *_warn_of_conflicts(config),
        *warn_of_unused(config, on_purpose),
        *(_warn_of_overruled(config, on_purpose) if config.shares_trunk else ()),
    )


def find_device_warnings(config: Config, device: DeviceType) -> tuple[str, ...]:
    """Return warnings about options that do not suit the device of the run."""
    rollout = config.worker.rollout
    if rollout.name != "vllm":
        return ()
    match device:
        case "cuda":
            if rollout.enable_chunked_prefill is not False:
                return ()
            return (
                "worker.rollout.enable_chunked_prefill=false: vLLM does not officially support this on a GPU, "
                "where it may crash or give wrong results; leave the option out, or set it to true",
            )
        case "cpu":
            values = (
                (f"worker.rollout.model_runner={rollout.model_runner}", rollout.model_runner != "auto"),
                ("worker.rollout.async_scheduling=true", rollout.async_scheduling is True),
                ("worker.rollout.enable_chunked_prefill=true", rollout.enable_chunked_prefill is True),
            )
            return tuple(f"{value} has no effect on the CPU" for value, is_set in values if is_set)
        case _:
            assert_never(device)


def find_contradictions(config: Config) -> list[str]:
    """Return the options of a critic with a shared trunk that contradict the actor's, which apply.

    Each as "worker.critic.x=1 (worker.actor.x=2)"; options that have their defaults are left out.
    """
    return [
        f"{name}={json.dumps(value)} ({_of_actor(name)}={json.dumps(applies)})"
        for name, value, applies, is_default in _unlike_actor(config)
        if not is_default
    ]


def _warn_of_overruled(config: Config, on_purpose: Collection[str]) -> list[str]:
    """Return warnings about options of a critic with a shared trunk that are set to their defaults.

    The actor's apply. on_purpose: as for find_warnings.
    """
    return [
        f"{name}={json.dumps(value)} has no effect: with worker.critic.share_trunk=true "
        f"{_of_actor(name)}={json.dumps(applies)} applies"
        for name, value, applies, is_default in _unlike_actor(config)
        if is_default and name in on_purpose
    ]


def _unlike_actor(config: Config) -> Iterator[tuple[str, Any, Any, bool]]:
    """Yield each option of the critic that a shared trunk takes from the actor, and that differs.

    As (name, its value, the actor's, whether its value is the default).
    """
    for option in options().values():
        if option.path[:2] == ("worker", "critic") and option.path[2] in TRUNK_OPTIONS:
            value, applies = value_of(config, option.name), value_of(config, _of_actor(option.name))
            if value != applies:
                yield option.name, value, applies, value == option.default


def _of_actor(name: str) -> str:
    return name.replace("worker.critic.", "worker.actor.")


_Check = Callable[[Config], Iterable[str]]


def _run(checks: Iterable[_Check], config: Config, uncertain: Collection[str]) -> list[str]:
    """Return what the checks find that read none of the uncertain options."""
    found: list[str] = []
    for check in checks:
        recorded = _RecordedSection(config, "", set())
        # When a generator yields a problem of the policy, it has not read the critic's options yet.
        found += [text for text in check(cast(Config, recorded)) if recorded.names_read.isdisjoint(uncertain)]
    return found


class _RecordedSection:
    """A section that adds the name of each option that is read to names_read."""

    def __init__(self, section: Section, prefix: str, names_read: set[str]) -> None:
        self._section, self._prefix, self.names_read = section, prefix, names_read

    def __getattr__(self, key: str) -> Any:
        kind = type(self._section)
        if key not in kind.model_fields:  # a property or a method, which reads options
            attribute = getattr(kind, key)
            if isinstance(attribute, property):
                return cast(Callable[..., Any], attribute.fget)(self)
            return partial(attribute, self)
        value = getattr(self._section, key)
        if isinstance(value, Section):
            return _RecordedSection(value, f"{self._prefix}{key}.", self.names_read)
        self.names_read.add(self._prefix + key)
        return value


# -- data ------------------------------------------------------------------------------------------


def _check_train_files(config: Config) -> Iterator[str]:
    if not config.data.train_files and not config.trainer.val_only:
        yield "data.train_files is not set; give a hub id (hiyouga/geometry3k@train), a file or a folder"


def _check_val_files(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if not config.data.val_files and (trainer.val_only or trainer.val_before_train or trainer.val_freq > 0):
        advice = (
            "give a hub id (hiyouga/geometry3k@test), a file or a folder"
            if trainer.val_only
            else "set it, or leave out trainer.val_before_train and trainer.val_freq"
        )
        yield f"data.val_files is not set, but validation is on; {advice}"


def _check_train_weights(config: Config) -> Iterator[str]:
    weights, files = config.data.train_weights, config.data.train_files
    if weights and len(weights) != len(files):
        yield (
            f"data.train_weights has {len(weights)} weights, but data.train_files {len(files)} datasets; give one "
            "weight per dataset, or leave the weights out"
        )


def _check_val_batch_size(config: Config) -> Iterator[str]:
    if config.data.val_batch_size == 0:
        yield "data.val_batch_size is 0; set -1 for all validation prompts at once, or at least 1"


def _check_pixels(config: Config) -> Iterator[str]:
    low, high = config.data.min_pixels, config.data.max_pixels
    if low is not None and high is not None and low > high:
        yield (
            f"data.min_pixels ({low}) is above data.max_pixels ({high}): no image fits; lower the first or raise the "
            "second"
        )


# -- algorithm -------------------------------------------------------------------------------------


def _check_group_size(config: Config) -> Iterator[str]:
    n = config.group_size
    if n < 2 and config.algorithm.compares_groups and not config.trainer.val_only:
        yield (
            f"worker.rollout.n is {n}, but {config.algorithm.adv_estimator} compares the completions of a group; set "
            f"worker.rollout.n to at least 2, or leave it out, which is {GROUP_SIZE}; or set algorithm.adv_estimator "
            f"to {' or '.join(SINGLE_COMPLETION_ESTIMATORS)}"
        )


def _check_kl_in_reward(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_in_reward is None:
        return
    if algorithm.adv_estimator == "gdpo":
        yield (
            "algorithm.adv_estimator=gdpo normalizes each part of the reward, and a KL penalty is not one of them; "
            "set algorithm.use_kl_loss=true, or algorithm.disable_kl=true"
        )
        return
    completions = config.prompts_per_step * config.group_size
    if algorithm.kl_type == "adaptive" and 0.2 * completions >= algorithm.kl_horizon:
        yield (
            f"algorithm.kl_horizon is {algorithm.kl_horizon:g}, but a step has data.rollout_batch_size x "
            f"worker.rollout.n = {completions} completions: the KL weight could become negative in one step; set "
            f"kl_horizon above {0.2 * completions:g}, say {10 * completions}"
        )


def _check_overlong_filtering(config: Config) -> Iterator[str]:
    if config.algorithm.overlong_filtering and config.worker.rollout.ignore_eos:
        yield (
            "algorithm.overlong_filtering excludes completions that were cut, and with worker.rollout.ignore_eos=true "
            "all of them are; set one of the two to false"
        )


def _check_reward_weights(config: Config) -> Iterator[str]:
    weights = config.algorithm.reward_weights
    if weights and not any(weights.values()):
        yield "algorithm.reward_weights are all 0, which makes every advantage 0; raise one of them"
    rewards = config.worker.reward.reward_function
    summed = () if isinstance(rewards, str | None) else rewards
    # gdpo learns from the parts of the reward, and not from their sum.
    if summed and config.algorithm.adv_estimator != "gdpo" and not any(entry.weight for entry in summed):
        yield "the weights in worker.reward.reward_function are all 0, so that every reward is 0; raise one of them"


def _check_group_filter(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.online_filtering and algorithm.filter_low >= algorithm.filter_high:
        yield (
            f"algorithm.filter_low ({algorithm.filter_low}) is not below algorithm.filter_high "
            f"({algorithm.filter_high}): no group is between them; lower the first or raise the second"
        )


def _check_mismatch_correction(config: Config) -> Iterator[str]:
    correction, rollout = config.mismatch_correction, config.worker.rollout
    if correction == "off" or (rollout.top_p >= 1 and rollout.top_k <= 0):
        return
    staleness = f"algorithm.max_staleness={config.algorithm.max_staleness}"
    older = "worker.rollout.oversampling" if rollout.oversampling > 0 else staleness
    default = "" if config.algorithm.mismatch_correction else f", the default with {older},"
    yield (
        f"algorithm.mismatch_correction={correction}{default} compares the probabilities of engine and "
        f"trainer, which with worker.rollout.top_p={rollout.top_p}, worker.rollout.top_k={rollout.top_k} belong to "
        "different distributions; set top_p=1 and top_k=-1, or mismatch_correction=off"
    )


def _check_max_staleness(config: Config) -> Iterator[str]:
    staleness = config.algorithm.max_staleness
    if staleness > 0 and config.worker.hybrid_engine:
        yield (
            f"algorithm.max_staleness is {staleness}, but the workers sample and learn in turns, so that every batch "
            f"has the newest weights; set {_SEPARATE}, or max_staleness=0"
        )


# -- worker.actor and worker.critic ----------------------------------------------------------------


def _trained_models(config: Config) -> Iterator[tuple[str, TrainedConfig]]:
    """Yield the section of each model that is trained: of a critic too, unless it is a head."""
    yield "worker.actor", config.worker.actor
    if config.has_critic and not config.shares_trunk:
        yield "worker.critic", config.worker.critic


def _check_model_path(config: Config) -> Iterator[str]:
    if not config.worker.actor.model.model_path:
        yield (
            "worker.actor.model.model_path is not set; give a hub id (Qwen/Qwen2.5-VL-3B-Instruct) or a local folder"
        )


def _check_batch_size(config: Config) -> Iterator[str]:
    for name, model in _trained_models(config):
        per_step, per_update = config.prompts_per_step, config.prompts_per_update_of(model)
        if per_step % per_update:
            steps, updates = suggest_batch_sizes(per_step, per_update)
            yield (
                f"data.rollout_batch_size ({per_step} prompts per step) is not a multiple of {name}.global_batch_size "
                f"({per_update} prompts per update); the nearest valid values: data.rollout_batch_size="
                f"{_join_with_or(steps)}, or {name}.global_batch_size={_join_with_or(updates)}; or leave out one of "
                "them"
            )


def _check_formats(config: Config) -> Iterator[str]:
    """Find training with numbers of 16 bits that loses updates."""
    for name, model in () if config.trainer.val_only else _trained_models(config):
        dtype, strategy = model.weight_dtype, model.optim.strategy
        reason = "which no optimizer strategy can train: almost every update is rounded to nothing"
        if dtype == "bf16":
            reason = (
                f"with {name}.optim.strategy=adamw, which rounds almost every update to nothing: near 1, numbers in "
                "bf16 are 0.004 apart, and an update moves a weight by about the learning rate, "
                f"{model.optim.lr:g}"
            )
        if model.fsdp.mp_param_dtype == "fp16":
            yield (
                f"{name}.fsdp.mp_param_dtype is fp16, whose smallest numbers are too large for most gradients: they "
                f"would be 0, since gradients are not scaled here; set {name}.fsdp.mp_param_dtype=bf16, which has the "
                "range of fp32, or fp32"
            )
        # Adapters are in float32, whatever the dtype of the weights.
        elif model.model.lora.rank == 0 and dtype != "fp32" and (dtype, strategy) != ("bf16", "adamw_bf16"):
            yield (
                f"{name}.fsdp.torch_dtype is {dtype}, {reason}; set {name}.fsdp.torch_dtype=bf16 "
                f"{name}.optim.strategy=adamw_bf16, which keeps the bits that bf16 lacks, or "
                f"{name}.fsdp.torch_dtype=fp32"
            )


def _check_pass_format(config: Config) -> Iterator[str]:
    """Find passes of a single worker in a wider format than its weights have.

    It computes with autocast, which narrows. FSDP, with several workers, gathers in any format.
    """
    if config.trainer.val_only or config.num_workers > 1:
        return
    for name, model in _trained_models(config):
        if model.fsdp.mp_param_dtype == "fp32" and model.weight_dtype != "fp32":
            yield (
                f"{name}.fsdp.mp_param_dtype is fp32, but the weights are in {model.weight_dtype} "
                f"({name}.fsdp.torch_dtype), and a single worker cannot compute in a wider format than theirs; set "
                f"{name}.fsdp.mp_param_dtype=bf16, or {name}.fsdp.torch_dtype=fp32"
            )


def _check_fsdp_size(config: Config) -> Iterator[str]:
    for name, model in _trained_models(config):
        if config.num_workers % config.workers_per_copy_of(model):
            workers, divisors = _describe_workers(config)
            yield (
                f"{name}.fsdp.fsdp_size is {model.fsdp.fsdp_size}, but {workers}, which it must divide; set it to "
                f"{divisors}, or -1 for all"
            )


def _check_kernels(config: Config) -> Iterator[str]:
    model = config.worker.actor.model
    if model.use_liger_kernel and model.compile_layers:
        yield "worker.actor.model.use_liger_kernel and compile_layers change the same norms and MLPs; set one of them"


def _check_activation_offload(config: Config) -> Iterator[str]:
    for name, trained in _trained_models(config):
        if trained.model.enable_activation_offload and not trained.model.enable_gradient_checkpointing:
            yield (
                f"{name}.model.enable_activation_offload is true without {name}.model.enable_gradient_checkpointing: "
                "what moves to host memory are the inputs of the layers that gradient checkpointing computes again, "
                "and without it all activations would have to move, which takes longer than computing them; set both "
                "to true"
            )


def _check_sequence_parallel_size(config: Config) -> Iterator[str]:
    size = config.worker.actor.ulysses_sequence_parallel_size
    if config.num_workers % size:
        workers, divisors = _describe_workers(config)
        yield (
            f"worker.actor.ulysses_sequence_parallel_size is {size}, but {workers}, which it must divide; set it to "
            f"{divisors}"
        )


def _check_critic_warmup(config: Config) -> Iterator[str]:
    steps = config.trainer.max_steps
    if steps is not None and config.critic_warmup >= steps:
        yield too_long_critic_warmup(config, steps)


def _check_shared_trunk(config: Config) -> Iterator[str]:
    for found in find_contradictions(config) if config.shares_trunk else ():
        yield (
            f"{found} does not go with worker.critic.share_trunk=true: policy and critic are one model, which is "
            "updated once with both losses, so that the actor's value applies; leave it out, or set "
            "worker.critic.share_trunk=false"
        )


# -- worker.rollout --------------------------------------------------------------------------------


def _check_tensor_parallel_size(config: Config) -> Iterator[str]:
    rollout = config.worker.rollout
    if config.num_samplers % rollout.tensor_parallel_size:
        workers, divisors = _describe_workers(config, samplers=True)
        yield (
            f"worker.rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but {workers}, which it must "
            f"divide; set it to {divisors}"
        )
    elif rollout.tensor_parallel_size > 1 and rollout.name != "vllm":
        yield (
            f"worker.rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but only vllm spreads one model "
            "over several devices; set it to 1, or worker.rollout.name=vllm"
        )


def _check_top_k(config: Config) -> Iterator[str]:
    rollout = config.worker.rollout
    for key, top_k in (("top_k", rollout.top_k), ("val_override_config.top_k", rollout.val_override_config.top_k)):
        if top_k == 0:
            yield f"worker.rollout.{key} is 0, which leaves no token to sample; -1 samples from all"


def _check_lengths(config: Config) -> Iterator[str]:
    data, rollout = config.data, config.worker.rollout
    longest, context = config.longest_sequence, config.context_length
    lengths = f"a prompt ({data.max_prompt_length}) and its completion can have {longest} tokens together"
    if context < longest:
        yield f"worker.rollout.max_model_len is {context}, but {lengths}; set it to at least {longest}, or leave it out"
    elif (
        rollout.name == "vllm" and rollout.max_num_batched_tokens < context and rollout.enable_chunked_prefill is False
    ):
        yield (
            f"worker.rollout.max_num_batched_tokens is {rollout.max_num_batched_tokens}, but a sequence may have "
            f"{context} tokens, and vLLM does not split it without chunked prefill ({lengths}); set it to at least "
            f"{context}, or worker.rollout.enable_chunked_prefill=true"
        )


def _check_partial(config: Config) -> Iterator[str]:
    mode = config.worker.rollout.partial
    if mode != "finish" and (config.worker.hybrid_engine or config.algorithm.max_staleness <= 1):
        yield (
            f"worker.rollout.partial={mode} needs {_SEPARATE} and algorithm.max_staleness above 1: otherwise all "
            "completions have ended when new weights arrive. Set max_staleness=2, or partial=finish"
        )


def _check_environment(config: Config) -> Iterator[str]:
    environment = config.worker.rollout.environment
    if environment is not None:
        yield from _check_code(_ENVIRONMENT, environment, "Class")


def _check_tools(config: Config) -> Iterator[str]:
    tools = config.worker.rollout.tools
    for tool in tools:
        if tool not in BUILT_IN_TOOLS:
            yield from _check_code(_TOOLS, tool, "function", built_in=BUILT_IN_TOOLS)
    for name, number in Counter(tool.removeprefix("python:").rpartition(":")[2] for tool in tools).items():
        if number > 1:
            yield f"{_TOOLS} has {number} functions of the name {name!r}, by which the model calls them; rename one"


def _check_code(option: str, text: str, form: str, *, built_in: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield problems of `file.py:Name` or `module:Name`. Modules are not looked for."""
    place, _, name = text.rpartition(":")
    if is_python_object(text):
        return
    if not place or not name.isidentifier():
        known = f", or one of the built-in {', '.join(built_in)}" if built_in else ""
        yield f"{option}: {text!r} is not file.py:{form} or module:{form}{known}{did_you_mean(text, built_in)}"
    elif place.endswith(".py") or not all(part.isidentifier() for part in place.split(".")):
        path = expand_path(place)
        if not path.is_file():
            yield f"{option}: there is no {place} (looked for {path.absolute()}){nearest_path(place)}"


def _check_ends(config: Config) -> Iterator[str]:
    if config.worker.rollout.ignore_eos and config.worker.rollout.has_episodes:
        yield (
            "worker.rollout.ignore_eos is true, so that no turn ends and the environment or the tools are never "
            "called; set it to false"
        )


# -- worker.reward ---------------------------------------------------------------------------------


def _check_reward_function(config: Config) -> Iterator[str]:
    if not config.worker.reward.reward_function:
        yield (
            "worker.reward.reward_function is not set; give file.py:function, or one of the shipped "
            f"{', '.join(SHIPPED_REWARDS)}"
        )


def _check_reward_env(config: Config) -> Iterator[str]:
    for name in config.worker.reward.env:
        if not name.isidentifier():
            yield (
                f"worker.reward.env has {name.partition('=')[0]!r}, but takes names of environment variables "
                "without values; export the variable, and give its name only, for example OPENAI_API_KEY"
            )


def _check_reward_kwargs(config: Config) -> Iterator[str]:
    reward = config.worker.reward
    if reward.reward_function_kwargs and not isinstance(reward.reward_function, str | None):
        yield (
            "worker.reward.reward_function_kwargs are arguments of a single reward function, and there is a list; give "
            "each its own: reward_function: [{function: ..., weight: ..., kwargs: {...}}]"
        )


def _check_reward_of_environment(config: Config) -> Iterator[str]:
    reward = config.worker.reward
    if config.worker.rollout.environment is not None:
        return
    for key in ("reward_function", "val_reward_function"):
        if "environment" in reward_specs(getattr(reward, key)):
            yield (
                f"worker.reward.{key}=environment is the sum of what an environment gives for each turn; set "
                f"{_ENVIRONMENT}, or choose another reward function"
            )


_CHECKS: tuple[_Check, ...] = (
    _check_tensor_parallel_size,
    _check_fsdp_size,
    _check_sequence_parallel_size,
    _check_kernels,
    _check_activation_offload,
    _check_batch_size,
    _check_top_k,
    _check_train_weights,
    _check_val_batch_size,
    _check_pixels,
    _check_formats,
    _check_pass_format,
    _check_group_size,
    _check_kl_in_reward,
    _check_overlong_filtering,
    _check_reward_weights,
    _check_group_filter,
    _check_mismatch_correction,
    _check_lengths,
    find_unknown_names,
    _check_critic_warmup,
    _check_shared_trunk,
    _check_max_staleness,
    _check_partial,
    _check_environment,
    _check_tools,
    _check_ends,
    _check_reward_of_environment,
    _check_model_path,
    _check_reward_function,
    _check_reward_env,
    _check_reward_kwargs,
    _check_train_files,
    _check_val_files,
    *(partial(find_missing, name=name) for name, kind in PATH_OPTIONS.items() if kind != "code"),
)


# -- warnings --------------------------------------------------------------------------------------


def _warn_of_cpu_offload(config: Config) -> list[str]:
    """Return warnings about weights that stay on the device, since a single worker has them."""
    return [
        f"{name}.fsdp.enable_cpu_offload=true has no effect with a single worker, which shards nothing; "
        f"{name}.offload.offload_params=true and {name}.offload.offload_optimizer=true move weights and optimizer "
        "states to host memory while completions are sampled"
        for name, model in _trained_models(config)
        if config.num_workers == 1 and model.fsdp.enable_cpu_offload
    ]


def _warn_of_conflicts(config: Config) -> Iterator[str]:
    """Yield warnings about options that are valid but work against each other."""
    algorithm, rollout, actor = config.algorithm, config.worker.rollout, config.worker.actor
    if not algorithm.disable_kl and algorithm.use_kl_loss and algorithm.kl_penalty == "kl":
        yield "algorithm.kl_penalty=kl in the loss has a gradient of zero on average; use low_var_kl in the loss"
    if actor.loss_type == "cispo" and actor.clip_ratio_low < 1:
        yield (
            f"worker.actor.clip_ratio_low={actor.clip_ratio_low} raises every cispo weight below "
            f"{1 - actor.clip_ratio_low:g} to that; the paper has no lower bound, which is clip_ratio_low=1"
        )
    if actor.loss_type in ("gspo", "gspo_token") and max(actor.clip_ratio_low, actor.clip_ratio_high) > 0.05:
        yield (
            f"worker.actor.loss_type={actor.loss_type} has one ratio per completion, a mean over its tokens, which "
            f"rarely reaches clip_ratio_low={actor.clip_ratio_low} or clip_ratio_high={actor.clip_ratio_high}; "
            "the paper has 0.0003 and 0.0004"
        )
    if algorithm.adv_estimator == "dr_grpo" and actor.loss_avg_mode != "seq_fixed":
        yield (
            "algorithm.adv_estimator=dr_grpo omits the standard deviation; the other half of Dr. GRPO, no length bias, "
            "is worker.actor.loss_avg_mode=seq_fixed"
        )
    if algorithm.filter_surplus == "keep" and algorithm.online_filtering and config.mismatch_correction == "off":
        yield (
            "algorithm.filter_surplus=keep trains on completions that are one step old; "
            "algorithm.mismatch_correction=truncate corrects for it"
        )
    if rollout.oversampling > 0 and rollout.name == "transformers":
        yield (
            f"worker.rollout.oversampling={rollout.oversampling:g} saves no time with "
            "worker.rollout.name=transformers, which samples one prompt after the other"
        )
    if rollout.oversampling > 0 and config.mismatch_correction == "off":
        yield (
            f"worker.rollout.oversampling={rollout.oversampling:g} trains on tokens of older weights; "
            "algorithm.mismatch_correction=truncate, the default with it, corrects for it"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield (
            f"worker.rollout.top_p={rollout.top_p}, worker.rollout.top_k={rollout.top_k}: training samples are cut to "
            "the most likely tokens, and the trainer's log-probabilities ignore the cut"
        )
    if rollout.has_episodes and rollout.name == "vllm" and not rollout.enable_prefix_caching:
        yield (
            "worker.rollout.enable_prefix_caching=false: each turn computes all tokens before it again; set it to true"
        )
    if rollout.has_episodes and rollout.max_turns == 1:
        yield "worker.rollout.max_turns=1 ends each episode with its first turn, and no observation follows it"


# -- words -----------------------------------------------------------------------------------------


def _describe_workers(config: Config, *, samplers: bool = False) -> tuple[str, str]:
    """Return how many workers train or sample, and the divisors of their number, as text."""
    separate = samplers and not config.worker.hybrid_engine
    section: Any = config.worker.rollout if separate else config.trainer
    name = "worker.rollout" if separate else "trainer"
    size = section.nnodes * section.n_gpus_per_node
    divisors = _join_with_or([number for number in range(1, size + 1) if size % number == 0])
    keys = f"{name}.nnodes x {name}.n_gpus_per_node"
    return f"there are {section.nnodes} x {section.n_gpus_per_node} = {size} workers ({keys})", divisors


def _join_with_or(numbers: Sequence[int]) -> str:
    """Return numbers as text: "64 or 128"."""
    return " or ".join(map(str, numbers))
