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

import torch
from torch import Tensor

from trigon.algorithms.advantages import group_relative
from trigon.algorithms.kl import AdaptiveKl, KlEstimator, kl_penalized_rewards, kl_per_token
from trigon.checkpoint.store import Checkpoint, CheckpointStore, Finish
from trigon.config.plan import Plan
from trigon.data.stream import PromptStream
from trigon.evaluate import Evaluator
from trigon.metrics import Mean, Metrics, Sum, merge, values
from trigon.parity import ParityCheck
from trigon.report.reporter import Reporter
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.statistics import describe_groups, describe_validation
from trigon.training.protocol import LogprobEngine, TrainEngine
from trigon.types import RolloutGroup, SamplingParams, TrainGroup, TrainSequence


class SaveState(Protocol):
    """Writes everything a checkpoint needs of the engines into a folder, or takes copies and returns what will."""

    def __call__(self, folder: Path) -> Finish | None: ...


@dataclass(frozen=True, slots=True)
class Rhythm:
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

    evaluator: None where there are no validation prompts. reference: None where no term needs a reference policy.
    kl_in_reward: None where the KL is in the loss, or off.
    needs_old: whether the policy changes between sampling and the last update of a step, so that old log-probabilities
    must be computed before the first.
    """

    plan: Plan
    rhythm: Rhythm
    sampling: SamplingParams
    prompts: PromptStream
    rollout: RolloutEngine
    rewards: RewardPool
    trainer: TrainEngine
    reference: LogprobEngine | None
    kl_in_reward: KlEstimator | None
    kl: AdaptiveKl
    needs_old: bool
    evaluator: Evaluator | None
    parity: ParityCheck
    store: CheckpointStore
    save_state: SaveState
    report: Reporter
    should_stop: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the loop itself remembers from step to step; a checkpoint holds this, the data position and the engines."""

    step: int
    kl: AdaptiveKl


def train(run: Run, resume_from: Checkpoint | None) -> Progress:
    """Run all steps that are left, and return how far it came. Raises what the engines raise; nothing is retried."""
    with run.store.settled():
        return take_steps(run, resume_from)


def take_steps(run: Run, resume_from: Checkpoint | None) -> Progress:
    """Do what train does, but for the end of a save that an error leaves in hand."""
    last = run.plan.total_steps
    progress = restore(run, resume_from)
    if run.rhythm.validate_only:
        validate(run, progress)
        return progress
    go_on_from(run, progress.step)
    if progress.step == 0 and run.rhythm.validate_first:
        run.report.step(0, last, validate(run, progress))

    for step in range(progress.step + 1, last + 1):
        run.store.check()
        with run.report.phase("data"):
            prompts = run.prompts.take(run.plan.prompts_per_step)
        with awake(run, version=step - 1):
            groups = collect(prompts, run.rollout, run.rewards, run.sampling, step=step, phase=run.report.phase)
            probe = run.parity.probe(groups, run.rollout, run.sampling, step=step)
        with run.report.phase("parity"):
            metrics = run.parity.check(probe, run.trainer)

        old = ref = None
        if run.needs_old:
            with run.report.phase("old"):
                old = run.trainer.logprobs(groups)
        if run.reference is not None:
            with run.report.phase("ref"):
                ref = run.reference.logprobs(groups)
        rewards, graded = rewards_of(groups)  # [G, N] each
        if run.kl_in_reward is not None:
            assert old is not None, "a KL in the reward needs the policy's own log-probabilities"
            assert ref is not None, "a KL in the reward needs a reference"
            sequence_kl, mean_kl = kl_of(old, ref, run.kl_in_reward)  # [G, N], per token
            rewards = kl_penalized_rewards(rewards, sequence_kl, progress.kl.coefficient)
            metrics = merge(metrics, {"actor/kl_penalty": mean_kl, "actor/kl_coef": Mean(progress.kl.coefficient)})
            progress = replace(progress, kl=progress.kl.updated(mean_kl.value, rewards.numel()))
        advantages = group_relative(rewards, graded)  # [G, N]
        train_groups = attach(groups, advantages, graded, old=old, ref=ref)

        with run.report.phase("update_actor", total=run.plan.updates_per_step) as advance:
            for minibatch in minibatches(train_groups, run.plan):
                metrics = merge(metrics, run.trainer.step(minibatch))
                advance(1)

        progress = replace(progress, step=step)
        run.report.rollouts(step, groups, "train")
        metrics = merge(metrics, describe_groups(groups, rewards, advantages, graded), run.prompts.metrics())
        metrics = merge(metrics, {"rollout/num_set_aside": Sum(float(len(prompts) - len(groups)))})
        stopping = step == last or run.should_stop()
        score = None
        if is_due(step, run.rhythm.validate_every) or (step == last and run.rhythm.validate_last):
            validation = validate(run, progress)
            metrics, score = merge(metrics, validation), validation["val/reward_score"].value
        num_tokens, num_response_tokens = count_tokens(groups)
        # Before the checkpoint: a run that dies between the two repeats the step, and writes its line again.
        run.report.step(step, last, metrics, num_tokens=num_tokens, num_response_tokens=num_response_tokens)
        if stopping or is_due(step, run.rhythm.save_every):
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
        return Progress(step=0, kl=run.kl)
    run.trainer.load_state(checkpoint.actor)
    run.prompts.load_state(checkpoint.progress["prompts"])
    # Only an adaptive coefficient has a history; a fixed one, and the target, are the configuration's.
    kl = replace(run.kl, coefficient=checkpoint.progress["kl_coefficient"]) if run.kl.horizon > 0 else run.kl
    return Progress(step=checkpoint.step, kl=kl)


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
    return {"prompts": run.prompts.state(), "kl_coefficient": progress.kl.coefficient}


def validate(run: Run, progress: Progress) -> Metrics:
    """Score the validation prompts under the current weights, report the answers, and return the figures."""
    assert run.evaluator is not None, "validation needs prompts"
    with awake(run, version=progress.step):
        groups = run.evaluator.sample(run.rollout, run.rewards, phase=run.report.phase)
    metrics = describe_validation(groups)
    run.report.validation(progress.step, groups, values(metrics), shown=run.rhythm.generations_shown)
    return metrics


def rewards_of(groups: Sequence[RolloutGroup]) -> tuple[Tensor, Tensor]:
    """Return rewards [G, N] float32, and [G, N] bool: which of them a grader really gave."""
    rewards = torch.tensor([[rollout.score.overall for rollout in group.rollouts] for group in groups])
    graded = torch.tensor([[rollout.score.outcome == "ok" for rollout in group.rollouts] for group in groups])
    return rewards, graded


def kl_of(
    logprobs: Sequence[Sequence[Tensor]], ref: Sequence[Sequence[Tensor]], estimator: KlEstimator
) -> tuple[Tensor, Mean]:
    """Return the KL of each completion, summed over its tokens [G, N], and the mean over all tokens."""
    per_token = [
        [kl_per_token(ours, theirs, estimator) for ours, theirs in zip(group, ref_group, strict=True)]
        for group, ref_group in zip(logprobs, ref, strict=True)
    ]
    sums = torch.stack([torch.stack([tokens.sum() for tokens in group]) for group in per_token])
    return sums, Mean(float(sums.sum()), float(sum(tokens.numel() for group in per_token for tokens in group)))


def attach(
    groups: Sequence[RolloutGroup],
    advantages: Tensor,
    graded: Tensor,
    *,
    old: Sequence[Sequence[Tensor]] | None,
    ref: Sequence[Sequence[Tensor]] | None,
) -> list[TrainGroup]:
    """Give every completion what the loss needs.

    Each token gets its completion's advantage; ungraded ones do not train.
    """
    return [
        TrainGroup(
            prompt=group.prompt,
            sequences=tuple(
                TrainSequence(
                    token_ids=rollout.completion.token_ids,
                    loss_mask=torch.full((length,), float(graded[g, i])),
                    advantages=torch.full((length,), float(advantages[g, i])),
                    sampling_logprobs=torch.tensor(rollout.completion.sampling_logprobs),
                    old_logprobs=None if old is None else old[g][i],
                    ref_logprobs=None if ref is None else ref[g][i],
                )
                for i, rollout in enumerate(group.rollouts)
                for length in [len(rollout.completion.token_ids)]
            ),
        )
        for g, group in enumerate(groups)
    ]


def minibatches(groups: Sequence[TrainGroup], plan: Plan) -> Iterator[Sequence[TrainGroup]]:
    """Yield the groups of each optimizer update: consecutive slices, once for each epoch over the rollouts."""
    for _ in range(plan.epochs_per_step):
        for start in range(0, len(groups), plan.prompts_per_update):
            yield groups[start : start + plan.prompts_per_update]


def count_tokens(groups: Sequence[RolloutGroup]) -> tuple[int, int]:
    """Return the tokens of all sequences, each with its prompt, and those of the responses alone."""
    response = sum(len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts)
    return response + sum(len(group.prompt.token_ids) * len(group.rollouts) for group in groups), response


def is_due(step: int, every: int) -> bool:
    """Tell whether something that happens every so many steps happens now. 0: never."""
    return every > 0 and step % every == 0
