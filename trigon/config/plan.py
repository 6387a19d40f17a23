"""The numbers of a run that follow from its configuration: steps, updates, completions, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trigon.config.schema import Config
from trigon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run. A step samples, scores and learns; an update is one optimizer update.

    num_train_prompts: usable training prompts.
    steps_per_epoch, total_steps: steps. The remainder of an epoch that does not fill a step is not
    trained on in that epoch.
    prompts_per_step, prompts_per_update: prompts sampled in a step, and trained on in one update.
    epochs_per_step: passes over the data of a step. updates_per_step: updates in all these passes.
    total_updates: updates of the run. warmup_updates: updates during which the learning rate rises.
    sequences_per_step, sequences_per_update: completions sampled in a step, and trained on in one
    update.
    tokens_per_update_pass, tokens_per_experience_pass: maximum number of tokens in one pass with,
    and without, gradient.
    max_tokens_per_step: tokens of a step if every prompt and completion had its maximum length,
    each prompt counted once.
    """

    num_train_prompts: int
    steps_per_epoch: int
    total_steps: int
    prompts_per_step: int
    prompts_per_update: int
    epochs_per_step: int
    updates_per_step: int
    total_updates: int
    warmup_updates: int
    sequences_per_step: int
    sequences_per_update: int
    tokens_per_update_pass: int
    tokens_per_experience_pass: int
    max_tokens_per_step: int


def make_plan(config: Config, *, num_train_prompts: int) -> Plan:
    """Return the plan of a run over this number of usable training prompts.

    Example: 2101 prompts in steps of 256 and updates of 64, n = 6, 15 epochs: 8 steps per epoch,
    120 steps, 4 updates per step, 1536 completions per step.
    With trainer.val_only there are no steps, updates and training prompts.
    Raises: ConfigError if an epoch does not fill one step, or if warm-up is longer than training.
    """
    data, actor, optim = config.data, config.worker.actor, config.worker.actor.optim
    prompts_per_step, prompts_per_update = data.rollout_batch_size, actor.global_batch_size
    steps_per_epoch = num_train_prompts // prompts_per_step
    if steps_per_epoch == 0 and not config.trainer.val_only:
        raise ConfigError(_too_few_prompts(num_train_prompts, prompts_per_step, prompts_per_update))
    total_steps = config.trainer.max_steps or steps_per_epoch * config.trainer.total_epochs
    if config.trainer.val_only:
        total_steps = 0
    updates_per_step = prompts_per_step // prompts_per_update * actor.ppo_epochs
    total_updates = total_steps * updates_per_step
    if optim.lr_warmup_steps is not None:
        warmup_updates = optim.lr_warmup_steps * updates_per_step
    else:
        warmup_updates = round(optim.lr_warmup_ratio * total_updates)
    if warmup_updates > total_updates and not config.trainer.val_only:
        raise ConfigError(
            f"worker.actor.optim.lr_warmup_steps is {optim.lr_warmup_steps}, but training has {total_steps} steps and "
            f"would never reach its learning rate; set it to at most {total_steps}"
        )
    group_size = config.worker.rollout.n
    longest = data.max_prompt_length + data.max_response_length
    return Plan(
        num_train_prompts=num_train_prompts,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        prompts_per_step=prompts_per_step,
        prompts_per_update=prompts_per_update,
        epochs_per_step=actor.ppo_epochs,
        updates_per_step=updates_per_step,
        total_updates=total_updates,
        warmup_updates=warmup_updates,
        sequences_per_step=prompts_per_step * group_size,
        sequences_per_update=prompts_per_update * group_size,
        tokens_per_update_pass=actor.micro_batch_size_per_device_for_update * longest,
        tokens_per_experience_pass=actor.micro_batch_size_per_device_for_experience * longest,
        max_tokens_per_step=prompts_per_step * (data.max_prompt_length + group_size * data.max_response_length),
    )


def num_workers(config: Config) -> int:
    """Return the number of workers. A single worker is the process of the run itself."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def workers_per_copy(config: Config) -> int:
    """Return the number of workers that share one sharded copy of the policy: fsdp_size, or all."""
    fsdp_size, world_size = config.worker.actor.fsdp.fsdp_size, num_workers(config)
    return fsdp_size if 0 < fsdp_size < world_size else world_size


def longest_sequence(config: Config) -> int:
    """Return the maximum number of tokens of prompt and completion, in training and validation."""
    completion = max(config.data.max_response_length, config.worker.rollout.val_override_config.max_tokens or 0)
    return config.data.max_prompt_length + completion


def context_length(config: Config) -> int:
    """Return the maximum number of tokens per sequence of the rollout engine."""
    return config.worker.rollout.max_model_len or longest_sequence(config)


def suggest_batch_sizes(per_step: int, per_update: int) -> tuple[list[int], list[int]]:
    """Return the nearest valid values of per_step and of per_update, given the other one.

    They are the multiples of per_update nearest to per_step, and the divisors of per_step nearest
    to per_update: one below and one above where it exists.
    Example: (100, 64) gives [64, 128] and [50, 100].
    """
    below = per_step // per_update * per_update
    divisors = [number for number in range(1, per_step + 1) if per_step % number == 0]
    smaller = [number for number in divisors if number <= per_update]
    larger = [number for number in divisors if number > per_update]
    return [number for number in (below, below + per_update) if number], [*smaller[-1:], *larger[:1]]


def join_with_or(numbers: Sequence[int]) -> str:
    """Return numbers as text: "64 or 128"."""
    return " or ".join(map(str, numbers))


def _too_few_prompts(num_prompts: int, per_step: int, per_update: int) -> str:
    problem = (
        f"an epoch has {num_prompts} usable training prompts, which do not fill one step of data.rollout_batch_size="
        f"{per_step}"
    )
    if num_prompts == 0:
        return f"{problem}; the dataset is empty, or all its rows were skipped"
    if num_prompts < per_update:
        return f"{problem}; set data.rollout_batch_size={num_prompts} worker.actor.global_batch_size={num_prompts}"
    return f"{problem}; set data.rollout_batch_size={num_prompts // per_update * per_update}"
