"""One rank's share of a pass: forward, loss and backward over micro-batches.

Refuses to know optimizers and engines, and of other ranks all but that passes are made together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from trigon.algorithms.importance import Correction, correction_weights, mismatch_metrics
from trigon.algorithms.kl import kl_per_token
from trigon.algorithms.losses import LossSettings, policy_loss
from trigon.algorithms.reduce import Denominators, reduce_loss
from trigon.data.packing import Positions, by_group, pack_rollouts
from trigon.metrics import Max, Mean, Metric, Metrics, Sum, merge
from trigon.models.logprobs import Predictions
from trigon.models.policy import Policy
from trigon.names import KlEstimator, LossAveraging
from trigon.training.parallel import ProcessGroup, passes_in_step
from trigon.types import GroupSpan, MicroBatch, PackedGroups, RolloutGroup, TokenLogprobs

Precision = Callable[[], AbstractContextManager[object]]
"""Makes the context (autocast, or none) in which the policy computes."""

Batch = TypeVar("Batch", MicroBatch, PackedGroups)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Which loss an update minimises: the policy's, plus kl_coefficient times the KL, less entropy_coefficient times
    the entropy, all averaged alike.

    fixed_length: read where averaging is seq_fixed. kl_estimator None: no KL term. correction None: engine and trainer
    are taken to agree.
    """

    policy: LossSettings
    averaging: LossAveraging
    fixed_length: int
    kl_estimator: KlEstimator | None
    kl_coefficient: float
    entropy_coefficient: float
    correction: Correction | None

    @property
    def regularized(self) -> bool:
        """Whether a token without an advantage has a gradient all the same."""
        return self.kl_estimator is not None or self.entropy_coefficient > 0


class Reference(Protocol):
    """A reference policy that is asked pass by pass, where whole distributions are compared."""

    def awake(self) -> AbstractContextManager[None]:
        """Return a context in which it is where it computes."""
        ...

    def predictions(self, packed: PackedGroups, *, run_dummy_vision: bool) -> Predictions:
        """See Policy.predictions."""
        ...


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the same dataclass with its tensors on the device; nested ones too.

    But for pixels, which the policy fetches where it has to see them.
    """
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor) and field.name not in ("pixel_values", "grid_thw"):
            moved[field.name] = value.to(device, non_blocking=True)
        elif isinstance(value, PackedGroups):
            moved[field.name] = to_device(value, device)
    return dataclasses.replace(batch, **moved)


def micro_batch_backward(
    policy: Policy,
    batch: MicroBatch,
    terms: LossTerms,
    denominators: Denominators,
    precision: Precision,
    *,
    reference: Reference | None,
    run_dummy_vision: bool,
    gradient_scale: float,
) -> Metrics:
    """Add this micro-batch's share of the step's gradient, and return its metrics, weighted by its trainable tokens.

    reference: needed where the KL is the full one. touch_vision: as in Policy.forward.
    gradient_scale: by which the gradient, and nothing else, is multiplied.
    """
    against = None if reference is None else reference.predictions(batch.packed, run_dummy_vision=run_dummy_vision)
    with precision():
        said: TokenLogprobs = policy(
            batch.packed,
            run_dummy_vision=run_dummy_vision,
            entropy_gradient=terms.entropy_coefficient > 0,
            against=against,
        )
    logprobs, mask = said.logprobs, batch.loss_mask
    # Where there was no update since sampling, old is what the policy says now: the ratio is exactly 1.
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    surrogate = policy_loss(
        logprobs,
        old,
        torch.where(mask > 0, batch.advantages, torch.zeros_like(mask)),  # else an infinite one makes 0 * inf below
        terms.policy,
        loss_mask=mask,
        sequence_index=batch.sequence_index,
        num_sequences=batch.num_sequences,
    )

    def reduced(per_token: Tensor) -> Tensor:
        return reduce_loss(
            per_token,
            mask,
            batch.sequence_index,
            batch.num_sequences,
            averaging=terms.averaging,
            fixed_length=terms.fixed_length,
            denominators=denominators,
        )

    def per_token_mean(per_token: Tensor) -> Mean:
        chosen = torch.where(mask > 0, per_token.detach(), torch.zeros_like(mask))
        return Mean(float(chosen.sum()), float(mask.sum()))

    per_token_loss = surrogate.loss
    metrics: dict[str, Metric] = {
        "actor/ppo_kl": per_token_mean(old - logprobs),
        "actor/ratio_max": Max(float(torch.where(mask > 0, surrogate.ratio, torch.zeros_like(mask)).max())),
        "actor/entropy": per_token_mean(said.entropy),
    }
    if surrogate.clipped is not None:
        metrics["actor/pg_clipfrac_higher"] = per_token_mean(surrogate.clipped)
    if surrogate.dual_clipped is not None:
        metrics["actor/pg_clipfrac_lower"] = per_token_mean(surrogate.dual_clipped)
    if terms.correction is not None:
        weights, corrected = correction_weights(
            old,
            batch.sampling_logprobs,
            terms.correction,
            loss_mask=mask,
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
        )
        per_token_loss = per_token_loss * weights
        metrics["mismatch/corrected_fraction"] = per_token_mean(corrected)
    loss = reduced(per_token_loss)
    metrics["actor/pg_loss"] = Sum(float(loss.detach()))
    if terms.entropy_coefficient > 0:
        loss = loss - terms.entropy_coefficient * reduced(said.entropy)
    if terms.kl_estimator is not None:
        kl = _kl_of(said, batch, terms.kl_estimator)
        loss = loss + terms.kl_coefficient * reduced(kl)
        metrics["actor/kl_loss"] = per_token_mean(kl)
    torch.autograd.backward(loss * gradient_scale)
    return merge(metrics, mismatch_metrics(batch.sampling_logprobs, old, mask))


def _kl_of(said: TokenLogprobs, batch: MicroBatch, estimator: KlEstimator) -> Tensor:
    if estimator == "full":
        assert said.kl is not None, "the full KL needs the reference's predictions"
        return said.kl
    assert batch.ref_logprobs is not None, "a KL term needs the reference's log-probabilities"
    return kl_per_token(said.logprobs, batch.ref_logprobs, estimator)


def idle_backward(policy: Policy, precision: Precision, *, reference: Reference | None, run_dummy_vision: bool) -> None:
    """Make a pass whose gradient is zero: what a rank without a micro-batch does while others have one."""
    row = _idle_row(policy)
    if reference is not None:
        reference.predictions(row, run_dummy_vision=run_dummy_vision)
    with precision():
        said = policy(row, run_dummy_vision=run_dummy_vision)
    torch.autograd.backward(said.logprobs.sum() * 0.0)


def score_rollouts(
    policy: Policy,
    groups: Sequence[RolloutGroup],
    *,
    max_tokens: int,
    positions: Positions,
    precision: Precision,
    device: torch.device,
    process_group: ProcessGroup,
    against: Reference | None = None,
) -> list[list[Tensor]]:
    """Return the policy's log-probabilities: for each group, for each of its rollouts, float32 [R] on the CPU.

    groups: this rank's own; it may have none. against: return the full KL from this reference instead.
    """
    rows = pack_rollouts(groups, max_tokens=max_tokens, positions=positions)
    passes = passes_in_step([row.packed.pixel_values is not None for row in rows], process_group)
    said: list[Tensor] = []
    with torch.no_grad(), precision():
        for index, run_dummy_vision in enumerate(passes):
            packed = to_device(rows[index].packed if index < len(rows) else _idle_row(policy), device)
            theirs = None if against is None else against.predictions(packed, run_dummy_vision=run_dummy_vision)
            row: TokenLogprobs = policy(packed, run_dummy_vision=run_dummy_vision, against=theirs)
            said.append((row.logprobs if row.kl is None else row.kl).cpu())
    process_group.reshard(policy)
    return by_group(rows, said[: len(rows)])


def _idle_row(policy: Policy) -> PackedGroups:
    """Return the smallest row there is: a prompt of one token and a completion of one token."""
    return PackedGroups(
        token_ids=torch.zeros(2, dtype=torch.int64),
        position_ids=torch.arange(2).expand(3 if policy.family.rope == "mrope" else 1, 2).contiguous(),
        spans=(GroupSpan(prompt=(0, 1), completions=((1, 2),)),),
        pixel_values=None,
        grid_thw=None,
    )
