"""The training loop: sample completions, score them, learn from them, repeat.

The rollout engine, the train engine and the reference are protocols, so the loop is the same in one
process and on a cluster. take_steps_from is the loop itself; the rest of this module is around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

from trigon.checkpoint.store import Checkpoint
from trigon.errors import NotFiniteError, WatchError
from trigon.metrics import Metrics, merge, values
from trigon.report.watch import describe_stop
from trigon.rollout.buffer import Batch, RolloutBuffer, awake
from trigon.rollout.statistics import count_sampled, describe_validation
from trigon.run import Progress, Run
from trigon.system.garbage import return_freed_memory
from trigon.system.grace import StepLeft
from trigon.train_groups import prepare_groups
from trigon.training.update_plan import has_gradient
from trigon.training.updates import how_to_go_on
from trigon.types import RolloutGroup, TokenLogprobs, TrainGroup


def train(run: Run, resume_from: Checkpoint | None) -> Progress:
    """Run all steps that are left, and return the progress made.

    Raises what the engines raise; nothing is retried. A NotFiniteError also says from which
    checkpoint to go on.
    """
    try:
        with run.store.wait_on_exit():
            return take_steps(run, resume_from)
    except NotFiniteError as error:
        last = run.store.newest_complete() or (None if resume_from is None else resume_from.folder)
        advice = how_to_go_on(last, run.same_command, validates_only=run.intervals.validate_only)
        raise NotFiniteError(f"{error}.\n{advice}") from error


def take_steps(run: Run, resume_from: Checkpoint | None) -> Progress:
    """Do what train does, without waiting for a save in progress when an error is raised."""
    progress = restore(run, resume_from)
    run.grace.started_step = run.grace.saved_step = progress.step
    if run.intervals.validate_only:
        run.report.begin()
        run.hooks.step(progress.step, run.report.record(progress.step, validate(run, progress)))
        return progress
    rewind(run, progress.step)
    if progress.step == 0 and run.intervals.validate_first:
        validation = validate(run, progress)
        run.watch.validation(0, validation)
        if run.hooks.step(0, run.report.step(0, run.plan.total_steps, validation)) == "stop":
            return progress
    with run.defer_interrupts():
        return take_steps_from(run, progress)


def take_steps_from(run: Run, progress: Progress) -> Progress:
    """Do the steps after this progress, until the last one or until a stop is requested."""
    steps = range(progress.step + 1, run.plan.total_steps + 1)
    with closing(require_buffer(run)) as buffer:
        for step in steps:
            run.store.check()
            run.grace.note_saved(run.store.published_step, run.store.save_seconds)
            run.grace.begin_step(step)
            run.watch.begin_step(saving=run.store.is_saving)
            try:
                with run.report.checking(run.grace.check_step):
                    batch = buffer.next(step, run.trainer.weights(), version=run.updater.policy_version(step - 1))
                    with rollouts_kept(run, step, batch.groups):
                        with run.report.phase("parity"):
                            parity = run.parity.check(batch.probes, run.trainer, warn=run.report.warn)
                        prepared = prepare_groups(
                            batch.groups,
                            run.advantage_settings,
                            trainer=run.trainer,
                            reference=run.reference,
                            needs_old_logprobs=run.needs_old_logprobs,
                            kl=progress.kl,
                            phase=run.report.phase,
                            critic=run.critic,
                        )
                        run.grace.check_step()
            except StepLeft:
                save_unsaved(run, progress, buffer)
                break
            recorded = groups_to_record(prepared.groups, run.token_groups)
            with rollouts_kept(run, step, batch.groups, learned=prepared.groups):
                run.hooks.rollouts(batch.groups)
                with run.grace.update():
                    learned, outputs = run.updater.update(step, prepared.groups, recorded)
            tokens = {index: outputs.get(index) for index in recorded}
            record_rollouts(run, step, batch.groups, learned=prepared.groups, recorded=tokens)
            progress = Progress(step, prepared.kl)
            metrics = merge(batch.metrics, parity, prepared.metrics, learned, buffer.pop_metrics())
            if finish_step(run, progress, batch, metrics, buffer):
                break
    return progress


@contextmanager
def rollouts_kept(
    run: Run, step: int, groups: Sequence[RolloutGroup], *, learned: Sequence[TrainGroup] | None = None
) -> Iterator[None]:
    """Record the rollouts of a step if an error ends the step here, before it is finished.

    learned: with their advantages, where these are known.
    """
    try:
        yield
    except BaseException:
        recorded = [] if learned is None else groups_to_record(learned, run.token_groups)
        record_rollouts(run, step, groups, learned=learned, recorded=dict.fromkeys(recorded))
        raise


def groups_to_record(groups: Sequence[TrainGroup], count: int) -> list[int]:
    """Return the indices of the groups recorded with their tokens: the first that are learned from.

    An update may have no forward pass of the others, which are taken where these are too few.
    """
    return sorted(
        sorted(range(len(groups)), key=lambda index: not has_gradient(groups[index], regularized=False))[:count]
    )


def record_rollouts(
    run: Run,
    step: int,
    groups: Sequence[RolloutGroup],
    *,
    learned: Sequence[TrainGroup] | None,
    recorded: Mapping[int, Sequence[TokenLogprobs] | None],
) -> None:
    """Write the rollouts of a step into the run folder, and pass the first group to the loggers.

    recorded: see Reporter.rollouts.
    """
    shows = learned is not None and is_due(step, run.intervals.train_samples_every)
    shown = len(groups[0].rollouts) if shows else 0
    read_images = require_buffer(run).image_files
    run.report.rollouts(step, groups, learned=learned, recorded=recorded, read_images=read_images, shown=shown)


def finish_step(run: Run, progress: Progress, batch: Batch, metrics: Metrics, buffer: RolloutBuffer) -> bool:
    """Validate, report and save what is due after a step. Returns whether the run ends here.

    Raises: WatchError if a watcher stops the run, and it would not end here anyway. The step is
    saved before, unless the watcher says that training fails.
    """
    step, last = progress.step, run.plan.total_steps
    run.grace.score = None
    if is_due(step, run.intervals.validate_every) or (step == last and run.intervals.validate_last):
        try:
            with run.grace.validation(), run.report.checking(run.grace.check_validation):
                buffer.pause()
                validation = validate(run, progress)
        except StepLeft:
            run.report.warn(f"the validation of step {step} is left out: it takes longer than trainer.grace_seconds")
        else:
            # With the engine's counts, which a run that resumes after this step would not have.
            # With workers, moved/* and perf/images_processed of a validation are in the next step.
            metrics = merge(metrics, validation, run.rollout.pop_metrics())
            run.grace.score = validation["val/reward_score"].value
    watched = run.watch.observe(step, metrics)
    metrics = merge(metrics, watched.metrics)
    ending = step == last or run.should_stop()
    alarm = None if ending else watched.stop
    stopping = ending or (alarm is not None and alarm.saves)
    # Before the checkpoint: a run that dies between the two repeats the step, and writes its line
    # again.
    recorded = run.report.step(
        step, last, metrics, num_tokens=count_tokens(batch.groups), num_response_tokens=batch.num_sampled_tokens
    )
    for seen in watched.new:
        # An alarm with a save is said before, since the save may fail or be killed.
        if seen is not alarm or seen.saves:
            run.report.warn(f"trainer.watch: {seen.rule}: since step {seen.first_step}: {seen.text}")
    saves = stopping or (alarm is None and is_due(step, run.intervals.save_every))
    if saves:
        wait_to_save(run, buffer)
        save(run, progress, buffer.state(made=True), stopping=stopping)
    asked = run.hooks.step(step, recorded)
    if asked is not None and alarm is None:
        if not saves:
            wait_to_save(run, buffer)
            save(run, progress, buffer.state(made=True), stopping=asked == "stop")
        stopping = stopping or asked == "stop"
    if is_due(step, run.intervals.validate_every) or is_due(step, run.intervals.save_every):
        return_freed_memory()
    if alarm is not None:
        with run.report.phase("save_checkpoint"):
            run.store.wait()  # a save in progress may be the checkpoint that is named
        saved = run.store.newest_complete(before=alarm.first_step)
        raise WatchError(describe_stop(step, alarm, saved, run.same_command))
    return stopping


def wait_to_save(run: Run, buffer: RolloutBuffer) -> None:
    """Wait for what is sampled ahead, as long as a requested stop leaves time for it."""
    with suppress(StepLeft), run.report.checking(run.grace.check_waiting):
        buffer.pause_to_save()


def save(run: Run, progress: Progress, position: Mapping[str, Any], *, stopping: bool) -> None:
    """Save the state after a step. position: the entries of the buffer.

    stopping: wait for it, and raise a DiskError, since the run has the only copy.
    """
    with run.report.phase("save_checkpoint"):
        run.report.flush()  # a run that resumes from the checkpoint does not write them again
        state = progress_state(run, progress, position)
        run.store.save(progress.step, write=run.save_state, progress=state, score=run.grace.score, required=stopping)
        if stopping:
            run.store.wait()
    run.grace.note_saved(run.store.published_step, run.store.save_seconds)


def save_unsaved(run: Run, progress: Progress, buffer: RolloutBuffer) -> None:
    """Save the state after the last step, before any update of a step that is left."""
    with run.report.phase("save_checkpoint"):
        run.store.wait()
    run.grace.note_saved(run.store.published_step, run.store.save_seconds)
    if progress.step > run.grace.saved_step:
        save(run, progress, buffer.state(made=False), stopping=True)


def restore(run: Run, checkpoint: Checkpoint | None) -> Progress:
    """Load a checkpoint into the engines and the prompt stream; None: start from the beginning."""
    if checkpoint is None:
        return Progress(step=0, kl=run.kl)
    run.trainer.load_state(checkpoint.actor)
    if run.critic is not None and not run.intervals.validate_only:
        if checkpoint.critic is None:
            run.report.warn(f"{checkpoint.folder} has no critic: this run's critic starts anew")
        else:
            run.critic.load_state(checkpoint.critic)
    if run.intervals.validate_only:
        return Progress(step=checkpoint.step, kl=run.kl)
    state = checkpoint.progress
    require_buffer(run).load_state(state, version=run.updater.policy_version(checkpoint.step))
    # Only an adaptive coefficient has a history; a fixed one, and the target, come from the
    # configuration.
    kl = replace(run.kl, coefficient=state["kl_coefficient"]) if run.kl.horizon > 0 else run.kl
    run.watch.load_state(state.get("watch", {}))
    run.updater.load_state(state)
    return Progress(checkpoint.step, kl)


def require_buffer(run: Run) -> RolloutBuffer:
    """Return the buffer of a run that makes steps."""
    assert run.buffer is not None, "a step needs training prompts"
    return run.buffer


def rewind(run: Run, step: int) -> None:
    """Move away what a former run wrote after this step.

    The folder then describes one run.
    """
    run.store.rewind(step)
    run.report.rewind(step)


def progress_state(run: Run, progress: Progress, position: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that is not the engines', as JSON. Read by restore.

    position: the entries of the buffer.
    """
    return {
        **position,
        "kl_coefficient": progress.kl.coefficient,
        **run.updater.state(),
        "watch": run.watch.state(),
        **run.made_from,
    }


def validate(run: Run, progress: Progress) -> Metrics:
    """Sample, score and report the validation prompts, and return the metrics."""
    assert run.evaluator is not None, "validation needs prompts"
    version = run.updater.policy_version(progress.step)
    with awake(run.rollout, run.trainer.weights(), version=version, phase=run.report.phase):
        groups = run.evaluator.sample(run.rollout, run.val_rewards, phase=run.report.phase)
    metrics = describe_validation(groups)
    run.report.validation(
        progress.step,
        groups,
        values(metrics),
        shown=run.intervals.generations_shown,
        token_groups=run.token_groups,
        read_images=run.evaluator.image_files,
    )
    return metrics


def count_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Return the number of tokens of all sequences, each counted with its prompt."""
    prompts = sum(len(group.prompt.token_ids) * len(group.rollouts) for group in groups)
    return prompts + count_sampled(rollout.completion for group in groups for rollout in group.rollouts)


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every so many steps happens at this one; 0: never."""
    return every > 0 and step % every == 0
