"""The arithmetic of a run: how many steps, updates, answers and tokens. Knows numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trigon.config.schema import Config
from trigon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do, before any model is loaded. A step samples, scores and learns; an update moves the weights.

    num_train_prompts: usable training prompts. steps_per_epoch, total_steps: steps; the end of an epoch's order that
    does not fill a step is not trained on in that epoch.
    prompts_per_step, prompts_per_update: prompts sampled in a step, and learned from in one update.
    epochs_per_step: times that a step's data are used. updates_per_step: optimizer updates of a step, all those times
    together. total_updates: of the run. warmup_updates: those over which the learning rate rises.
    sequences_per_step, sequences_per_update: answers sampled in a step, and learned from in one update.
    tokens_per_update_pass, tokens_per_experience_pass: most tokens in one pass with, and without, gradient.
    max_tokens_per_step: tokens of a step if every prompt and answer were as long as allowed, each prompt counted once.
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
    """Return the plan of a run over this many usable training prompts.

    Example: 2101 prompts in steps of 256 and updates of 64, n = 6, 15 epochs: 8 steps an epoch, 120 steps, 4 updates
    a step, 1536 answers a step. Raises: ConfigError if an epoch does not fill one step, or training ends in warm-up.
    """
    data, actor, optim = config.data, config.worker.actor, config.worker.actor.optim
    prompts_per_step, prompts_per_update = data.rollout_batch_size, actor.global_batch_size
    steps_per_epoch = num_train_prompts // prompts_per_step
    if steps_per_epoch == 0:
        raise ConfigError(_too_few(num_train_prompts, prompts_per_step, prompts_per_update))
    total_steps = config.trainer.max_steps or steps_per_epoch * config.trainer.total_epochs
    updates_per_step = prompts_per_step // prompts_per_update * actor.ppo_epochs
    total_updates = total_steps * updates_per_step
    if optim.lr_warmup_steps is not None:
        warmup_updates = optim.lr_warmup_steps * updates_per_step
    else:
        warmup_updates = round(optim.lr_warmup_ratio * total_updates)
    if warmup_updates > total_updates:
        raise ConfigError(
            f"worker.actor.optim.lr_warmup_steps is {optim.lr_warmup_steps}, but training has {total_steps} steps and "
            f"would never reach its learning rate; set it to at most {total_steps}"
        )
    num_answers = config.worker.rollout.n
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
        sequences_per_step=prompts_per_step * num_answers,
        sequences_per_update=prompts_per_update * num_answers,
        tokens_per_update_pass=actor.micro_batch_size_per_device_for_update * longest,
        tokens_per_experience_pass=actor.micro_batch_size_per_device_for_experience * longest,
        max_tokens_per_step=prompts_per_step * (data.max_prompt_length + num_answers * data.max_response_length),
    )


def num_workers(config: Config) -> int:
    """Return how many workers a run has; a single one is the process of the run itself."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def workers_per_copy(config: Config) -> int:
    """Return how many workers share one copy of the sharded policy: all of them, unless fsdp_size asks for fewer."""
    wanted, world = config.worker.actor.fsdp.fsdp_size, num_workers(config)
    return wanted if 0 < wanted < world else world


def longest_sequence(config: Config) -> int:
    """Return the tokens that prompt and answer can have together, in training or in validation."""
    answer = max(config.data.max_response_length, config.worker.rollout.val_override_config.max_tokens or 0)
    return config.data.max_prompt_length + answer


def context_length(config: Config) -> int:
    """Return the tokens that the rollout engine plans for in one sequence."""
    return config.worker.rollout.max_model_len or longest_sequence(config)


def batch_proposals(per_step: int, per_update: int) -> tuple[list[int], list[int]]:
    """Return the multiples of per_update nearest to per_step, and the divisors of per_step nearest to per_update.

    One below and one above each, where there is one. Example: (100, 64) gives [64, 128] and [50, 100].
    """
    below = per_step // per_update * per_update
    divisors = [number for number in range(1, per_step + 1) if per_step % number == 0]
    smaller = [number for number in divisors if number <= per_update]
    larger = [number for number in divisors if number > per_update]
    return [number for number in (below, below + per_update) if number], [*smaller[-1:], *larger[:1]]


def either(numbers: Sequence[int]) -> str:
    """Return numbers as a choice: "64 or 128"."""
    return " or ".join(map(str, numbers))


def _too_few(num_prompts: int, per_step: int, per_update: int) -> str:
    problem = (
        f"an epoch has {num_prompts} usable training prompts, which do not fill one step of data.rollout_batch_size="
        f"{per_step}"
    )
    if num_prompts == 0:
        return f"{problem}; the dataset is empty, or all its rows were set aside"
    if num_prompts < per_update:
        return f"{problem}; set data.rollout_batch_size={num_prompts} worker.actor.global_batch_size={num_prompts}"
    return f"{problem}; set data.rollout_batch_size={num_prompts // per_update * per_update}"
