"""The story: sample completions, score them, learn from them, again and again.

Knows protocols and passports only: where the GPUs are, which engine samples and how a checkpoint lies on disk is
somebody else's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trigon.algorithms.advantages import group_relative
from trigon.algorithms.kl import AdaptiveKl, KlEstimator, kl_penalized_rewards, kl_per_token
from trigon.checkpoint.store import Checkpoint, CheckpointStore
from trigon.config.plan import Plan
from trigon.data.dataset import PromptStream
from trigon.evaluate import Evaluator, Validation
from trigon.metrics import Mean, Metric, merge, mean_of
from trigon.parity import ParityCheck
from trigon.report.reporter import Reporter
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.statistics import describe_groups
from trigon.training.protocol import LogprobEngine, TrainEngine
from trigon.types import RolloutGroup, SamplingParams, TrainGroup, TrainSequence


class SaveState(Protocol):
    """Writes everything a checkpoint needs of the engines into a folder."""

    def __call__(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Rhythm:
    """When what happens.

    A frequency of 0 is never; the last step always validates and saves where they happen at all.
    """

    validate_first: bool
    validate_only: bool
    validate_every: int
    save_every: int
    log_generations: int


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a training run is made of, already built.

    reference: None where no term needs a reference policy. kl_in_reward: None where the KL is in the loss, or off.
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
    evaluator: Evaluator
    parity: ParityCheck
    store: CheckpointStore
    save_state: SaveState
    report: Reporter
    should_stop: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the loop itself remembers from step to step;

    a checkpoint holds just this, the data position and the engines.
    """

    step: int
    kl: AdaptiveKl
    first_validation: Mapping[str, float]
    last_validation: Mapping[str, float]


def train(run: Run, resume_from: Checkpoint | None) -> Progress:
    """Run all steps that are left, and return how far it came.

    Raises what the engines raise; nothing is retried here.
    """
    progress = restore(run, resume_from)
    if progress.step == 0 and (run.rhythm.validate_first or run.rhythm.validate_only):
        progress = validate(run, progress)
    if run.rhythm.validate_only:
        return progress

    for step in range(progress.step + 1, run.plan.total_steps + 1):
        with run.report.phase("data"):
            prompts = run.prompts.take(run.plan.prompts_per_step)
        with run.rollout.awake(run.trainer.weights(), version=step - 1):
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
        kl = progress.kl
        if run.kl_in_reward is not None:
            assert old is not None
            assert ref is not None
            sequence_kl, mean_kl = kl_of(old, ref, run.kl_in_reward)  # [G, N], per token
            rewards = kl_penalized_rewards(rewards, sequence_kl, kl.coefficient)
            metrics = merge(metrics, {"actor/kl_penalty": mean_kl, "actor/kl_coef": Mean(kl.coefficient)})
            kl = kl.updated(mean_kl.value, rewards.numel())
        advantages = group_relative(rewards, graded)  # [G, N]
        train_groups = attach(groups, advantages, graded, old=old, ref=ref)

        with run.report.phase("update_actor", total=run.plan.updates_per_step) as advance:
            for minibatch in minibatches(train_groups, run.plan):
                metrics = merge(metrics, run.trainer.step(minibatch))
                advance(1)

        run.report.rollouts(step, groups, split="train")
        metrics = merge(metrics, describe_groups(groups, rewards, advantages), run.prompts.metrics())
        progress = replace(progress, step=step, kl=kl)
        stopping = run.should_stop() or step == run.plan.total_steps
        if is_due(step, run.rhythm.validate_every) or (step == run.plan.total_steps and run.rhythm.validate_every > 0):
            progress = validate(run, progress)
            metrics = merge(metrics, {key: Mean(value) for key, value in progress.last_validation.items()})
            score = progress.last_validation["val/reward_score"]
        else:
            score = None
        if stopping or is_due(step, run.rhythm.save_every):
            with run.report.phase("save_checkpoint"):
                run.store.save(step, write=run.save_state, progress=remembered(run, progress), score=score)
        run.report.step(step, run.plan.total_steps, metrics)
        if stopping:
            break
    return progress


def restore(run: Run, checkpoint: Checkpoint | None) -> Progress:
    """Put every part back where the checkpoint left it, or return the beginning."""
    if checkpoint is None:
        run.report.rewind(0)
        return Progress(step=0, kl=run.kl, first_validation={}, last_validation={})
    run.trainer.load_state(checkpoint.actor_folder)
    run.prompts.load_state(checkpoint.progress["prompts"])
    run.report.rewind(checkpoint.step)
    return Progress(
        step=checkpoint.step,
        kl=AdaptiveKl(**checkpoint.progress["kl"]),
        first_validation=checkpoint.progress["first_validation"],
        last_validation=checkpoint.progress["last_validation"],
    )


def remembered(run: Run, progress: Progress) -> dict[str, Any]:
    """Return the part of a checkpoint that is not the engines': JSON only. The inverse of restore."""
    return {
        "step": progress.step,
        "prompts": run.prompts.state(),
        "kl": asdict(progress.kl),
        "first_validation": dict(progress.first_validation),
        "last_validation": dict(progress.last_validation),
    }


def validate(run: Run, progress: Progress) -> Progress:
    """Score the validation prompts under the current weights, report them, and remember the figures."""
    with run.rollout.awake(run.trainer.weights(), version=progress.step):
        validation: Validation = run.evaluator.evaluate(run.rollout, run.rewards, phase=run.report.phase)
    run.report.validation(progress.step, validation.groups, validation.metrics, shown=run.rhythm.log_generations)
    return replace(
        progress,
        first_validation=progress.first_validation or validation.metrics,
        last_validation=validation.metrics,
    )


def rewards_of(groups: Sequence[RolloutGroup]) -> tuple[Tensor, Tensor]:
    """Return rewards [G, N] float32, and [G, N] bool: which of them a grader really gave."""
    rewards = torch.tensor([[rollout.score.overall for rollout in group.rollouts] for group in groups])
    graded = torch.tensor([[rollout.score.outcome == "ok" for rollout in group.rollouts] for group in groups])
    return rewards, graded


def kl_of(
    logprobs: Sequence[Sequence[Tensor]], ref: Sequence[Sequence[Tensor]], estimator: KlEstimator
) -> tuple[Tensor, Metric]:
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


def is_due(step: int, every: int) -> bool:
    """Tell whether something that happens every so many steps happens now. 0: never."""
    return every > 0 and step % every == 0
