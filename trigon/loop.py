"""The training loop: sample completions, score them, learn from them, repeat.

The rollout engine, the train engine and the reference are protocols, so the loop is the same in one
process and on a cluster. take_steps_from is the loop itself; the rest of this module is around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from trigon.batch import Batch, Sampler, count_response_tokens, load_surplus, surplus_state
from trigon.checkpoint.store import Checkpoint
from trigon.config.plan import Plan
from trigon.data.stream import PromptStream
from trigon.errors import NotFiniteError, WatchError
from trigon.grace import StepLeft
from trigon.metrics import Metrics, merge, values
from trigon.rollout.statistics import describe_validation
from trigon.run import Progress, Run
from trigon.skipped_updates import RecentUpdates, describe_skipped, how_to_go_on
from trigon.system.garbage import return_freed_memory
from trigon.train_groups import prepare_groups
from trigon.training.protocol import SKIPPED_GRAD_NORM
from trigon.training.trace import traced
from trigon.types import RolloutGroup, TokenLogprobs, TrainGroup
from trigon.watch.watch import describe_stop


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
        run.hooks.step(0, run.report.step(0, run.plan.total_steps, validation))
    with run.defer_interrupts():
        return take_steps_from(run, progress)


def take_steps_from(run: Run, progress: Progress) -> Progress:
    """Do the steps after this progress, until the last one or until a stop is requested."""
    sampler = open_sampler(run)
    for step in traced(range(progress.step + 1, run.plan.total_steps + 1), run.traced_steps, run.tracer):
        run.store.check()
        run.grace.note_saved(run.store.published_step, run.store.save_seconds)
        run.grace.begin_step(step)
        run.watch.begin_step(saving=run.store.is_saving)
        position = training_prompts(run).state()
        try:
            with run.report.checking(run.grace.check_step):
                with awake(run, version=step - 1):
                    batch = sampler.collect_batch(
                        run.plan.prompts_per_step, group_filter=run.group_filter, kept=progress.surplus, step=step
                    )
                    probes = run.parity.probe(batch.groups, run.rollout, run.sampling, step=step)
                with rollouts_kept(run, step, batch.groups):
                    with run.report.phase("parity"):
                        parity = run.parity.check(probes, run.trainer, warn=run.report.warn)
                    prepared = prepare_groups(
                        batch.groups,
                        run.advantage_settings,
                        trainer=run.trainer,
                        reference=run.reference,
                        needs_old_logprobs=run.needs_old_logprobs,
                        kl=progress.kl,
                        baselines=batch.baselines,
                        phase=run.report.phase,
                    )
                    scored = score_tokens(run, batch.groups)
                    run.grace.check_step()
        except StepLeft:
            save_unsaved(run, progress, position)
            break
        shows = is_due(step, run.intervals.train_samples_every)
        record_rollouts(run, step, batch.groups, learned=prepared.groups, scored=scored, shows=shows)
        run.hooks.rollouts(batch.groups)
        with run.grace.update():
            learned, recent = update_policy(run, step, prepared.groups, progress.recent_updates)
        progress = Progress(step, prepared.kl, batch.surplus, recent)
        metrics = merge(
            batch.metrics, parity, prepared.metrics, learned, run.rollout.pop_metrics(), training_prompts(run).metrics()
        )
        if finish_step(run, progress, batch, metrics):
            break
    return progress


def open_sampler(run: Run) -> Sampler:
    """Return what collects a step's groups."""
    return Sampler(
        training_prompts(run),
        run.rollout,
        run.rewards,
        run.sampling,
        run.report,
        with_baselines=run.advantage_settings.estimator == "remax",
    )


@contextmanager
def rollouts_kept(run: Run, step: int, groups: Sequence[RolloutGroup]) -> Iterator[None]:
    """Record the rollouts of a step, without advantages, if an error ends the step here."""
    try:
        yield
    except BaseException:
        record_rollouts(run, step, groups, learned=None, scored=[])
        raise


def score_tokens(run: Run, groups: Sequence[RolloutGroup]) -> list[list[TokenLogprobs]]:
    """Return the trainer's log-probabilities and entropies of the groups recorded with them."""
    if not run.token_groups:
        return []
    with run.report.phase("records"):
        return run.trainer.token_logprobs(groups[: run.token_groups])


def record_rollouts(
    run: Run,
    step: int,
    groups: Sequence[RolloutGroup],
    *,
    learned: Sequence[TrainGroup] | None,
    scored: Sequence[Sequence[TokenLogprobs]],
    shows: bool = False,
) -> None:
    """Write the rollouts of a step into the run folder, before the update, which may fail.

    shows: pass the first group to the loggers.
    """
    shown = len(groups[0].rollouts) if shows else 0
    read_images = training_prompts(run).image_files
    run.report.rollouts(step, groups, learned=learned, scored=scored, read_images=read_images, shown=shown)


def update_policy(
    run: Run, step: int, groups: Sequence[TrainGroup], recent: RecentUpdates
) -> tuple[Metrics, RecentUpdates]:
    """Make a step's optimizer updates, and return their metrics, merged, and the recent updates.

    Raises: NotFiniteError if too many updates are skipped.
    """
    metrics: Metrics = {}
    with run.report.phase("update_actor", total=run.plan.updates_per_step) as advance:
        skipped: set[int] = set()  # first groups of the minibatches skipped in this step
        for number, (first, minibatch) in enumerate(minibatches(groups, run.plan), start=1):
            update = dict(run.trainer.step(minibatch))
            norm = update.pop(SKIPPED_GRAD_NORM, None)  # nan or infinite: no number for a curve
            recent = recent.after(update, limit=run.max_skipped_updates, counted=first in skipped)
            if norm is not None:
                skipped.add(first)
                cause = describe_skipped(minibatch, update, grad_norm=norm.value)
                run.report.warn(
                    f"update {number} of step {step} is skipped, since its gradient is not finite "
                    f"({recent.num_in_a_row} in a row): {cause}. The weights are unchanged"
                )
                recent.require_progress(cause, limit=run.max_skipped_updates)
            metrics = merge(metrics, update)
            advance(1)
    return metrics, recent


def finish_step(run: Run, progress: Progress, batch: Batch, metrics: Metrics) -> bool:
    """Validate, report and save what is due after a step. Returns whether the run ends here.

    Raises: WatchError if a watcher stops the run, and it would not end here anyway. The step is
    saved before, unless the watcher says that training fails.
    """
    step, last = progress.step, run.plan.total_steps
    run.grace.score = None
    if is_due(step, run.intervals.validate_every) or (step == last and run.intervals.validate_last):
        try:
            with run.grace.validation(), run.report.checking(run.grace.check_validation):
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
            run.report.warn(f"trainer.watch.{seen.watcher}: since step {seen.first_step}: {seen.text}")
    if stopping or (alarm is None and is_due(step, run.intervals.save_every)):
        save(run, progress, training_prompts(run).state(), stopping=stopping)
    run.hooks.step(step, recorded)
    if is_due(step, run.intervals.validate_every) or is_due(step, run.intervals.save_every):
        return_freed_memory()
    if alarm is not None:
        with run.report.phase("save_checkpoint"):
            run.store.wait()  # a save in progress may be the checkpoint that is named
        saved = run.store.newest_complete(before=alarm.first_step)
        raise WatchError(describe_stop(step, alarm, saved, run.same_command))
    return stopping


def save(run: Run, progress: Progress, prompts: Mapping[str, Any], *, stopping: bool) -> None:
    """Save the state after a step. prompts: the state of the prompt stream then.

    stopping: wait for it, and raise a DiskError, since the run has the only copy.
    """
    with run.report.phase("save_checkpoint"):
        run.report.flush()  # a run that resumes from the checkpoint does not write them again
        state = progress_state(run, progress, prompts)
        run.store.save(progress.step, write=run.save_state, progress=state, score=run.grace.score, required=stopping)
        if stopping:
            run.store.wait()
    run.grace.note_saved(run.store.published_step, run.store.save_seconds)


def save_unsaved(run: Run, progress: Progress, prompts: Mapping[str, Any]) -> None:
    """Save the state after the last step, before any update of a step that is left.

    prompts: the state of the prompt stream before the step that is left.
    """
    with run.report.phase("save_checkpoint"):
        run.store.wait()
    run.grace.note_saved(run.store.published_step, run.store.save_seconds)
    if progress.step > run.grace.saved_step:
        save(run, progress, prompts, stopping=True)


def restore(run: Run, checkpoint: Checkpoint | None) -> Progress:
    """Load a checkpoint into the engines and the prompt stream; None: start from the beginning."""
    if checkpoint is None:
        return Progress(step=0, kl=run.kl, surplus=[])
    run.trainer.load_state(checkpoint.actor)
    if run.intervals.validate_only:
        return Progress(step=checkpoint.step, kl=run.kl, surplus=[])
    training_prompts(run).load_state(checkpoint.progress["prompts"])
    # Only an adaptive coefficient has a history; a fixed one, and the target, come from the
    # configuration.
    kl = replace(run.kl, coefficient=checkpoint.progress["kl_coefficient"]) if run.kl.horizon > 0 else run.kl
    run.watch.load_state(checkpoint.progress.get("watch", {}))
    kept = checkpoint.progress.get("surplus", [])
    if kept and (run.group_filter is None or not run.group_filter.keep_surplus):
        run.report.warn(f"{len(kept)} groups kept by the saved run are dropped: this one keeps none")
        kept = []
    if kept and not training_prompts(run).continues(checkpoint.progress["prompts"]):
        run.report.warn(f"{len(kept)} groups kept by the saved run are dropped: their prompts are of other data")
        kept = []
    surplus = load_surplus(kept, training_prompts(run), n=run.sampling.n, warn=run.report.warn)
    recent = RecentUpdates(tuple(checkpoint.progress.get("recent_grad_norms", [])))
    return Progress(step=checkpoint.step, kl=kl, surplus=surplus, recent_updates=recent)


def rewind(run: Run, step: int) -> None:
    """Move away what a former run wrote after this step.

    The folder then describes one run.
    """
    run.store.rewind(step)
    run.report.rewind(step)


@contextmanager
def awake(run: Run, *, version: int) -> Iterator[None]:
    """Keep the rollout engine awake with the trainer's weights.

    The weight sync is timed as the phase "weights".
    """
    with ExitStack() as stack:
        with run.report.phase("weights"):
            stack.enter_context(run.rollout.awake(run.trainer.weights(), version=version))
        yield


def progress_state(run: Run, progress: Progress, prompts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that is not the engines', as JSON. Read by restore.

    prompts: the state of the prompt stream.
    """
    return {
        "prompts": prompts,
        "kl_coefficient": progress.kl.coefficient,
        "surplus": surplus_state(progress.surplus),
        "recent_grad_norms": list(progress.recent_updates.norms),
        "watch": run.watch.state(),
        **run.made_from,
    }


def validate(run: Run, progress: Progress) -> Metrics:
    """Sample, score and report the validation prompts, and return the metrics."""
    assert run.evaluator is not None, "validation needs prompts"
    with awake(run, version=progress.step):
        groups = run.evaluator.sample(run.rollout, run.val_rewards or run.rewards, phase=run.report.phase)
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


def training_prompts(run: Run) -> PromptStream:
    """Return the prompts of a run that makes steps."""
    assert run.prompts is not None, "a step needs training prompts"
    return run.prompts


def minibatches(groups: Sequence[TrainGroup], plan: Plan) -> Iterator[tuple[int, Sequence[TrainGroup]]]:
    """Yield the groups of each optimizer update, after the index of the first of them.

    Consecutive slices, once for each epoch over the rollouts.
    """
    for _ in range(plan.epochs_per_step):
        for start in range(0, len(groups), plan.prompts_per_update):
            yield start, groups[start : start + plan.prompts_per_update]


def count_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Return the number of tokens of all sequences, each counted with its prompt."""
    prompts = sum(len(group.prompt.token_ids) * len(group.rollouts) for group in groups)
    return prompts + count_response_tokens(groups)


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every so many steps happens at this one; 0: never."""
    return every > 0 and step % every == 0
