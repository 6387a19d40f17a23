"""Makes the configuration of an evaluation: that of a run that only validates.

It starts from a run's config.yaml, of which data, rewards, sampling and the format of prompts are
kept, from what an export records of its run, or from the defaults; then come the options that are
given, and what an evaluation needs. Does not depend on torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from trigon.assemble.options import recorded_settings
from trigon.config.load import LoadedConfig, as_overrides, load_config
from trigon.config.names import Dtype
from trigon.config.options import options
from trigon.config.paths import is_python_object
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.system.machine import count_usable_cpus

MAX_RESPONSE_TOKENS = 2048
"""Default of data.max_response_length in evaluations, or half of the model's context."""

MAX_PROMPT_TOKENS = 6144
"""Default of data.max_prompt_length, or what a completion leaves of the model's context."""

PROMPTS_PER_CALL = 256
"""Default of data.val_batch_size: prompts whose pixels are in memory at a time."""

# Of a run's configuration, what describes its training and its machines.
_RESET = (
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "worker.hybrid_engine=true",
    "worker.rollout.nnodes=1",
    "worker.rollout.n_gpus_per_node=1",
    "algorithm.max_staleness=0",
    "worker.rollout.partial=finish",
    "trainer.profile_steps=[]",
    "worker.rollout.tensor_parallel_size=1",
    "worker.actor.fsdp.fsdp_size=-1",
    "worker.actor.ulysses_sequence_parallel_size=1",
    "worker.actor.fsdp.enable_cpu_offload=false",
)

_FORCED = (
    "trainer.val_only=true",
    "trainer.val_generations_to_log=0",
    "trainer.load_checkpoint_path=null",
    "trainer.find_last_checkpoint=false",
    "trainer.logger=[console,file]",
    "worker.actor.model.lora.rank=0",  # an export has the adapters merged
    "worker.actor.offload.offload_params=true",  # the rollout engine has the GPU for itself
)


AnswerForm = Literal["auto", "boxed", "tag", "line", "text"]
r"""Where the answer of a completion is.

boxed: the last \boxed{...}. tag: the last <answer>...</answer>. line: what follows the last
`Answer:` in its line. text: the whole completion. auto: the first of boxed, tag and line that the
completion has.
"""

SHIPPED_FORMS: dict[str, AnswerForm] = {
    "math": "boxed",
    "r1v": "tag",
    "counting": "tag",
    "geoqa": "tag",
    "vqa": "tag",
    "dapo": "line",
    "android_gui": "text",
    "environment": "text",
}
"""Where the shipped reward functions find the answer; others: auto."""

_SAMPLING = "worker.rollout.val_override_config."

NOT_COMPARED = (f"{_SAMPLING}n", f"{_SAMPLING}seed", "worker.rollout.dtype")
"""Options of a recorded run in which a difference changes no expected value."""

SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {key: f"data.{key}" for key in ("format_prompt", "prompt_key", "answer_key", "image_key", "image_dir")}
    | {key: f"{_SAMPLING}{key}" for key in ("n", "temperature", "top_p", "max_tokens", "seed")}
    | {"engine": "worker.rollout.name"}
)
"""Options of the configuration that evaluations take by a shorter name as well."""


def given_options(
    data: Sequence[str],
    *,
    reward: str | None = None,
    environment: str | None = None,
    tools: Sequence[str] = (),
    **keyword_options: Any,
) -> dict[str, Any]:
    """Return what an evaluation was given as options of the configuration, by their names.

    Empty data and tools, and None, are those of the run, or the default. keyword_options: by a
    short name, or sections.
    """
    options = {SHORT_NAMES.get(key, key): value for key, value in keyword_options.items() if value is not None}
    if data:
        options["data.val_files"] = list(data)
    if reward is not None:
        options |= {"worker.reward.reward_function": reward, "worker.reward.val_reward_function": None}
    if environment is not None or tools:  # one takes the place of the other, which the run may have
        options |= {"worker.rollout.environment": environment, "worker.rollout.tools": list(tools)}
    return options


def load_settings(
    base: Path | None,
    given: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    model_path: str,
    folder: Path,
    context: int | None,
    weight_dtype: Dtype | None,
    first: Mapping[str, Any] = MappingProxyType({}),
) -> LoadedConfig:
    """Return the configuration of the evaluation of one model.

    Args:
        base: config.yaml of a run, or another configuration; None: the defaults of evaluations.
        given: options as given_options returns them. overrides: further ones, as `key=value`.
        model_path: a Hugging Face folder or a hub id. folder: the run folder to be written.
        context: the most tokens that all models take; None: unknown.
        weight_dtype: in which the weights are stored; None: unknown.
        first: options that base and given replace, of the run of an exported model; with a base,
            its own options with paths that do not depend on the folder.
    Raises: ConfigError, with all problems in one message.
    """
    defaults = [*_RESET, *as_overrides(first)] if base is not None else _defaults(first, given, context)
    if "worker.rollout.name" not in given and importlib.util.find_spec("vllm") is None:
        defaults.append("worker.rollout.name=transformers")
    forced = [*_FORCED, f"worker.actor.model.model_path={model_path}", f"trainer.save_checkpoint_path={folder}"]
    if weight_dtype is not None:
        forced.append(f"worker.actor.fsdp.torch_dtype={weight_dtype}")
    texts = [text for value in given.values() for text in (value if isinstance(value, list) else [value])]
    objects = [text for text in texts if isinstance(text, str) and is_python_object(text)]
    return load_config(base, [*defaults, *as_overrides(given), *overrides, *forced], python_objects=objects)


def _defaults(first: Mapping[str, Any], given: Mapping[str, Any], context: int | None) -> list[str]:
    """Return the defaults of an evaluation without a run's configuration, as `key=value`.

    Raises: ConfigError if a completion may be longer than the context of the models.
    """
    longest_prompt = int(first.get("data.max_prompt_length", MAX_PROMPT_TOKENS))
    max_tokens = given.get(f"{_SAMPLING}max_tokens") or int(first.get("data.max_response_length", 0))
    context = context or longest_prompt + max(max_tokens, MAX_RESPONSE_TOKENS)
    response = max_tokens or min(MAX_RESPONSE_TOKENS, context // 2)
    if response >= context:
        raise ConfigError(
            f"a completion may have {response} tokens, but the models take {context}, prompt included; lower "
            "--max-tokens"
        )
    prompt = min(longest_prompt, context - response)
    return [
        *as_overrides(first),
        f"data.max_response_length={response}",
        f"data.max_prompt_length={prompt}",
        f"data.val_batch_size={PROMPTS_PER_CALL}",
        f"worker.rollout.max_num_batched_tokens={max(8192, prompt + response)}",
        "worker.rollout.gpu_memory_utilization=0.9",
        f"worker.reward.num_cpus={count_usable_cpus()}",
    ]


def known_settings(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded settings that are options of this version and not null."""
    known = {option.name for option in options().values()}
    return {name: value for name, value in recorded.items() if name in known and value is not None}


def find_differences(recorded: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Return (recorded, used) of each setting in which an evaluation differs from a model's run.

    A pixel limit that the evaluation does not set is the model's own.
    """
    used = recorded_settings(config, pixel_limits=None)
    return {
        name: (recorded[name], value)
        for name, value in used.items()
        if name in recorded
        and name not in NOT_COMPARED
        and recorded[name] != value
        and not (name in ("data.min_pixels", "data.max_pixels") and value is None)
    }
