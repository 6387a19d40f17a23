"""The options on which a run's numbers depend: a checkpoint is compared with them on resuming.

All options are compared but those that change results by rounding only, or say where the run is,
how long it is, and what it writes. Files and code are compared by content, elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from trigon.config.names import LOSS_OPTIONS
from trigon.config.options import Option, format_value, options, value_of
from trigon.config.plan import find_unknown_sizes
from trigon.config.schema import TRUNK_OPTIONS, Config
from trigon.system.terminal import nearest_key

_MAX_NAME = 100
_MAX_UNKNOWN = 10  # problems, each of which takes time to find the nearest name

ALL = "all"
"""Stands in trainer.accept_changes for every name."""

BY_CONTENT = (
    *("data.train_files", "data.train_weights", "data.val_files", "data.format_prompt", "data.override_chat_template"),
    *("worker.*.model_path", "worker.*.tokenizer_path", "worker.reward.*reward_function*"),
    *("worker.rollout.environment", "worker.rollout.environment_kwargs", "worker.rollout.tools"),
)
"""Patterns of the options that name files, code and arguments, which are compared by content."""

FREE = (
    # Which rows and images are usable, which the content of the data shows.
    *("data.image_dir", "data.max_prompt_length", "data.max_image_pixels", "data.max_bad_row_fraction"),
    *("data.filter_overlong_prompts*", "data.val_batch_size", "worker.rollout.limit_images"),
    # Devices, memory and kernels, which change results by rounding.
    *(
        "worker.hybrid_engine",
        "*.nnodes",
        "*.n_gpus_per_node",
        "*_parallel_size",
        "*.offload.*",
        "*.enable_cpu_offload",
    ),
    *("*.micro_batch_size_per_device_for_*", "*.enable_full_shard", "*.fsdp_size", "*.mp_reduce_dtype"),
    *("*.enable_gradient_checkpointing", "*.enable_activation_offload", "*.trust_remote_code", "*.vision_cache_gb"),
    *("*.attention_kernel", "*.compile_layers", "*.use_liger_kernel", "worker.rollout.gpu_memory_utilization"),
    *("worker.rollout.enforce_eager", "worker.rollout.enable_*", "worker.rollout.max_model_len"),
    *("worker.rollout.max_num_*", "worker.rollout.model_runner", "worker.rollout.async_scheduling"),
    # What is checked, shown and waited for.
    *("worker.rollout.disable_*", "worker.rollout.parity_tolerance", "worker.rollout.weight_check_freq"),
    *("worker.rollout.environment_timeout_seconds", "worker.rollout.environment_workers", "worker.reward.env"),
    *("worker.reward.concurrency", "worker.reward.num_cpus", "worker.reward.timeout_seconds", "worker.reward.max_*"),
    *("worker.reward.network", "worker.reward.confinement", "worker.reward.readable", "worker.reward.writable"),
)
"""Patterns of the options that may change; besides, all of the trainer but _OF_TRAINER."""

_OF_TRAINER = ("trainer.max_try_make_batch", "trainer.critic_warmup")


_Needs = Sequence[tuple[str, str]]

NEEDS: _Needs = (
    (
        "algorithm.adv_estimator=gae",
        "algorithm.lam algorithm.lam_critic algorithm.lam_alpha algorithm.bootstrap_cut "
        "trainer.critic_warmup worker.critic",
    ),
    ("algorithm.lam_alpha=null", "algorithm.lam"),
    ("worker.critic.share_trunk=true", "worker.critic.vf_coef"),
    ("algorithm.adv_estimator=reinforce_plus_plus|gae", "algorithm.gamma"),
    ("algorithm.adv_estimator=gdpo", "algorithm.reward_weights"),
    ("algorithm.disable_kl=false", "algorithm.kl_type"),
    ("algorithm.use_kl_loss=false", "algorithm.kl_type"),
    ("algorithm.online_filtering=true", "algorithm.filter_surplus data.mini_rollout_batch_size"),
    ("algorithm.max_staleness=0|1", "algorithm.filter_surplus worker.rollout.max_carried_steps"),
    ("algorithm.mismatch_correction=truncate|mask|reject", "algorithm.mismatch_level algorithm.mismatch_high"),
    ("algorithm.mismatch_correction=mask|reject", "algorithm.mismatch_low"),
    ("worker.actor.loss_avg_mode=seq_fixed", "worker.actor.loss_fixed_length"),
    (
        "worker.rollout.name=vllm",
        "worker.rollout.enable_prefix_caching worker.rollout.max_num_seqs "
        "worker.rollout.model_runner worker.rollout.async_scheduling worker.rollout.weight_check_freq",
    ),
    ("worker.rollout.oversampling", "worker.rollout.max_carried_steps"),
    ("worker.hybrid_engine=false", "worker.rollout.nnodes worker.rollout.n_gpus_per_node"),
    (
        "worker.rollout.environment or worker.rollout.tools",
        "worker.rollout.observation_role worker.rollout.max_turns "
        "worker.rollout.max_turn_tokens worker.rollout.environment_timeout_seconds worker.rollout.environment_workers",
    ),
    ("worker.rollout.tools", "worker.rollout.tool_format"),
    ("worker.rollout.environment", "worker.rollout.environment_kwargs"),
    ("worker.reward.confinement=strict", "worker.reward.readable worker.reward.writable"),
    ("data.val_files", "worker.reward.val_reward_function"),
    ("trainer.save_images=true", "trainer.saved_image_side"),
    ("trainer.watch.level=warn|stop", "trainer.watch.ignore"),
    *(
        ("worker.actor.loss_type=" + "|".join(name for name, read in LOSS_OPTIONS.items() if option in read), option)
        for option in sorted({option for read in LOSS_OPTIONS.values() for option in read})
    ),
)
"""A need, and the options that have an effect only where it holds; otherwise there is a warning.

A need is the name of an option that is set, or "name=value", of which values that are separated by
"|" one is enough; so is one of several needs that are joined by "or".
"""

NEEDS_OF_EASYR1: _Needs = (
    ("algorithm.disable_kl=false", "algorithm.kl_* algorithm.use_kl_loss worker.ref.*"),
    ("algorithm.use_kl_loss=false", "algorithm.kl_horizon algorithm.kl_target"),
    ("algorithm.kl_type=adaptive", "algorithm.kl_horizon algorithm.kl_target"),
    ("algorithm.online_filtering=true", "algorithm.filter_* trainer.max_try_make_batch"),
    ("data.val_files", "data.val_batch_size worker.rollout.val_override_config.* trainer.val_generations_to_log"),
    *(
        (f"worker.{name}.{need}", " ".join(f"worker.{name}.{option}" for option in needing.split()))
        for name in ("actor", "critic")
        for need, needing in (
            ("model.lora.rank", "model.lora.alpha model.lora.target_modules model.lora.exclude_modules"),
            ("optim.lr_warmup_steps=null", "optim.lr_warmup_ratio"),
            ("optim.lr_scheduler_type=cosine", "optim.min_lr_ratio"),
        )
    ),
)
"""The same for options that files of EasyR1 set where they have no effect.

There is a warning only if they are set outside of a file. Names may be patterns.
"""


def compared_options(config: Config) -> dict[str, Any]:
    """Return the value of each option on which numbers depend, as JSON, by its name.

    An option without effect in this configuration is left out, and one whose default follows from
    others has the value that it stands for. Sizes that follow from the data are left out as long as
    they are null (see fill_batch_sizes).
    """
    ignored = [*_without_effect(config), *find_unknown_sizes(config)]
    names = [option.name for option in _candidates() if not _is_any(option.name, ignored)]
    values = {option.name: value_of(config, option.name) for option in _candidates()} | _resolved(config)
    return {name: _as_json(values[name]) for name in names}


@cache
def _candidates() -> list[Option]:
    return [
        option
        for option in options().values()
        if not _is_any(option.name, (*FREE, *BY_CONTENT))
        and (option.path[0] != "trainer" or option.name in _OF_TRAINER)
    ]


def _is_any(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True, default=str)
    return list(value) if isinstance(value, tuple) else value


def _resolved(config: Config) -> dict[str, Any]:
    """Return options whose default follows from others, or of which two values mean the same."""
    actor, critic = config.worker.actor, config.worker.critic
    return {
        "algorithm.mismatch_correction": config.mismatch_correction,
        "data.mini_rollout_batch_size": config.prompts_per_round,
        "trainer.max_try_make_batch": max(0, config.trainer.max_try_make_batch),
        "worker.actor.cispo_cap": actor.max_cispo_weight,
        "worker.actor.fsdp.torch_dtype": actor.weight_dtype,
        "worker.actor.loss_fixed_length": config.loss_fixed_length,
        "worker.actor.optim.min_lr_ratio": actor.optim.min_lr_ratio or 0.0,
        "worker.critic.fsdp.torch_dtype": config.critic.weight_dtype,
        "worker.critic.model.override_config": config.critic.model.override_config,
        "worker.critic.optim.min_lr_ratio": critic.optim.min_lr_ratio or 0.0,
        "worker.ref.fsdp.torch_dtype": config.worker.ref.dtype,
        "worker.rollout.n": config.group_size,
        "worker.rollout.observation_role": config.worker.rollout.role_of_observations,
    }


def _without_effect(config: Config) -> list[str]:
    """Return patterns of the names of options that have no effect in this configuration."""
    names = [name for table in (NEEDS, NEEDS_OF_EASYR1) for name, _ in _unused(config, table)]
    if config.shares_trunk:
        names += [f"worker.critic.{name}" for name in TRUNK_OPTIONS]
    return [*names, *(f"{name}.*" for name in names)]


def warn_of_unused(config: Config, on_purpose: Collection[str] = ()) -> list[str]:
    """Return warnings about options that are not at their defaults and have no effect.

    on_purpose: names of the options that are set outside of a file.
    """
    unused = _unused(config, NEEDS)
    for pattern, needs in _unused(config, NEEDS_OF_EASYR1):
        unused += [(name, needs) for name in on_purpose if fnmatchcase(name, pattern)]
    defaults, warnings = Config(), dict[str, str]()
    for name, needs in unused:
        value = value_of(config, name)
        is_below = name.startswith("worker.critic.") and not config.algorithm.has_values
        is_of_training = name.startswith("algorithm.") and config.trainer.val_only
        if value != value_of(defaults, name) and not is_below and not is_of_training:
            shown = f"={format_value(value)}" if isinstance(value, str | bool) else ""
            warnings.setdefault(name, f"{name}{shown} has no effect without {needs.replace('|', ' or ')}")
    return list(warnings.values())


def _unused(config: Config, table: _Needs) -> list[tuple[str, str]]:
    """Return the options of NEEDS or NEEDS_OF_EASYR1 that have no effect, and what each needs."""
    return [(name, needs) for needs, names in table if not _holds(config, needs) for name in names.split()]


def _holds(config: Config, needs: str) -> bool:
    """Return whether one of the needs holds; see NEEDS."""
    resolved = _resolved(config)

    def holds(need: str) -> bool:
        name, has_values, expected = need.partition("=")
        value = resolved.get(name, value_of(config, name))
        return format_value(value) in expected.split("|") if has_values else bool(value)

    return any(map(holds, needs.split(" or ")))


def is_accepted(name: str, accepted: Collection[str]) -> bool:
    """Return whether a change of an option is accepted. accepted: as trainer.accept_changes."""
    return name in accepted or ALL in accepted


def find_unknown_names(config: Config) -> list[str]:
    """Return a problem for each name in trainer.accept_changes that is no option."""
    known = [*(option.name for option in options().values()), ALL]
    unknown = [name[:_MAX_NAME] for name in config.trainer.accept_changes if name not in known]
    return [
        f"trainer.accept_changes has {name!r}, which is not the name of an option; did you mean "
        f"{nearest_key(name, known)}?"
        for name in unknown[:_MAX_UNKNOWN]
    ]


def schedule_depends_on_length(config: Config) -> bool:
    """Return whether the learning rate at a step depends on how many steps the run has."""
    worker = config.worker
    optims = [worker.actor.optim, *([worker.critic.optim] if config.algorithm.has_values else [])]
    return any(
        (optim.lr_warmup_steps is None and optim.lr_warmup_ratio > 0) or optim.lr_scheduler_type != "constant"
        for optim in optims
    )
