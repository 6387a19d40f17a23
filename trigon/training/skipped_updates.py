"""Stops a run whose updates are skipped because their gradients are not finite.

One such update can be a rare batch, and is skipped and counted. Many of them mean that nothing is
learned any more: the run then says what was not finite, and ends. With several epochs over the
rollouts of a step a rare batch comes back in each, and counts once. Updates without a trainable
token are skipped too, and do not count here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from trigon.errors import NotFiniteError
from trigon.metrics import Metrics
from trigon.system.resuming import SameCommand
from trigon.types import TrainGroup

WINDOW = 20
"""Number of last updates of which at most half may be skipped."""

UpdatedModel = Literal["actor", "critic"]
"""The model of an update, and the prefix of its metrics."""

NUM_NORMS = 8
"""How many of the last gradient norms a message shows."""


@dataclass(frozen=True, slots=True)
class RecentUpdates:
    """The last updates that had something to learn from, oldest first.

    norms: of their gradients; None for an update that was skipped because it was not finite.
    """

    norms: tuple[float | None, ...] = ()

    def after(
        self, metrics: Metrics, *, limit: int, counted: bool = False, name: UpdatedModel = "actor"
    ) -> RecentUpdates:
        """Return this with one more update.

        metrics: of the update. limit: max_skipped_updates. counted: an earlier update of the step
        from the same minibatch was skipped; if this one is too, it says nothing new.
        name: of the model that was updated.
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
        """How many of the last updates were skipped without one in between that was made."""
        made = [index for index, norm in enumerate(self.norms) if norm is not None]
        return len(self.norms) - (made[-1] + 1 if made else 0)

    @property
    def num_in_window(self) -> int:
        """How many of the last WINDOW updates were skipped."""
        return self.norms[-WINDOW:].count(None)

    def require_progress(self, cause: str, *, limit: int) -> None:
        """Raise NotFiniteError if too many updates were skipped.

        cause: of the last one; see describe_skipped. limit: how many in a row end the run; 0: none
        do, and neither does the share.
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


def describe_skipped(
    groups: Sequence[TrainGroup], metrics: Metrics, *, grad_norm: float, name: UpdatedModel = "actor"
) -> str:
    """Return what was not finite in an update that was skipped, as the end of a sentence.

    groups: that it learned from. metrics: of the update. grad_norm: of its gradient. name: of the
    model that was updated.
    """
    inputs = [
        f"{count:,} of {total:,} {name}"
        for name, tensors in _inputs(groups)
        if (count := sum(int((~tensor.isfinite()).sum()) for tensor in tensors))
        for total in [sum(tensor.numel() for tensor in tensors)]
    ]
    losses = [key for key in sorted(metrics) if not (key.endswith("/grad_norm") or math.isfinite(metrics[key].value))]
    if inputs:
        cause = f"not finite are {', '.join(inputs)}"
    elif losses:
        cause = "its advantages and given log-probabilities are finite; the policy's outputs are not"
    else:
        cause = "the loss and everything in it are finite; the backward pass overflowed"
    if losses:
        cause += f"; metrics that are not finite: {', '.join(losses)}"
    largest = max((float(tensor.abs().max()) for tensor in dict(_inputs(groups))["advantages"]), default=0.0)
    rate = metrics[f"{name}/lr"].value
    return f"gradient norm {grad_norm:g}, learning rate {rate:g}, largest |advantage| {largest:.3g}; {cause}"


def how_to_go_on(last: Path | None, same_command: SameCommand, *, validates_only: bool) -> str:
    """Return what to do after a NotFiniteError.

    last: the newest checkpoint, if there is one. same_command: goes on with the run.
    validates_only: the run makes no updates.
    """
    page = "see docs/troubleshooting.md (Training has diverged)"
    if validates_only:
        return (
            "Nothing was trained: the model's own weights, or those of the checkpoint that is validated, are the "
            "cause. Validate another one (worker.actor.model.model_path, trainer.load_checkpoint_path)"
        )
    if last is None:
        return (
            "No checkpoint was saved before. Start again with a lower worker.actor.optim.lr, or, if no update was made "
            f"before, with another model or dtype; {page}"
        )
    lower = (
        "goes on from it with a lower worker.actor.optim.lr and trainer.accept_changes=worker.actor.optim.lr. If it "
        f"ends in the same way, go on from an earlier one with trainer.load_checkpoint_path="
        f"{last.parent / 'global_step_...'}"
    )
    return (
        f"This state is not saved. The last checkpoint, {last}, holds finite values: "
        f"{same_command.from_checkpoint(last, lower)}; {page}"
    )


def _inputs(groups: Sequence[TrainGroup]) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield what the loss is given for each token, by name, of the tokens that are learned from."""
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
