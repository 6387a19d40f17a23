"""The passes of one optimizer update on a rank, and what the optimizer did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trigon.algorithms.reduce import Denominators
from trigon.data.packing import Positions, pack_train
from trigon.training.parallel import ProcessGroup, passes_in_step
from trigon.types import MicroBatch, TrainGroup, has_media


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The passes of one update on this rank.

    with_gradient: the groups that have a gradient. batches: these groups, packed.
    indices: of these groups among those of the update on this rank.
    denominators: of the update, over all ranks.
    passes: for each pass that all ranks make together, whether the vision tower runs; see
    passes_in_step. At least as many as batches.
    """

    with_gradient: list[TrainGroup]
    indices: list[int]
    batches: list[MicroBatch]
    denominators: Denominators
    passes: tuple[bool, ...]

    def syncs_gradients(self, index: int) -> bool:
        """Return whether gradients are reduced over all ranks after a pass.

        After the last pass is enough if all passes reach the same parameters, which is not so if
        only some of them run the vision tower.
        """
        return index == len(self.passes) - 1 or len(set(self.passes)) > 1


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """What the optimizer did.

    grad_norm: before clipping. is_finite: whether grad_norm is. is_applied: False if the update was
    skipped.
    """

    learning_rate: float
    grad_norm: float
    is_finite: bool
    is_applied: bool


def has_gradient(group: TrainGroup, *, regularized: bool) -> bool:
    """Return whether any trainable token of the group can have a gradient.

    regularized: see Config.learns_without_advantage. If False, only tokens whose advantage is not
    zero have a gradient.
    """
    return regularized or any(bool(((part.loss_mask > 0) & (part.advantages != 0)).any()) for part in group.sequences)


def plan_update(
    groups: Sequence[TrainGroup],
    denominators: Denominators,
    *,
    regularized: bool,
    max_tokens: int,
    positions: Positions,
    process_group: ProcessGroup,
) -> UpdatePlan:
    """Pack this rank's groups, and agree with the other ranks on the number of passes.

    regularized: see has_gradient. max_tokens: of a packed row.
    """
    indices = [index for index, group in enumerate(groups) if has_gradient(group, regularized=regularized)]
    with_gradient = [groups[index] for index in indices]
    batches = pack_train(with_gradient, max_tokens=max_tokens, positions=positions)
    shows_image = [bool(batch.packed.visions) for batch in batches]
    if len(with_gradient) < len(groups):
        # AdamW treats a gradient of zero and no gradient differently: with the former the
        # moments still move the parameter. If all groups of a kind are left out, one idle pass
        # gives the same parameters a gradient.
        had_image = any(has_media(group) for group in groups)
        if not batches or (had_image and not any(shows_image)):
            shows_image.append(had_image)
    return UpdatePlan(
        with_gradient=with_gradient,
        indices=indices,
        batches=batches,
        denominators=denominators,
        passes=passes_in_step(shows_image, process_group),
    )
