"""Makes the configuration of an evaluation: that of a run that only validates.

It starts from a run's config.yaml, of which data, rewards, sampling and the format of prompts are
kept, from what an export records of its run, or from the defaults; then come the options of the
command, key=value overrides, and what an evaluation needs. Does not depend on torch.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from trigon.config.load import LoadedConfig, load_config
from trigon.config.names import Dtype
from trigon.config.paths import is_python_object
from trigon.errors import ConfigError
from trigon.system.cpus import count_usable_cpus

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


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """The options of an evaluation that are options of the configuration under a shorter name.

    data: datasets, as in data.val_files; empty: those of the run. tools: empty: those of the run.
    None: the run's value, or the default. The others are named as in the configuration.
    """

    data: tuple[str, ...] = ()
    reward: str | None = None
    environment: str | None = None
    tools: tuple[str, ...] = ()
    format_prompt: str | None = None
    prompt_key: str | None = None
    answer_key: str | None = None
    image_key: str | None = None
    image_dir: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    engine: Literal["vllm", "transformers"] | None = None

    def overrides(self) -> list[str]:
        """Return the key=value overrides that these options stand for."""
        sampling = "worker.rollout.val_override_config."
        named: dict[str, str | int | float | None] = {
            "data.val_files": json.dumps(self.data) if self.data else None,
            "worker.reward.reward_function": self.reward,
            "worker.reward.val_reward_function": None if self.reward is None else "null",
            # One takes the place of the other, which the run may have.
            "worker.rollout.environment": self.environment or ("null" if self.tools else None),
            "worker.rollout.tools": json.dumps(self.tools) if self.tools else "[]" if self.environment else None,
            "data.format_prompt": self.format_prompt,
            "data.prompt_key": self.prompt_key,
            "data.answer_key": self.answer_key,
            "data.image_key": self.image_key,
            "data.image_dir": self.image_dir,
            f"{sampling}n": self.n,
            f"{sampling}temperature": self.temperature,
            f"{sampling}top_p": self.top_p,
            f"{sampling}max_tokens": self.max_tokens,
            f"{sampling}seed": self.seed,
            "worker.rollout.name": self.engine,
        }
        return [f"{key}={value}" for key, value in named.items() if value is not None]


def load_settings(
    base: Path | None,
    options: EvaluationOptions,
    overrides: Sequence[str],
    *,
    model_path: str,
    folder: Path,
    context: int | None,
    weight_dtype: Dtype | None,
    located: Mapping[str, Any] = MappingProxyType({}),
    recorded: Mapping[str, Any] = MappingProxyType({}),
) -> LoadedConfig:
    """Return the configuration of the evaluation of one model.

    Args:
        base: config.yaml of a run, or another configuration; None: the defaults of evaluations.
        overrides: key=value, as of `trigon train`; before them, options apply.
        model_path: a Hugging Face folder or a hub id. folder: the run folder to be written.
        context: the most tokens that all models take; None: unknown.
        weight_dtype: in which the weights are stored; None: unknown.
        located: options of base with paths that do not depend on the folder, which replace its own.
        recorded: without base, options of the run of an exported model, which apply first.
    Raises: ConfigError, with all problems in one message.
    """
    first: list[str] = []
    if base is None:
        longest_prompt = int(recorded.get("data.max_prompt_length", MAX_PROMPT_TOKENS))
        recorded_response = int(recorded.get("data.max_response_length", 0))
        context = context or longest_prompt + max(recorded_response or MAX_RESPONSE_TOKENS, options.max_tokens or 0)
        response = options.max_tokens or recorded_response or min(MAX_RESPONSE_TOKENS, context // 2)
        if response >= context:
            raise ConfigError(
                f"a completion may have {response} tokens, but the models take {context}, prompt included; lower "
                "--max-tokens"
            )
        prompt = min(longest_prompt, context - response)
        first += [
            *(write_override(name, value) for name, value in recorded.items()),
            f"data.max_response_length={response}",
            f"data.max_prompt_length={prompt}",
            f"data.val_batch_size={PROMPTS_PER_CALL}",
            f"worker.rollout.max_num_batched_tokens={max(8192, prompt + response)}",
            "worker.rollout.gpu_memory_utilization=0.9",
            f"worker.reward.num_cpus={count_usable_cpus()}",
        ]
    else:
        first += [*_RESET, *(write_override(name, value) for name, value in located.items())]
    if options.engine is None and importlib.util.find_spec("vllm") is None:
        first.append("worker.rollout.name=transformers")
    forced = [
        *_FORCED,
        f"worker.actor.model.model_path={model_path}",
        f"trainer.save_checkpoint_path={folder}",
    ]
    if weight_dtype is not None:
        forced.append(f"worker.actor.fsdp.torch_dtype={weight_dtype}")
    given = (options.reward, options.environment, *options.tools, *options.data)
    objects = [each for each in given if each is not None and is_python_object(each)]
    return load_config(base, [*first, *options.overrides(), *overrides, *forced], python_objects=objects)


def write_override(name: str, value: Any) -> str:
    """Return `key=value` for a value of an option: a text as it is, anything else as JSON."""
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"
