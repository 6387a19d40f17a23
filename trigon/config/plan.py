"""The numbers of a run that follow from its configuration: steps, updates, completions, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trigon.config.batch_sizes import (
    fill_batch_sizes,
    resolve_group_size,
    resolve_prompts_per_critic_update,
    resolve_prompts_per_step,
    resolve_prompts_per_update,
)
from trigon.config.critic import with_critic_as_actor
from trigon.config.schema import Config, FsdpConfig, OptimConfig
from trigon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CriticPlan:
    """The updates of a critic; each number as in Plan.

    shares_trunk: it is a head of the policy, which is updated with it unless the policy rests.
    """

    prompts_per_update: int
    epochs_per_step: int
    updates_per_step: int
    total_updates: int
    warmup_updates: int
    tokens_per_update_pass: int
    tokens_per_experience_pass: int
    shares_trunk: bool = False


NO_CRITIC = CriticPlan(1, 0, 0, 0, 0, 0, 0)
"""The plan of a run without a critic, which makes no updates of it."""


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
    critic: of the run's critic.
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
    critic: CriticPlan = NO_CRITIC


def make_plan(config: Config, *, num_train_prompts: int) -> Plan:
    """Return the plan of a run over this number of usable training prompts.

    Example: 2101 prompts in steps of 256 and updates of 64, n = 6, 15 epochs: 8 steps per epoch,
    120 steps, 4 updates per step, 1536 completions per step.
    With trainer.val_only there are no steps, updates and training prompts.
    Raises: ConfigError if an epoch does not fill one step, or if the policy would never learn.
    """
    config, _ = fill_batch_sizes(config, num_train_prompts)
    data, actor, optim = config.data, config.worker.actor, config.worker.actor.optim
    prompts_per_step, prompts_per_update = resolve_prompts_per_step(config), resolve_prompts_per_update(config)
    steps_per_epoch = num_train_prompts // prompts_per_step
    if steps_per_epoch == 0 and not config.trainer.val_only:
        raise ConfigError(_too_few_prompts(num_train_prompts, prompts_per_step, prompts_per_update))
    total_steps = config.trainer.max_steps or steps_per_epoch * config.trainer.total_epochs
    if config.trainer.val_only:
        total_steps = 0
    warmup = critic_warmup(config)
    if warmup >= total_steps > 0:
        raise ConfigError(too_long_critic_warmup(config, total_steps))
    updates_per_step = prompts_per_step // prompts_per_update * actor.ppo_epochs
    # In the first steps only a critic learns.
    learning_steps = total_steps - warmup
    total_updates = learning_steps * updates_per_step
    warmup_updates = _warmup_updates(optim, updates_per_step, learning_steps)
    group_size = resolve_group_size(config)
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
        critic=make_critic_plan(config, total_steps=total_steps),
    )


def has_critic(config: Config) -> bool:
    """Return whether the run trains a critic."""
    return config.algorithm.adv_estimator == "gae" and not config.trainer.val_only


def shares_trunk(config: Config) -> bool:
    """Return whether the run's critic is a head on the policy's trunk, not a model of its own."""
    return has_critic(config) and config.worker.critic.share_trunk


def critic_warmup(config: Config) -> int:
    """Return the number of first steps in which the policy rests; 0 without a critic."""
    return config.trainer.critic_warmup if has_critic(config) else 0


def too_long_critic_warmup(config: Config, total_steps: int) -> str:
    """Return the message of a run in all of whose steps the policy rests."""
    trainer = config.trainer
    given = "trainer.max_steps" if trainer.max_steps is not None else "trainer.total_epochs"
    return (
        f"trainer.critic_warmup is {trainer.critic_warmup}, but there are {total_steps} steps ({given}): "
        "the policy would never learn; lower the first or raise the second"
    )


def make_critic_plan(config: Config, *, total_steps: int) -> CriticPlan:
    """Return the plan of the critic's updates."""
    if not has_critic(config):
        return NO_CRITIC
    data, critic = config.data, with_critic_as_actor(config).worker.actor
    prompts_per_update = resolve_prompts_per_critic_update(config)
    updates_per_step = resolve_prompts_per_step(config) // prompts_per_update * critic.ppo_epochs
    longest = data.max_prompt_length + data.max_response_length
    return CriticPlan(
        prompts_per_update=prompts_per_update,
        epochs_per_step=critic.ppo_epochs,
        updates_per_step=updates_per_step,
        total_updates=total_steps * updates_per_step,
        warmup_updates=_warmup_updates(critic.optim, updates_per_step, total_steps),
        tokens_per_update_pass=critic.micro_batch_size_per_device_for_update * longest,
        tokens_per_experience_pass=critic.micro_batch_size_per_device_for_experience * longest,
        shares_trunk=shares_trunk(config),
    )


def _warmup_updates(optim: OptimConfig, updates_per_step: int, steps: int) -> int:
    """Return the updates during which the learning rate rises, which may be more than there are.

    steps: in which there are updates.
    """
    if optim.lr_warmup_steps is not None:
        return optim.lr_warmup_steps * updates_per_step
    return round(optim.lr_warmup_ratio * steps * updates_per_step)


def find_long_warmups(config: Config, plan: Plan) -> list[str]:
    """Return a warning for each model whose learning rate never reaches its configured value."""
    warmups = [("worker.actor", config.worker.actor.optim, plan.total_updates, plan.warmup_updates)]
    if has_critic(config):
        optim = with_critic_as_actor(config).worker.actor.optim
        warmups.append(("worker.critic", optim, plan.critic.total_updates, plan.critic.warmup_updates))
    return [
        f"{name}.optim.lr_warmup_steps is {optim.lr_warmup_steps}, but the run ends before: its {total} updates have "
        f"learning rates up to {optim.lr * total / warmup:.3g} of {optim.lr:g}"
        for name, optim, total, warmup in warmups
        if warmup > total > 0
    ]


def num_workers(config: Config) -> int:
    """Return the number of workers that train.

    A single worker is the process of the run itself, unless others sample.
    """
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def has_workers(config: Config) -> bool:
    """Return whether workers do the work, and not the process of the run itself."""
    return num_workers(config) > 1 or not config.worker.hybrid_engine


def keeps_weights_on_host(config: Config, fsdp: FsdpConfig) -> bool:
    """Return whether FSDP keeps weights, gradients and optimizer states in host memory.

    It shards nothing for a single worker, and then does not.
    """
    return fsdp.enable_cpu_offload and num_workers(config) > 1


def num_samplers(config: Config) -> int:
    """Return the number of workers that sample: those that train, unless they are separate."""
    rollout = config.worker.rollout
    return num_workers(config) if config.worker.hybrid_engine else rollout.nnodes * rollout.n_gpus_per_node


def num_devices(config: Config) -> int:
    """Return the number of workers, of both pools if they are separate."""
    return num_workers(config) if config.worker.hybrid_engine else num_workers(config) + num_samplers(config)


def workers_per_machine(config: Config) -> int:
    """Return how many workers share a machine: those of both pools if each has one machine.

    Two pools of one machine each may be on two machines; each worker then has CPUs to spare.
    """
    trainer, rollout = config.trainer, config.worker.rollout
    if config.worker.hybrid_engine:
        return trainer.n_gpus_per_node
    if trainer.nnodes == rollout.nnodes == 1:
        return trainer.n_gpus_per_node + rollout.n_gpus_per_node
    return max(trainer.n_gpus_per_node, rollout.n_gpus_per_node)


def workers_per_copy(config: Config) -> int:
    """Return the number of workers that share one sharded copy of the policy: fsdp_size, or all."""
    fsdp_size, world_size = config.worker.actor.fsdp.fsdp_size, num_workers(config)
    return fsdp_size if 0 < fsdp_size < world_size else world_size


def num_shares(config: Config) -> int:
    """Return the number of shares that the groups of an update are distributed into.

    One for each worker, or for each of those that compute their rows together.
    """
    return num_workers(config) // config.worker.actor.ulysses_sequence_parallel_size


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
