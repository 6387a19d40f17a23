"""The story: sample completions, score them, learn from them, again and again.

Knows protocols and passports only: where the GPUs are, which engine samples and how a checkpoint lies on disk is
somebody else's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trigon.algorithms.advantages import estimate
from trigon.algorithms.kl import AdaptiveKl
from trigon.batch import GroupFilter, Sampler, count_response_tokens, surplus_from, surplus_state
from trigon.checkpoint.store import Checkpoint, CheckpointStore, Finish
from trigon.config.plan import Plan
from trigon.data.stream import PromptStream
from trigon.evaluate import Evaluator
from trigon.metrics import Mean, Metrics, merge, values
from trigon.parity import ParityCheck
from trigon.report.reporter import Reporter
from trigon.rewards.pool import RewardPool
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.statistics import describe_learned, describe_validation
from trigon.train_groups import (
    AdvantageSettings,
    build_reward_batch,
    build_train_groups,
    kl_of,
    mean_of_tokens,
    overlong,
)
from trigon.training.protocol import LogprobEngine, TrainEngine
from trigon.training.trace import Tracer, traced
from trigon.types import RolloutGroup, SamplingParams, TrainGroup


class SaveState(Protocol):
    """Writes everything a checkpoint needs of the engines into a folder, or takes copies and returns what will."""

    def __call__(self, folder: Path) -> Finish | None: ...


@dataclass(frozen=True, slots=True)
class Intervals:
    """When what happens.

    A frequency of 0 is never; the last step always validates and saves where they happen at all.
    """

    validate_first: bool
    validate_only: bool
    validate_every: int
    validate_last: bool
    save_every: int
    generations_shown: int


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a training run is made of, already built.

    evaluator: None where there are no validation prompts. reference: None where no term needs its log-probabilities.
    selection: None where every group is learned from.
    needs_old: whether the policy changes between sampling and the last update of a step, so that old log-probabilities
    must be computed before the first.
    """

    plan: Plan
    intervals: Intervals
    sampling: SamplingParams
    prompts: PromptStream
    rollout: RolloutEngine
    rewards: RewardPool
    trainer: TrainEngine
    reference: LogprobEngine | None
    group_filter: GroupFilter | None
    advantage_settings: AdvantageSettings
    kl: AdaptiveKl
    needs_old: bool
    evaluator: Evaluator | None
    parity: ParityCheck
    store: CheckpointStore
    save_state: SaveState
    report: Reporter
    traced_steps: frozenset[int]
    tracer: Tracer
    should_stop: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the loop itself remembers from step to step; a checkpoint holds this, the data position and the engines."""

    step: int
    kl: AdaptiveKl
    surplus: list[RolloutGroup]


def train(run: Run, resume_from: Checkpoint | None) -> Progress:
    """Run all steps that are left, and return how far it came. Raises what the engines raise; nothing is retried."""
    with run.store.wait_on_exit():
        return take_steps(run, resume_from)


def take_steps(run: Run, resume_from: Checkpoint | None) -> Progress:
    """Do what train does, but for the end of a save that an error leaves in hand."""
    last = run.plan.total_steps
    progress = restore(run, resume_from)
    if run.intervals.validate_only:
        validate(run, progress)
        return progress
    go_on_from(run, progress.step)
    advantage_settings = run.advantage_settings
    sampler = Sampler(
        run.prompts,
        run.rollout,
        run.rewards,
        run.sampling,
        run.report,
        with_baselines=advantage_settings.estimator == "remax",
    )
    if progress.step == 0 and run.intervals.validate_first:
        run.report.step(0, last, validate(run, progress))

    for step in traced(range(progress.step + 1, last + 1), run.traced_steps, run.tracer):
        run.store.check()
        with awake(run, version=step - 1):
            batch = sampler.collect_batch(
                wanted=run.plan.prompts_per_step, group_filter=run.group_filter, kept=progress.surplus, step=step
            )
            groups = batch.groups
            probe = run.parity.probe(groups, run.rollout, run.sampling, step=step)
        with run.report.phase("parity"):
            metrics = merge(batch.metrics, run.parity.check(probe, run.trainer))

        old = ref = penalties = None
        if run.needs_old:
            with run.report.phase("old"):
                old = run.trainer.logprobs(groups)
        if run.reference is not None:
            with run.report.phase("ref"):
                ref = run.reference.logprobs(groups)
        if advantage_settings.kl_in_reward is not None:
            with run.report.phase("ref"):
                kl = kl_of(groups, advantage_settings.kl_in_reward, run.trainer, old=old, ref=ref)
            penalties = [[progress.kl.coefficient * tokens for tokens in group] for group in kl]
            mean_kl = mean_of_tokens(kl)
            metrics = merge(metrics, {"actor/kl_penalty": mean_kl, "actor/kl_coef": Mean(progress.kl.coefficient)})
            progress = replace(progress, kl=progress.kl.updated(mean_kl.value, sum(map(len, kl))))
        outcomes = build_reward_batch(groups, advantage_settings, penalties=penalties, baselines=batch.baselines)
        advantages = estimate(
            outcomes, advantage_settings.estimator, gamma=advantage_settings.gamma, weights=advantage_settings.weights
        )
        trains = outcomes.valid & ~overlong(groups) if advantage_settings.mask_overlong else outcomes.valid  # [G, N]
        train_groups = build_train_groups(groups, advantages, trains, old=old, ref=ref)

        with run.report.phase("update_actor", total=run.plan.updates_per_step) as advance:
            for minibatch in minibatches(train_groups, run.plan):
                metrics = merge(metrics, run.trainer.step(minibatch))
                advance(1)

        progress = replace(progress, step=step, surplus=batch.surplus)
        run.report.rollouts(step, groups, "train")
        learned = describe_learned(groups, outcomes.totals(), advantages, outcomes.valid)
        metrics = merge(metrics, learned, run.prompts.metrics())
        stopping = step == last or run.should_stop()
        score = None
        if is_due(step, run.intervals.validate_every) or (step == last and run.intervals.validate_last):
            validation = validate(run, progress)
            metrics, score = merge(metrics, validation), validation["val/reward_score"].value
        # Before the checkpoint: a run that dies between the two repeats the step, and writes its line again.
        run.report.step(
            step, last, metrics, num_tokens=count_tokens(groups), num_response_tokens=batch.num_sampled_tokens
        )
        if stopping or is_due(step, run.intervals.save_every):
            with run.report.phase("save_checkpoint"):
                run.store.save(step, write=run.save_state, progress=remembered(run, progress), score=score)
                if stopping:
                    run.store.wait()
        if stopping:
            break
    return progress


def restore(run: Run, checkpoint: Checkpoint | None) -> Progress:
    """Put every part back where the checkpoint left it, or leave it at the beginning."""
    if checkpoint is None:
        return Progress(step=0, kl=run.kl, surplus=[])
    run.trainer.load_state(checkpoint.actor)
    run.prompts.load_state(checkpoint.progress["prompts"])
    # Only an adaptive coefficient has a history; a fixed one, and the target, are the configuration's.
    kl = replace(run.kl, coefficient=checkpoint.progress["kl_coefficient"]) if run.kl.horizon > 0 else run.kl
    kept = checkpoint.progress.get("surplus", [])
    if kept and (run.group_filter is None or not run.group_filter.keep_surplus):
        run.report.warn(f"{len(kept)} groups kept by the saved run are dropped: this one keeps none")
        kept = []
    surplus = surplus_from(kept, run.prompts, n=run.sampling.n, warn=run.report.warn)
    return Progress(step=checkpoint.step, kl=kl, surplus=surplus)


def go_on_from(run: Run, step: int) -> None:
    """Set aside what a former run wrote after this step, so that the folder tells one story."""
    run.store.rewind(step)
    run.report.rewind(step)


@contextmanager
def awake(run: Run, *, version: int) -> Iterator[None]:
    """Keep the rollout engine awake with the trainer's weights; the time that handing them over takes is reported."""
    with ExitStack() as stack:
        with run.report.phase("weights"):
            stack.enter_context(run.rollout.awake(run.trainer.weights(), version=version))
        yield


def remembered(run: Run, progress: Progress) -> dict[str, Any]:
    """Return the part of a checkpoint that is not the engines', as JSON can hold it. What restore reads."""
    return {
        "prompts": run.prompts.state(),
        "kl_coefficient": progress.kl.coefficient,
        "surplus": surplus_state(progress.surplus),
    }


def validate(run: Run, progress: Progress) -> Metrics:
    """Score the validation prompts under the current weights, report the answers, and return the figures."""
    assert run.evaluator is not None, "validation needs prompts"
    with awake(run, version=progress.step):
        groups = run.evaluator.sample(run.rollout, run.rewards, phase=run.report.phase)
    metrics = describe_validation(groups)
    run.report.validation(progress.step, groups, values(metrics), shown=run.intervals.generations_shown)
    return metrics


def minibatches(groups: Sequence[TrainGroup], plan: Plan) -> Iterator[Sequence[TrainGroup]]:
    """Yield the groups of each optimizer update: consecutive slices, once for each epoch over the rollouts."""
    for _ in range(plan.epochs_per_step):
        for start in range(0, len(groups), plan.prompts_per_update):
            yield groups[start : start + plan.prompts_per_update]


def count_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Return the tokens of all sequences, each with its prompt."""
    prompts = sum(len(group.prompt.token_ids) * len(group.rollouts) for group in groups)
    return prompts + count_response_tokens(groups)


def is_due(step: int, every: int) -> bool:
    """Tell whether something that happens every so many steps happens now. 0: never."""
    return every > 0 and step % every == 0
