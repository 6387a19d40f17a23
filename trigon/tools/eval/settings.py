"""Finds the models of an evaluation, and makes its configuration: a run that only validates.

A model is a Hugging Face folder, a hub id, a checkpoint, or a run folder, whose last checkpoint is
meant. Checkpoints are exported first, as `trigon export` does; the export is kept and used again.

The configuration starts from a run's config.yaml, of which data, rewards, sampling and the format
of prompts are kept, from what an export records of its run, or from the defaults; then come the
options that are given, and what an evaluation needs. Does not depend on torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from trigon.assemble.options import recorded_settings
from trigon.checkpoint.store import EXPORT_RECORD, EXPORTED, exported_step
from trigon.config.files import is_same_code
from trigon.config.load import LoadedConfig, Override, inspect_config, load_config
from trigon.config.names import Dtype
from trigon.config.options import options, value_of
from trigon.config.paths import is_python_object, local_path, nearest_path
from trigon.config.schema import Config
from trigon.errors import ConfigError, DataError, ModelError
from trigon.report.run import CONFIG, is_run, open_run
from trigon.system.files import read_json_object
from trigon.system.machine import count_usable_cpus

_STEP = re.compile(r"global_step_(\d+)")

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


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model was found.

    spec: the text that was given. kind: what it is. path: the folder of kind "folder", the hub id
    of "hub", a checkpoint's folder of "checkpoint". step: the step of the checkpoint; 0 for the
    others.
    run_config: config.yaml of the run of a checkpoint, if there is one.
    """

    spec: str
    kind: str
    path: str
    step: int
    run_config: Path | None


def find_model(spec: str) -> ModelSource:
    """Return where a model is; nothing is read but the names of files.

    Raises: ModelError if a folder is not a model, a checkpoint or a run with a checkpoint.
    """
    folder = local_path(spec)
    if folder is None:
        return ModelSource(spec, "hub", spec, 0, None)
    if folder.is_file():
        raise ModelError(f"{folder} is a file; name the folder of a model, a run or a checkpoint")
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}{nearest_path(spec)}")
    if (folder / "config.json").is_file():
        return ModelSource(spec, "folder", str(folder), 0, None)
    resolved = folder.resolve()
    if resolved.name == "actor" and _STEP.fullmatch(resolved.parent.name):
        folder = resolved.parent
    if not (folder / "actor").is_dir():
        folder = _last_checkpoint(folder)
    step = _STEP.fullmatch(folder.resolve().name)
    config = folder.resolve().parent / CONFIG
    run_config = config if config.is_file() else None
    return ModelSource(spec, "checkpoint", str(folder), int(step[1]) if step else 0, run_config)


def _last_checkpoint(folder: Path) -> Path:
    """Return the last checkpoint of a run. Raises: ModelError."""
    try:
        run = folder if any(folder.glob("global_step_*")) else open_run(folder).path
    except DataError as error:
        raise ModelError(
            f"{folder} is neither a Hugging Face model (it has no config.json) nor a checkpoint or a run: {error}"
        ) from error
    checkpoints = {int(match[1]): each for each in run.glob("global_step_*") if (match := _STEP.fullmatch(each.name))}
    if not checkpoints:
        raise ModelError(
            f"the run {run} has no checkpoint yet; wait for one (trainer.save_freq), or name the model that it "
            "starts from"
        )
    return checkpoints[max(checkpoints)]


def looks_like_model(spec: str) -> bool:
    """Return whether an argument names a folder that holds a model, a checkpoint or a run."""
    folder = local_path(spec)
    if folder is None or not folder.is_dir():
        return False
    return (folder / "config.json").is_file() or (folder / "actor").is_dir() or is_run(folder)


def exported_folder(
    source: ModelSource,
    fallback: Path,
    *,
    warn: Callable[[str], None],
    on_progress: Callable[[str], None],
) -> str:
    """Return the Hugging Face folder or hub id of a model, exporting a checkpoint if needed.

    The export is written into the checkpoint's folder, or to fallback if that cannot be written. An
    earlier export of the same step there is used again. Its names, shapes and values are verified.
    Raises: as export_checkpoint.
    """
    if source.kind != "checkpoint":
        return source.path
    from trigon.checkpoint.export import export_checkpoint

    checkpoint = Path(source.path)
    folder = checkpoint / EXPORTED
    if exported_step(folder) == source.step:
        on_progress(f"{source.spec}: using {folder}, exported earlier")
        return str(folder)
    if not os.access(checkpoint, os.W_OK):
        folder = fallback
    on_progress(f"{source.spec}: exporting step {source.step} to {folder}")
    return str(export_checkpoint(checkpoint, folder, dtype=None, logits=False, warn=warn))


def recorded_of(source: ModelSource) -> dict[str, Any]:
    """Return the settings of a model's run, by option, that its export or checkpoint has.

    Empty if it has none. The files of a hub id, except weights, are downloaded if needed.
    Raises: ModelError if the file cannot be read, or the hub id is not found.
    """
    if source.kind == "checkpoint":
        path = Path(source.path) / "actor" / "run_settings.json"
    else:
        from trigon.models.load import folder_without_weights

        path = folder_without_weights(source.path) / EXPORT_RECORD
    if not path.is_file():
        return {}
    try:
        content = read_json_object(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    settings = content if source.kind == "checkpoint" else content.get("settings")
    return settings if isinstance(settings, dict) else {}


def context_length(folder: Path) -> int | None:
    """Return the most tokens that a model takes, from its config.json; None if it does not say."""
    try:
        config = read_json_object(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error}") from error
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        if isinstance(length := part.get("max_position_embeddings"), int):
            return length
    return None


def given_options(
    data: Sequence[str],
    *,
    reward: str | None = None,
    environment: str | None = None,
    tools: Sequence[str] = (),
    **keyword_options: Any,
) -> dict[str, Any]:
    """Return what an evaluation was given as options of the configuration, by their names.

    Empty data and tools, and None, stand for the run's value, or the default. keyword_options:
    options by a short name, or sections.
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
    overrides: Sequence[Override],
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
        given: options as given_options returns them. overrides: further options.
        model_path: a Hugging Face folder or a hub id. folder: the run folder to be written.
        context: the most tokens that all models take; None: unknown.
        weight_dtype: the dtype in which the weights are stored; None: unknown.
        first: options that base and given replace, of the run of an exported model; with a base,
            its own options with paths that do not depend on the folder, and those of it that
            without_other_arguments has taken out.
    Raises: ConfigError, with all problems in one message.
    """
    defaults = [*_RESET, first] if base is not None else _defaults(first, given, context)
    if "worker.rollout.name" not in given and importlib.util.find_spec("vllm") is None:
        defaults.append("worker.rollout.name=transformers")
    forced = [*_FORCED, f"worker.actor.model.model_path={model_path}", f"trainer.save_checkpoint_path={folder}"]
    if weight_dtype is not None:
        forced.append(f"worker.actor.fsdp.torch_dtype={weight_dtype}")
    texts = [text for value in given.values() for text in (value if isinstance(value, list) else [value])]
    objects = [text for text in texts if isinstance(text, str) and is_python_object(text)]
    return load_config(base, [*defaults, given, *overrides, *forced], python_objects=objects)


def _defaults(first: Mapping[str, Any], given: Mapping[str, Any], context: int | None) -> list[Override]:
    """Return the defaults of an evaluation without a run's configuration.

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
        first,
        f"data.max_response_length={response}",
        f"data.max_prompt_length={prompt}",
        f"data.val_batch_size={PROMPTS_PER_CALL}",
        f"worker.rollout.max_num_batched_tokens={max(8192, prompt + response)}",
        "worker.rollout.gpu_memory_utilization=0.9",
        f"worker.reward.num_cpus={count_usable_cpus()}",
    ]


def without_other_arguments(base: Path, given: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, None]:
    """Return the options with the arguments of a base's reward function and environment, as null.

    Only where another one is given, which would get arguments that are not its own. given: as
    given_options returns them. sources: RunRecord.local_sources of the base.
    """
    config = inspect_config(base, []).config
    dropped: dict[str, None] = {}
    for name, arguments in (
        ("worker.reward.reward_function", "worker.reward.reward_function_kwargs"),
        ("worker.rollout.environment", "worker.rollout.environment_kwargs"),
    ):
        text, of_base = given.get(name), value_of(config, name)
        if text is not None and not (isinstance(of_base, str) and is_same_code(text, of_base, sources)):
            dropped[arguments] = None
    return dropped


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
