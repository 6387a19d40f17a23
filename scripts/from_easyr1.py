"""Writes the tables of docs/from-easyr1.md: `python scripts/from_easyr1.py`. --check only compares.

Compares EasyR1's keys and defaults (commit b44b311) with the schema and config/legacy.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trigon.config.legacy import IGNORED, RENAMED, UNSUPPORTED_VALUES, VERL_SECTIONS, entry_of
from trigon.config.options import Option, options

PAGE = Path(__file__).parents[1] / "docs" / "from-easyr1.md"
BEGIN, END = "<!-- written by scripts/from_easyr1.py: begin -->", "<!-- end -->"

DEFAULTS = """
data:
  train_files: ""
  val_files: ""
  prompt_key: prompt
  answer_key: answer
  image_key: images
  video_key: videos
  image_dir: null
  video_fps: 2.0
  max_prompt_length: 512
  max_response_length: 512
  rollout_batch_size: 512
  mini_rollout_batch_size: null
  val_batch_size: -1
  format_prompt: null
  override_chat_template: null
  shuffle: true
  seed: 1
  min_pixels: 262144
  max_pixels: 4194304
  filter_overlong_prompts: true
  filter_overlong_prompts_workers: 16
algorithm:
  gamma: 1.0
  lam: 1.0
  adv_estimator: grpo
  disable_kl: false
  use_kl_loss: false
  kl_penalty: kl
  kl_coef: 1.0e-3
  kl_type: fixed
  kl_horizon: 10000.0
  kl_target: 0.1
  online_filtering: false
  filter_key: overall
  filter_low: 0.01
  filter_high: 0.99
worker:
  hybrid_engine: true
  actor:
    strategy: fsdp
    global_batch_size: 256
    micro_batch_size_per_device_for_update: 4
    micro_batch_size_per_device_for_experience: 16
    max_grad_norm: 1.0
    clip_ratio_low: 0.2
    clip_ratio_high: 0.3
    clip_ratio_dual: 3.0
    loss_avg_mode: token
    loss_type: default
    ppo_epochs: 1
    padding_free: true
    dynamic_batching: true
    ulysses_size: 1
    use_torch_compile: true
    tau_positive: 1.0
    tau_negative: 1.05
    model:
      model_path: null
      tokenizer_path: null
      override_config: {}
      enable_gradient_checkpointing: true
      trust_remote_code: true
      freeze_vision_tower: false
      lora:
        rank: 0
        alpha: 64
        target_modules: all-linear
        exclude_modules: null
    optim:
      lr: 1.0e-6
      betas: [0.9, 0.999]
      weight_decay: 1.0e-2
      strategy: adamw
      lr_warmup_ratio: 0.0
      lr_warmup_steps: null
      min_lr_ratio: null
      lr_scheduler_type: constant
    fsdp:
      enable_full_shard: true
      enable_cpu_offload: false
      enable_rank0_init: true
      use_orig_params: false
      torch_dtype: null
      fsdp_size: -1
      mp_param_dtype: bf16
      mp_reduce_dtype: fp32
      mp_buffer_dtype: fp32
    offload:
      offload_params: false
      offload_optimizer: false
  critic:
    strategy: fsdp
    global_batch_size: 256
    micro_batch_size_per_device_for_update: 4
    micro_batch_size_per_device_for_experience: 16
    max_grad_norm: 1.0
    cliprange_value: 0.5
    loss_avg_mode: token
    ppo_epochs: 1
    padding_free: false
    dynamic_batching: true
    ulysses_size: 1
    model:
      model_path: null
      tokenizer_path: null
      override_config: {}
      enable_gradient_checkpointing: true
      trust_remote_code: true
      freeze_vision_tower: false
      lora:
        rank: 0
        alpha: 64
        target_modules: all-linear
        exclude_modules: null
    optim:
      lr: 1.0e-6
      betas: [0.9, 0.999]
      weight_decay: 1.0e-2
      strategy: adamw
      lr_warmup_ratio: 0.0
      lr_warmup_steps: null
      min_lr_ratio: null
      lr_scheduler_type: constant
    fsdp:
      enable_full_shard: true
      enable_cpu_offload: false
      enable_rank0_init: true
      use_orig_params: false
      torch_dtype: null
      fsdp_size: -1
      mp_param_dtype: bf16
      mp_reduce_dtype: fp32
      mp_buffer_dtype: fp32
    offload:
      offload_params: false
      offload_optimizer: false
  ref:
    strategy: fsdp
    fsdp:
      enable_full_shard: true
      enable_cpu_offload: false
      enable_rank0_init: true
      use_orig_params: false
      torch_dtype: null
      fsdp_size: -1
      mp_param_dtype: bf16
      mp_reduce_dtype: fp32
      mp_buffer_dtype: fp32
    offload:
      offload_params: false
      offload_optimizer: false
  reward:
    reward_function: null
    reward_function_kwargs: {}
    skip_special_tokens: true
    num_cpus: 1
  rollout:
    name: vllm
    n: 1
    temperature: 1.0
    top_p: 1.0
    top_k: -1
    seed: 1
    limit_images: 0
    dtype: bf16
    gpu_memory_utilization: 0.6
    ignore_eos: false
    enforce_eager: false
    enable_chunked_prefill: false
    tensor_parallel_size: 2
    max_model_len: null
    max_num_batched_tokens: 8192
    disable_log_stats: true
    disable_tqdm: false
    val_override_config: {}
trainer:
  total_epochs: 15
  max_steps: null
  project_name: easy_r1
  experiment_name: demo
  logger: [console, wandb]
  nnodes: 1
  n_gpus_per_node: 8
  max_try_make_batch: 20
  critic_warmup: 0
  val_freq: -1
  val_before_train: true
  val_only: false
  val_generations_to_log: 0
  save_freq: -1
  save_limit: -1
  save_model_only: false
  save_checkpoint_path: null
  load_checkpoint_path: null
  ray_timeline: null
  find_last_checkpoint: true
"""

DEFAULT_REASONS = {
    "data.rollout_batch_size": "all training prompts, and at most 512, so that a small dataset fills a step",
    "trainer.val_before_train": "true if there are `data.val_files`",
    "worker.actor.global_batch_size": "256 where `data.rollout_batch_size` is set to a multiple of it, as in EasyR1;"
    " otherwise the prompts of a step",
    "worker.critic.global_batch_size": "as `worker.actor.global_batch_size`",
    "worker.rollout.n": "8 for estimators that compare the completions of a prompt, with which 1 is an error;"
    " otherwise 1",
    "data.min_pixels": "the limits of the model's own processor, which an evaluation elsewhere has too; files of"
    " EasyR1 set both",
    "data.max_pixels": "the limits of the model's own processor, which an evaluation elsewhere has too; files of"
    " EasyR1 set both",
    "trainer.logger": "Weights & Biases needs an account, and a first run should not fail without one",
    "trainer.n_gpus_per_node": "a file without this key runs on one GPU, or on the CPU",
    "worker.critic.model.trust_remote_code": "running code from a model's repository needs explicit consent",
    "worker.actor.model.trust_remote_code": "running code from a model's repository needs explicit consent",
    "worker.ref.fsdp.enable_cpu_offload": "the reference is used once per step, and sampling needs the memory;"
    " EasyR1's own example file has true as well",
    "worker.rollout.enable_chunked_prefill": "`true` on a GPU, where vLLM does not officially support `false`; an"
    " explicit `false` is kept, with a warning",
    "worker.rollout.tensor_parallel_size": "if a model fits on one GPU, two copies sample faster than one on two GPUs",
}
"""The reason of each default that differs from EasyR1's."""

LIMITS = {
    "worker.actor.fsdp.torch_dtype": "not `bf16` with `optim.strategy: adamw`, which would lose almost every update;"
    " add `optim.strategy: adamw_bf16`, as EasyR1's own scripts do. Not `fp16`, unless LoRA is used."
    " With LoRA, `null` is `fsdp.mp_param_dtype`, since its frozen weights lose nothing",
    "worker.critic.model.model_path": "`null` is the policy's model; an error in EasyR1",
    "worker.critic.fsdp.torch_dtype": "as `worker.actor.fsdp.torch_dtype`",
    "worker.critic.fsdp.mp_param_dtype": "not `fp16`, whose gradients would need scaling; on a single worker not `fp32`"
    " with weights in 16 bits",
    "trainer.critic_warmup": "the policy is not updated in this number of steps; in EasyR1 in one fewer",
    "worker.actor.fsdp.mp_param_dtype": "not `fp16`, whose gradients would need scaling; on a single worker not `fp32`"
    " with weights in 16 bits",
}
"""Combinations of an option with others that are errors here."""


@cache
def defaults() -> dict[str, Any]:
    """Return EasyR1's keys and their defaults, in its order. An empty section counts as a key."""

    def leaves(tree: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            name = f"{path}.{key}" if path else key
            if isinstance(value, dict) and value:
                yield from leaves(value, name)
            else:
                yield name, value

    return dict(leaves(yaml.safe_load(DEFAULTS), ""))


def status_of(key: str, default: Any) -> tuple[str, str]:
    """Return the status of a key of EasyR1 here, and a comment."""
    if (ignored := entry_of(key, IGNORED)) is not None:
        entry = IGNORED[ignored]
        if entry.allowed is None:
            return "no effect", entry.reason
        return (
            f"no effect as {', '.join(f'`{format_yaml(value)}`' for value in entry.allowed)}",
            f"{entry.reason}; any other value is an error: {entry.advice}",
        )
    if key in RENAMED:
        return "renamed", f"`{RENAMED[key]}`"
    option = current_options().get(key)
    if option is None:
        inner = [name for name in current_options() if name.startswith(f"{key}.")]
        assert inner, f"{key} is neither an option nor in config/legacy.py"
        return "same", "of " + ", ".join(f"`{name.removeprefix(key + '.')}`" for name in inner)
    unsupported = [f"not `{value}`: {why}" for (name, value), why in UNSUPPORTED_VALUES.items() if name == key]
    unsupported += [LIMITS[key]] if key in LIMITS else []
    if not is_same_default(option, default):
        current = list(option.default) if isinstance(option.default, tuple) else option.default
        return f"default `{format_yaml(current)}`, not `{format_yaml(default)}`", "; ".join(
            [DEFAULT_REASONS[key], *unsupported]
        )
    return "same", "; ".join(unsupported)


def current_options() -> dict[str, Option]:
    """Return all options by name."""
    return {option.name: option for option in options().values()}


def is_same_default(option: Option, default: Any) -> bool:
    """Return whether a default equals EasyR1's. No file is an empty text there."""
    current = list(option.default) if isinstance(option.default, tuple) else option.default
    return bool(current == default or (not current and not default and option.kind in ("list", "mapping")))


def tables() -> str:
    """Return the generated part: EasyR1's keys that differ, then older keys and verl's sections."""
    differing = {key: status_of(key, default) for key, default in defaults().items()}
    older = {old: ("renamed", f"`{new}`") for old, new in RENAMED.items()}
    # Without what was an option of an earlier version, and of EasyR1 never.
    older |= {key: status_of(key, None) for key, entry in IGNORED.items() if entry.allowed != ()}
    older |= {f"{section}.*": ("error", why) for section, why in VERL_SECTIONS.items()}
    return "\n".join(
        [
            *_table({key: status for key, status in differing.items() if status != ("same", "")}),
            *("", "### Older releases and verl", ""),
            *_table({key: status for key, status in older.items() if key not in differing}),
            "",
        ]
    )


def _table(statuses: dict[str, tuple[str, str]]) -> list[str]:
    """Return the lines of a table of keys; those with the same status and comment share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for key, status in statuses.items():
        rows.setdefault(status, []).append(f"`{key}`")
    return ["| key | here | comment |", "|---|---|---|", *(_row(", ".join(keys), *row) for row, keys in rows.items())]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def format_yaml(value: Any) -> str:
    """Return a value in YAML notation."""
    if isinstance(value, list):
        return f"[{', '.join(map(format_yaml, value))}]"
    return value if isinstance(value, str) and value else json.dumps(value)


def page(text: str) -> str:
    """Return the page with updated tables."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END, 1)[1]}"


def main(arguments: list[str]) -> int:
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in arguments:
        return 0 if page(text) == text else 1
    PAGE.write_text(page(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
