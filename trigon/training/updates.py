"""Makes the optimizer updates of a step, and ends a run in which too many are skipped.

An update whose gradient is not finite is skipped and counted: it can be a rare batch. Many of them
mean that nothing is learned any more: the run then ends, and reports what was not finite. With
several epochs over the rollouts of a step a rare batch comes back in each, and counts once. Updates
without a trainable token are skipped too, and do not count here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trigon.config.plan import ModelPlan, Plan
from trigon.errors import NotFiniteError
from trigon.metrics import Metrics, merge
from trigon.system.stopping import SameCommand
from trigon.system.trace import Tracer, traced
from trigon.training.protocol import (
    SKIPPED_GRAD_NORM,
    CriticEngine,
    GroupOutputs,
    ModelName,
    TrainedModel,
    TrainEngine,
    TrunkCriticEngine,
)
from trigon.types import Phase, TrainGroup

WINDOW = 20
"""Number of last updates of which at most half may be skipped."""

NUM_NORMS = 8
"""How many of the last gradient norms a message shows."""


class UpdateReport(Protocol):
    """What an Updater reports to. Reporter satisfies it."""

    @property
    def phase(self) -> Phase: ...

    def warn(self, text: str) -> None: ...


class Updater:
    """Makes a step's updates of the policy, and of the critic, if there is one.

    A critic on the policy's trunk is updated with the policy, or alone while the policy is not
    updated.
    """

    def __init__(
        self,
        plan: Plan,
        trainer: TrainEngine,
        critic: CriticEngine | None,
        report: UpdateReport,
        tracer: Tracer,
        *,
        critic_warmup: int,
        max_skipped: int,
        traced_steps: Collection[int],
    ) -> None:
        """Begin without updates.

        critic_warmup: first steps in which only the critic is updated. max_skipped: see
        RecentUpdates.require_progress. traced_steps: steps whose first update is traced.
        """
        self._plan, self._trainer, self._critic, self._report, self._tracer = plan, trainer, critic, report, tracer
        self._critic_warmup, self._max_skipped, self._traced_steps = critic_warmup, max_skipped, traced_steps
        self._recent: dict[ModelName, RecentUpdates] = {"actor": RecentUpdates(), "critic": RecentUpdates()}

    def update(self, step: int, groups: Sequence[TrainGroup], outputs: GroupOutputs) -> Metrics:
        """Make all updates of a step, and return their metrics, merged.

        outputs: receives, for the groups whose indices are its keys, what the first update with
        each of them computes.
        Raises: NotFiniteError if too many updates are skipped.
        """
        metrics: Metrics = {}
        for name, model, plan in self._updated(step):
            skipped: set[int] = set()  # first groups of the minibatches skipped in this step
            batches = minibatches(groups, plan.prompts_per_update, plan.epochs_per_step)
            with self._report.phase(f"update_{name}", total=plan.updates_per_step) as advance:
                for number, (first, minibatch) in enumerate(batches, start=1):
                    missing = (index - first for index, output in outputs.items() if output is None)
                    own: GroupOutputs = {index: None for index in missing if 0 <= index < len(minibatch)}
                    with self._traced(step, name, number):
                        update = dict(model.step(minibatch, own))
                    outputs.update({first + index: output for index, output in own.items()})
                    self._note(step, name, number, minibatch, update, is_repeated=first in skipped)
                    if update.pop(SKIPPED_GRAD_NORM, None) is not None:  # no number for a curve
                        skipped.add(first)
                    metrics = merge(metrics, update)
                    advance(1)
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint, as JSON. Read by load_state."""
        return {f"recent_{name}_grad_norms": list(recent.norms) for name, recent in self._recent.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the updates of a saved run."""
        for name in self._recent:
            self._recent[name] = RecentUpdates(tuple(state[f"recent_{name}_grad_norms"]))

    def _updated(self, step: int) -> Iterator[tuple[ModelName, TrainedModel, ModelPlan]]:
        """Yield the models that a step updates, in this order, each with its plan."""
        updates_policy = step > self._critic_warmup
        if self._critic is not None and not (updates_policy and isinstance(self._critic, TrunkCriticEngine)):
            yield "critic", self._critic, self._plan.critic
        if updates_policy:
            yield "actor", self._trainer, self._plan

    def _traced(self, step: int, name: ModelName, number: int) -> AbstractContextManager[None]:
        """Return a context that traces an update if it is the first of a step that is traced.

        The update is the policy's, or the critic's in steps that update only the critic.
        """
        traced_model = "critic" if step <= self._critic_warmup else "actor"
        is_traced = number == 1 and step in self._traced_steps and name == traced_model
        return traced(self._tracer, step, f"update {name}") if is_traced else nullcontext()

    def _note(
        self,
        step: int,
        name: ModelName,
        number: int,
        minibatch: Sequence[TrainGroup],
        update: Metrics,
        *,
        is_repeated: bool,
    ) -> None:
        """Add an update to the recent ones, and warn if it was skipped.

        update: its metrics. is_repeated: whether an earlier update of the step from the same
        minibatch was skipped.
        Raises: NotFiniteError if too many are.
        """
        recent = self._recent[name].after(update, limit=self._max_skipped, counted=is_repeated, name=name)
        self._recent[name] = recent
        if SKIPPED_GRAD_NORM not in update:
            return
        cause = describe_skipped(minibatch, update, name=name)
        warning = (
            f"update {number} of step {step} is skipped, since its gradient is not finite ({recent.num_in_a_row} in a "
            f"row): {cause}. The weights are unchanged"
        )
        self._report.warn(warning if name == "actor" else f"critic: {warning}")
        if name == "critic":
            cause = f"{cause}. It was an update of the critic: lower worker.critic.optim.lr"
        elif "critic/vf_loss" in update:
            cause = f"{cause}. It was an update of policy and critic: lower worker.critic.optim.lr too"
        recent.require_progress(cause, limit=self._max_skipped)


def minibatches(
    groups: Sequence[TrainGroup], prompts_per_update: int, epochs: int
) -> Iterator[tuple[int, Sequence[TrainGroup]]]:
    """Yield the groups of each optimizer update, after the index of the first of them.

    Consecutive slices, once for each epoch over the rollouts.
    """
    for _ in range(epochs):
        for start in range(0, len(groups), prompts_per_update):
            yield start, groups[start : start + prompts_per_update]


@dataclass(frozen=True, slots=True)
class RecentUpdates:
    """The last updates that had something to learn from, oldest first.

    norms: the norms of their gradients; None for an update that was skipped because it was not
    finite.
    """

    norms: tuple[float | None, ...] = ()

    def after(self, metrics: Metrics, *, limit: int, counted: bool = False, name: ModelName = "actor") -> RecentUpdates:
        """Return this with one more update.

        metrics: the metrics of the update. limit: max_skipped_updates. counted: an earlier update
        of the step from the same minibatch was skipped; if this one is too, it is not counted.
        name: the model that was updated.
        """
        if metrics[f"{name}/nonfinite_updates"].value > 0:
            if counted:
                return self
            latest = None
        elif metrics[f"{name}/skipped_updates"].value > 0:  # nothing to learn from
            return self
        else:
            latest = metrics[f"{name}/grad_norm"].value
        return RecentUpdates((*self.norms, latest)[-max(WINDOW, limit) :])

    @property
    def num_in_a_row(self) -> int:
        """How many updates in a row were skipped, up to the last one."""
        made = [index for index, norm in enumerate(self.norms) if norm is not None]
        return len(self.norms) - (made[-1] + 1 if made else 0)

    @property
    def num_in_window(self) -> int:
        """How many of the last WINDOW updates were skipped."""
        return self.norms[-WINDOW:].count(None)

    def require_progress(self, cause: str, *, limit: int) -> None:
        """Raise NotFiniteError if too many updates were skipped.

        cause: why the last one was skipped; see describe_skipped. limit: how many skipped updates
        in a row end the run; 0: neither these nor their share end it.
        """
        if limit == 0:
            return
        if self.num_in_a_row >= limit:
            problem = (
                f"the gradients of {self.num_in_a_row} updates in a row are not finite, and these updates were skipped "
                f"(trainer.max_skipped_updates={limit})"
            )
        elif self.num_in_window > WINDOW // 2:
            problem = (
                f"the gradients of {self.num_in_window} of the last {WINDOW} updates are not finite, and these updates "
                "were skipped; at most half may be (trainer.max_skipped_updates=0 turns this off)"
            )
        else:
            return
        norms = ", ".join("skipped" if norm is None else f"{norm:.3g}" for norm in self.norms[-NUM_NORMS:])
        raise NotFiniteError(f"{problem}. The last one: {cause}. Gradient norms of the last updates: {norms}")


def describe_skipped(groups: Sequence[TrainGroup], metrics: Metrics, *, name: ModelName = "actor") -> str:
    """Return what was not finite in an update that was skipped, as the end of a sentence.

    groups: the groups of the update. metrics: its metrics. name: the model that was updated.
    """
    inputs = [
        f"{count:,} of {total:,} {name}"
        for name, tensors in _inputs(groups)
        if (count := sum(int((~tensor.isfinite()).sum()) for tensor in tensors))
        for total in [sum(tensor.numel() for tensor in tensors)]
    ]
    losses = [key for key in sorted(metrics) if not (key.endswith("grad_norm") or math.isfinite(metrics[key].value))]
    if inputs:
        cause = f"not finite are {', '.join(inputs)}"
    elif losses:
        cause = "its advantages and given log-probabilities are finite; the policy's outputs are not"
    else:
        cause = "the loss and everything in it are finite; the backward pass overflowed"
    if losses:
        cause += f"; metrics that are not finite: {', '.join(losses)}"
    largest = max((float(tensor.abs().max()) for tensor in dict(_inputs(groups))["advantages"]), default=0.0)
    norm, rate = metrics[SKIPPED_GRAD_NORM].value, metrics[f"{name}/lr"].value
    return f"gradient norm {norm:g}, learning rate {rate:g}, largest |advantage| {largest:.3g}; {cause}"


def policy_version(step: int, critic_warmup: int) -> int:
    """Return the version of the policy's weights after a step: how many steps have updated them."""
    return max(0, step - critic_warmup)


def describe_continuation(last: Path | None, same_command: SameCommand) -> str:
    """Return what to do after a NotFiniteError.

    last: the newest checkpoint, if there is one. same_command: the command that continues the run.
    """
    page = "see docs/troubleshooting.md (Training has diverged)"
    if last is None:
        return (
            "No checkpoint was saved before. Start again with a lower worker.actor.optim.lr, or, if no update was made "
            f"before, with another model or dtype; {page}"
        )
    lower = (
        "continues from it with a lower worker.actor.optim.lr and trainer.accept_changes=worker.actor.optim.lr. If it "
        f"ends in the same way, continue from an earlier one with trainer.load_checkpoint_path="
        f"{last.parent / 'global_step_...'}"
    )
    return (
        f"This state is not saved. The last checkpoint, {last}, holds finite values: "
        f"{same_command.from_checkpoint(last, lower)}; {page}"
    )


def _inputs(groups: Sequence[TrainGroup]) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the inputs of the loss for each trainable token, by name."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    for name, values in (
        ("advantages", [sequence.advantages for sequence in sequences]),
        ("log-probabilities of the rollout engine", [sequence.sampling_logprobs for sequence in sequences]),
        ("log-probabilities before the update", [sequence.old_logprobs for sequence in sequences]),
        ("log-probabilities of the reference", [sequence.ref_logprobs for sequence in sequences]),
        ("values of the critic", [sequence.values for sequence in sequences]),
        ("returns", [sequence.returns for sequence in sequences]),
    ):
        yield (
            name,
            [
                value[sequence.loss_mask > 0]
                for value, sequence in zip(values, sequences, strict=True)
                if value is not None and bool((sequence.loss_mask > 0).any())
            ],
        )
