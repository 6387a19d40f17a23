"""The numbers of a run that follow from its configuration: steps, updates, completions, tokens.

Before the data is read, sizes that are null have the largest value that they can have.
fill_batch_sizes puts all of them into the configuration once the number of prompts is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from trigon.config.options import with_options
from trigon.config.schema import Config, OptimConfig, TrainedConfig, TrainedModelConfig
from trigon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The updates of one model.

    prompts_per_update: prompts that one update trains on.
    epochs_per_step: passes over the data of a step. updates_per_step: updates in all these passes.
    total_updates: updates of the run. warmup_updates: updates during which the learning rate rises,
    which may be more than there are.
    tokens_per_update_pass, tokens_per_experience_pass: maximum number of tokens in one pass with,
    and without, gradient.
    """

    prompts_per_update: int = 1
    epochs_per_step: int = 0
    updates_per_step: int = 0
    total_updates: int = 0
    warmup_updates: int = 0
    tokens_per_update_pass: int = 0
    tokens_per_experience_pass: int = 0


NO_CRITIC = ModelPlan()
"""The plan of a run without a critic, which makes no updates of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ModelPlan):
    """The size of a run, and the updates of its policy. A step samples, scores and learns.

    num_train_prompts: usable training prompts.
    steps_per_epoch, total_steps: steps. The remainder of an epoch that does not fill a step is not
    trained on in that epoch.
    prompts_per_step: prompts that are sampled in a step.
    sequences_per_step, sequences_per_update: completions that are sampled in a step, and trained on
    in one update.
    max_tokens_per_step: tokens of a step if every prompt and completion had its maximum length,
    each prompt counted once.
    critic: the updates of the critic.
    """

    num_train_prompts: int
    steps_per_epoch: int
    total_steps: int
    prompts_per_step: int
    sequences_per_step: int
    sequences_per_update: int
    max_tokens_per_step: int
    critic: ModelPlan = NO_CRITIC


def make_plan(config: Config, *, num_train_prompts: int) -> Plan:
    """Return the plan of a run over this number of usable training prompts.

    Example: 2101 prompts in steps of 256 and updates of 64, n = 6, 15 epochs: 8 steps per epoch,
    120 steps, 4 updates per step, 1536 completions per step.
    With trainer.val_only there are no steps, updates and training prompts.
    Raises: ConfigError if an epoch does not fill one step, or if the policy would never learn.
    """
    config, _ = fill_batch_sizes(config, num_train_prompts)
    data, trainer, per_step = config.data, config.trainer, config.prompts_per_step
    steps_per_epoch = num_train_prompts // per_step
    if steps_per_epoch == 0 and not trainer.val_only:
        raise ConfigError(_too_few_prompts(num_train_prompts, per_step, config.prompts_per_update))
    total_steps = 0 if trainer.val_only else trainer.max_steps or steps_per_epoch * trainer.total_epochs
    if config.critic_warmup >= total_steps > 0:
        raise ConfigError(too_long_critic_warmup(config, total_steps))
    actor = _plan_model(config, config.worker.actor, total_steps - config.critic_warmup)
    return Plan(
        **asdict(actor),
        num_train_prompts=num_train_prompts,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        prompts_per_step=per_step,
        sequences_per_step=per_step * config.group_size,
        sequences_per_update=actor.prompts_per_update * config.group_size,
        max_tokens_per_step=per_step * (data.max_prompt_length + config.group_size * data.max_response_length),
        critic=_plan_model(config, config.critic, total_steps) if config.has_critic else NO_CRITIC,
    )


def _plan_model(config: Config, model: TrainedConfig, steps: int) -> ModelPlan:
    """Return the updates of a model. steps: number of steps in which it is updated."""
    prompts_per_update = config.prompts_per_update_of(model)
    updates_per_step = config.prompts_per_step // prompts_per_update * model.ppo_epochs
    longest = config.data.max_prompt_length + config.data.max_response_length
    warmup_steps = model.optim.lr_warmup_steps
    return ModelPlan(
        prompts_per_update=prompts_per_update,
        epochs_per_step=model.ppo_epochs,
        updates_per_step=updates_per_step,
        total_updates=steps * updates_per_step,
        warmup_updates=round(
            updates_per_step * (model.optim.lr_warmup_ratio * steps if warmup_steps is None else warmup_steps)
        ),
        tokens_per_update_pass=model.micro_batch_size_per_device_for_update * longest,
        tokens_per_experience_pass=model.micro_batch_size_per_device_for_experience * longest,
    )


def find_long_warmups(config: Config, plan: Plan) -> list[str]:
    """Return a warning for each model whose learning rate never reaches its configured value."""
    warmups: list[tuple[str, OptimConfig, ModelPlan]] = [("worker.actor", config.worker.actor.optim, plan)]
    if config.has_critic:
        warmups.append(("worker.critic", config.worker.critic.optim, plan.critic))
    return [
        f"{name}.optim.lr_warmup_steps is {optim.lr_warmup_steps}, but the run ends before: its {model.total_updates} "
        f"updates have learning rates up to {optim.lr * model.total_updates / model.warmup_updates:.3g} of {optim.lr:g}"
        for name, optim, model in warmups
        if model.warmup_updates > model.total_updates > 0
    ]


def with_critic_as_actor(config: Config) -> Config:
    """Return the configuration with the critic's section in the place of the policy's.

    Its worker.actor keeps its own kernels. For code that counts what a model needs.
    """
    actor, critic = config.worker.actor, config.critic
    changes = {name: getattr(critic, name) for name in TrainedConfig.model_fields}
    model = {name: getattr(critic.model, name) for name in TrainedModelConfig.model_fields}
    changes |= {"model": actor.model.model_copy(update=model), "loss_avg_mode": critic.loss_avg_mode}
    changed = actor.model_copy(update=changes)
    return config.model_copy(update={"worker": config.worker.model_copy(update={"actor": changed})})


# -- sizes that are null ---------------------------------------------------------------------------


def find_unknown_sizes(config: Config) -> list[str]:
    """Return the names of options that are null, and whose value depends on the data."""
    data, worker = config.data, config.worker
    sizes = {
        "data.rollout_batch_size": data.rollout_batch_size,
        "data.mini_rollout_batch_size": data.mini_rollout_batch_size or data.rollout_batch_size,
        "worker.actor.global_batch_size": worker.actor.global_batch_size,
        "worker.critic.global_batch_size": worker.critic.global_batch_size,
    }
    return [name for name, size in sizes.items() if size is None]


def fill_batch_sizes(config: Config, num_train_prompts: int) -> tuple[Config, Mapping[str, int]]:
    """Return the configuration without null among these sizes, and those that were null, by name.

    num_train_prompts: usable training prompts of an epoch.
    """
    data, worker = config.data, config.worker
    sizes = {
        "worker.rollout.n": (worker.rollout.n, config.group_size),
        "data.rollout_batch_size": (data.rollout_batch_size, config.prompts_per_step_of(num_train_prompts)),
        "worker.actor.global_batch_size": (
            worker.actor.global_batch_size,
            config.prompts_per_update_of(worker.actor, num_train_prompts),
        ),
    }
    if config.algorithm.has_values:
        size = config.prompts_per_update_of(config.critic, num_train_prompts)
        sizes["worker.critic.global_batch_size"] = worker.critic.global_batch_size, size
    chosen = {name: size for name, (value, size) in sizes.items() if value is None}
    return with_options(config, chosen), chosen


def describe_chosen(chosen: Mapping[str, int], num_train_prompts: int) -> str:
    """Return one line with the sizes that were chosen for this number of training prompts."""
    sizes = " ".join(f"{name}={size}" for name, size in chosen.items())
    return f"not set, and chosen for {num_train_prompts:,} training prompts: {sizes}"


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


def too_long_critic_warmup(config: Config, total_steps: int) -> str:
    """Return the message of a run in none of whose steps the policy is updated."""
    trainer = config.trainer
    given = "trainer.max_steps" if trainer.max_steps is not None else "trainer.total_epochs"
    return (
        f"trainer.critic_warmup is {trainer.critic_warmup}, but there are {total_steps} steps ({given}): "
        "the policy would never learn; lower the first or raise the second"
    )


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
