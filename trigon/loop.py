"""The training loop: sample completions, score them, learn from them, repeat.

The rollout engine, the train engine and the reference are protocols, so the loop is the same in one
process and on a cluster. trigon.assemble makes a Run; run_steps is the loop, make_step one step.
A ValidationRun makes no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trigon.checkpoint.store import VALIDATED_BY, Checkpoint, CheckpointStore, Finish
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.errors import NotFiniteError, WatchError
from trigon.metrics import Metrics, merge, values
from trigon.report.delivery import Hooks
from trigon.report.reporter import Reporter
from trigon.report.watch import Alarm, Watch, describe_stop
from trigon.rewards.pool import RewardPool
from trigon.rollout.buffer import Batch, RolloutBuffer, awake
from trigon.rollout.collect import Evaluator
from trigon.rollout.parity import ParityCheck
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.statistics import count_sampled, describe_validation
from trigon.system.process_settings import return_freed_memory
from trigon.system.stopping import Grace, StepLeft
from trigon.training.protocol import CriticEngine, GroupOutputs, TrainEngine
from trigon.training.train_groups import GroupPreparation, has_gradient
from trigon.training.updates import Updater, describe_continuation, policy_version
from trigon.types import RolloutGroup, TrainGroup

SaveState = Callable[[Path], Finish | None]
"""Writes the engines' part of a checkpoint into a folder.

It may copy the state instead, and return a function that writes the copy.
"""


@dataclass(frozen=True, slots=True)
class Validation:
    """How validation prompts are sampled and scored. evaluator: None without validation prompts."""

    evaluator: Evaluator | None
    rollout: RolloutEngine
    rewards: RewardPool


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where and how the run is saved.

    made_from: entries of every checkpoint that say what the run is made from, as JSON.
    """

    store: CheckpointStore
    save_engines: SaveState
    made_from: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stop:
    """How a run is asked to stop.

    requested: called after each step; True saves and ends the run.
    defer_interrupts: a context around the steps, in which an interrupt (Ctrl-C) makes requested
    return True instead of ending the run.
    grace: decides whether a step is finished after a request to stop, or left.
    """

    requested: Callable[[], bool] = lambda: False
    defer_interrupts: Callable[[], AbstractContextManager[None]] = nullcontext
    grace: Grace = field(default_factory=Grace)


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a training run, already built.

    buffer: gives each step its groups. critic: the critic of the estimator gae; None with other
    estimators.
    """

    config: Config
    plan: Plan
    buffer: RolloutBuffer
    trainer: TrainEngine
    critic: CriticEngine | None
    parity: ParityCheck
    preparation: GroupPreparation
    updater: Updater
    validation: Validation
    checkpoints: Checkpoints
    report: Reporter
    stop: Stop = field(default_factory=Stop)
    hooks: Hooks = field(default_factory=Hooks)
    watch: Watch = field(default_factory=Watch)


@dataclass(frozen=True, slots=True)
class ValidationRun:
    """The parts of a run that validates weights once: trainer.val_only."""

    config: Config
    trainer: TrainEngine
    validation: Validation
    report: Reporter
    hooks: Hooks


def validate_only(run: ValidationRun, checkpoint: Checkpoint | None) -> int:
    """Validate the weights of a checkpoint, or without one of the model; return their step.

    Raises: NotFiniteError, which also says what to validate instead.
    """
    step = 0
    if checkpoint is not None:
        run.trainer.load_state(checkpoint.actor)
        step = checkpoint.step
    run.report.begin()
    try:
        metrics = validate(run, step, version=policy_version(step, run.config.critic_warmup))
    except NotFiniteError as error:
        raise NotFiniteError(
            f"{error}.\nNothing was trained: the weights of the model, or of the checkpoint that is validated, are the "
            "cause. Validate another one (worker.actor.model.model_path, trainer.load_checkpoint_path)"
        ) from error
    run.hooks.step(step, run.report.record(step, metrics))
    return step


def train(run: Run, resume_from: Checkpoint | None) -> int:
    """Make all steps that are left, and return the last step that was made.

    Raises what the engines raise; nothing is retried. A NotFiniteError also says from which
    checkpoint to continue.
    """
    store = run.checkpoints.store
    try:
        with store.wait_on_exit():
            return run_steps(run, resume_from)
    except NotFiniteError as error:
        last = store.newest_complete() or (None if resume_from is None else resume_from.folder)
        raise NotFiniteError(f"{error}.\n{describe_continuation(last, run.config.trainer.same_command)}") from error


def run_steps(run: Run, resume_from: Checkpoint | None) -> int:
    """Do what train does, without waiting for a save in progress when an error is raised."""
    step = restore(run, resume_from)
    run.stop.grace.started_step = run.stop.grace.saved_step = step
    # What a former run wrote after this step is moved away: the folder then describes one run.
    run.checkpoints.store.rewind(step)
    run.report.rewind(step)
    if step == 0 and run.config.validates_first:
        validation = validate(run, 0, version=0)
        run.watch.validation(0, validation)
        if run.hooks.step(0, run.report.step(0, run.plan.total_steps, validation)) == "stop":
            return 0
    with run.stop.defer_interrupts(), closing(run.buffer):
        while step < run.plan.total_steps:
            try:
                batch, metrics = make_step(run, step + 1)
            except StepLeft:
                save_unsaved(run, step)
                break
            step += 1
            if finish_step(run, step, batch, metrics):
                break
    return step


def make_step(run: Run, step: int) -> tuple[Batch, Metrics]:
    """Sample the groups of a step and learn from them.

    Raises: StepLeft before the first update if a stop was requested, and the step takes too long.
    """
    buffer, grace = run.buffer, run.stop.grace
    run.checkpoints.store.check()
    note_saved(run)
    grace.begin_step(step)
    run.watch.begin_step(saving=run.checkpoints.store.is_saving)
    with run.report.checking(grace.check_step):
        batch = buffer.next(step, run.trainer.weights(), version=policy_version(step - 1, run.config.critic_warmup))
    with recorded_rollouts(run, step, batch.groups) as record:
        with run.report.checking(grace.check_step):
            with run.report.phase("parity"):
                parity = run.parity.check(batch.probes, run.trainer, warn=run.report.warn)
            groups, prepared = run.preparation.prepare(batch.groups)
            grace.check_step()
        record.learned = groups
        record.outputs = dict.fromkeys(groups_to_record(groups, run.config.trainer.rollout_tokens))
        run.hooks.rollouts(batch.groups)
        with grace.update():
            learned = run.updater.update(step, groups, record.outputs)
    return batch, merge(batch.metrics, parity, prepared, learned, buffer.pop_metrics())


def finish_step(run: Run, step: int, batch: Batch, metrics: Metrics) -> bool:
    """Validate, report and save what is due after a step. Returns whether the run ends here.

    Raises: WatchError if a watcher stops the run, and it would not end here anyway. The step is
    saved before, unless the watcher says that training fails.
    """
    metrics = merge(metrics, validate_if_due(run, step))
    watched = run.watch.observe(step, metrics)
    ending = step == run.plan.total_steps or run.stop.requested()
    alarm = None if ending else watched.stop
    stopping = ending or (alarm is not None and alarm.saves)
    # Before the checkpoint: a run that dies between the two repeats the step, and writes its line
    # again.
    recorded = run.report.step(
        step,
        run.plan.total_steps,
        merge(metrics, watched.metrics),
        num_tokens=count_tokens(batch.groups),
        num_response_tokens=batch.num_sampled_tokens,
    )
    for seen in watched.new:
        # An alarm with a save is reported before it, since the save may fail or be killed.
        if seen is not alarm or seen.saves:
            run.report.warn(f"trainer.watch: {seen.rule}: since step {seen.first_step}: {seen.text}")
    saves = stopping or (alarm is None and is_due(step, run.config.trainer.save_freq))
    if saves:
        save(run, step, stopping=stopping)
    asked = run.hooks.step(step, recorded)
    if asked is not None and alarm is None:
        # A save that was due may have failed, or still fail, with a warning only.
        if not saves or (asked == "stop" and not is_saved(run, step)):
            save(run, step, stopping=asked == "stop")
        stopping = stopping or asked == "stop"
    if is_due(step, run.config.trainer.val_freq) or is_due(step, run.config.trainer.save_freq):
        return_freed_memory()
    if alarm is not None:
        raise_alarm(run, step, alarm)
    return stopping


def raise_alarm(run: Run, step: int, alarm: Alarm) -> None:
    """Raise the WatchError of an alarm that stops the run, with a checkpoint from before it."""
    wait_for_save(run)  # which may be writing the checkpoint that is named
    saved = run.checkpoints.store.newest_complete(before=alarm.first_step)
    raise WatchError(describe_stop(step, alarm, saved, run.config.trainer.same_command))


# -- validation --


def validate_if_due(run: Run, step: int) -> Metrics:
    """Return the metrics of a validation after this step, or none if it is not due."""
    run.stop.grace.score = None
    last = step == run.plan.total_steps and run.validation.evaluator is not None
    if not (is_due(step, run.config.trainer.val_freq) or last):
        return {}
    try:
        with run.stop.grace.validation(), run.report.checking(run.stop.grace.check_validation):
            run.buffer.pause()
            validation = validate(run, step, version=policy_version(step, run.config.critic_warmup))
    except StepLeft:
        run.report.warn(f"the validation of step {step} is left out: it takes longer than trainer.grace_seconds")
        return {}
    run.stop.grace.score = validation["val/reward_score"].value
    # With the engine's counts, which a run that resumes after this step would not have. With
    # workers, moved/* and perf/images_processed of a validation are in the next step.
    return merge(validation, run.validation.rollout.pop_metrics())


def validate(run: Run | ValidationRun, step: int, *, version: int) -> Metrics:
    """Sample, score and report the validation prompts, and return the metrics.

    version: the policy version of the trainer's weights.
    """
    evaluator, rollout = run.validation.evaluator, run.validation.rollout
    assert evaluator is not None, "validation needs prompts"
    with awake(rollout, run.trainer.weights(), version=version, phase=run.report.phase):
        groups = evaluator.sample(rollout, run.validation.rewards, phase=run.report.phase)
    shown, token_groups = run.config.trainer.val_generations_to_log, run.config.trainer.rollout_tokens
    return report_validation(run.report, step, groups, evaluator, shown=shown, token_groups=token_groups)


def report_validation(
    report: Reporter, step: int, groups: Sequence[RolloutGroup], evaluator: Evaluator, *, shown: int, token_groups: int
) -> Metrics:
    """Report a validation, and return its metrics.

    shown: completions for the loggers. token_groups: see Reporter.validation.
    """
    metrics = describe_validation(groups)
    report.validation(
        step,
        groups,
        values(metrics),
        shown=shown,
        token_groups=token_groups,
        read_images=evaluator.image_files,
    )
    return metrics


# -- checkpoints --


def save(run: Run, step: int, *, stopping: bool, made: bool = True) -> None:
    """Save the state after a step.

    stopping: wait until it is saved, and raise a DiskError, since the run has the only copy.
    made: whether this step is the last one that the buffer has begun. If not, the next step was
    left before its first update, perhaps after the buffer had returned its groups; see
    RolloutBuffer.state.
    """
    store, buffer, grace = run.checkpoints.store, run.buffer, run.stop.grace
    if made:  # wait for what is sampled ahead, as long as a requested stop leaves time for it
        with suppress(StepLeft), run.report.checking(grace.check_waiting):
            buffer.pause_to_save()
    with run.report.phase("save_checkpoint"):
        run.report.flush()  # a run that resumes from the checkpoint does not write them again
        state = {
            **buffer.state(made=made),
            **run.preparation.state(),
            **run.updater.state(),
            "watch": run.watch.state(),
            **run.checkpoints.made_from,
        }
        store.save(step, write=run.checkpoints.save_engines, progress=state, score=grace.score, required=stopping)
        if stopping:
            store.wait()
    note_saved(run)


def save_unsaved(run: Run, step: int) -> None:
    """Save the state after this step, before any update of the next step, which is left."""
    wait_for_save(run)
    note_saved(run)
    if step > run.stop.grace.saved_step:
        save(run, step, stopping=True, made=False)


def is_saved(run: Run, step: int) -> bool:
    """Wait for a save in progress, and return whether the state after this step is saved."""
    wait_for_save(run)
    return run.checkpoints.store.published_step == step


def wait_for_save(run: Run) -> None:
    """Wait for a save in progress, if there is one."""
    with run.report.phase("save_checkpoint"):
        run.checkpoints.store.wait()


def note_saved(run: Run) -> None:
    """Note what is saved and how long a save takes, for a later request to stop."""
    run.stop.grace.note_saved(run.checkpoints.store.published_step, run.checkpoints.store.save_seconds)


def restore(run: Run, checkpoint: Checkpoint | None) -> int:
    """Load a checkpoint into the engines and the buffer, and return its step; 0 without one."""
    if checkpoint is None:
        return 0
    run.trainer.load_state(checkpoint.actor)
    if run.critic is not None:
        if checkpoint.critic is None:
            run.report.warn(f"{checkpoint.folder} has no critic: the critic of this run starts from its model")
        else:
            run.critic.load_state(checkpoint.critic)
    state = checkpoint.progress
    run.buffer.load_state(state, version=policy_version(checkpoint.step, run.config.critic_warmup))
    run.preparation.load_state(state)
    run.watch.load_state(state.get("watch", {}))
    before, now = state.get(VALIDATED_BY), run.checkpoints.made_from.get(VALIDATED_BY)
    if None not in (before, now) and before != now:
        run.watch.forget_validations()
    run.updater.load_state(state)
    return checkpoint.step


# -- rollouts --


@dataclass(slots=True)
class StepRecord:
    """What is recorded with the rollouts of a step, as far as it is known.

    learned: what the update learns from, for each group; None before it is prepared.
    outputs: what the update computed for each group that is recorded with its tokens, by the index
    of the group; None if it computed nothing.
    """

    learned: Sequence[TrainGroup] | None = None
    outputs: GroupOutputs = field(default_factory=dict)


@contextmanager
def recorded_rollouts(run: Run, step: int, groups: Sequence[RolloutGroup]) -> Iterator[StepRecord]:
    """Write the rollouts of a step into the run folder, also if the step ends with an error."""
    record = StepRecord()
    try:
        yield record
    finally:
        shows = record.learned is not None and is_due(step, run.config.trainer.train_samples_freq)
        run.report.rollouts(
            step,
            groups,
            learned=record.learned,
            recorded=record.outputs,
            read_images=run.buffer.image_files,
            shown=len(groups[0].rollouts) if shows else 0,
        )


def groups_to_record(groups: Sequence[TrainGroup], count: int) -> list[int]:
    """Return the indices of the groups recorded with their tokens: the first that are learned from.

    An update may have no forward pass of the others, which are taken where these are too few.
    """
    return sorted(
        sorted(range(len(groups)), key=lambda index: not has_gradient(groups[index], regularized=False))[:count]
    )


def count_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Return the number of tokens of all sequences, each counted with its prompt."""
    prompts = sum(len(group.prompt.token_ids) * len(group.rollouts) for group in groups)
    return prompts + count_sampled(rollout.completion for group in groups for rollout in group.rollouts)


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every n steps happens now; 0 or less is never."""
    return every > 0 and step % every == 0
