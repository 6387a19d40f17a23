"""One rank's share of a pass: forward, loss and backward over micro-batches.

Refuses to know optimizers and engines, and of other ranks all but that passes are made together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from trigon.algorithms.importance import mismatch_metrics
from trigon.algorithms.kl import KlEstimator, kl_per_token
from trigon.algorithms.losses import clipped_policy_loss
from trigon.algorithms.reduce import Averaging, Denominators, reduce_loss
from trigon.data.packing import Positions, by_group, pack_rollouts
from trigon.metrics import Max, Mean, Metric, Metrics, Sum, merge
from trigon.models.policy import Policy
from trigon.training.parallel import Ranks, passes_in_step
from trigon.types import GroupSpan, MicroBatch, PackedGroups, RolloutGroup

Precision = Callable[[], AbstractContextManager[object]]
"""Makes the context (autocast, or none) in which the policy computes."""

Batch = TypeVar("Batch", MicroBatch, PackedGroups)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Which loss an update minimises. kl_estimator None: no KL term."""

    clip_low: float
    clip_high: float
    clip_dual: float
    averaging: Averaging
    kl_estimator: KlEstimator | None
    kl_coefficient: float


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the same dataclass with its tensors on the device; nested ones too."""
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
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
    touch_vision: bool,
    gradient_scale: float,
) -> Metrics:
    """Add this micro-batch's share of the step's gradient, and return its metrics, weighted by its trainable tokens.

    touch_vision: as in Policy.forward. gradient_scale: by which the gradient, and nothing else, is multiplied.
    """
    with precision():
        said = policy(batch.packed, touch_vision=touch_vision)
    logprobs, mask = said.logprobs, batch.loss_mask
    # Where the policy cannot have changed since sampling, old is what it says now: the ratio is exactly 1.
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    policy_loss = clipped_policy_loss(
        logprobs,
        old,
        torch.where(mask > 0, batch.advantages, torch.zeros_like(mask)),  # else an infinite one makes 0 * inf below
        clip_low=terms.clip_low,
        clip_high=terms.clip_high,
        clip_dual=terms.clip_dual,
    )

    def reduced(per_token: Tensor) -> Tensor:
        return reduce_loss(
            per_token,
            mask,
            batch.sequence_index,
            batch.num_sequences,
            averaging=terms.averaging,
            denominators=denominators,
        )

    def per_token_mean(per_token: Tensor) -> Mean:
        chosen = torch.where(mask > 0, per_token.detach(), torch.zeros_like(mask))
        return Mean(float(chosen.sum()), float(mask.sum()))

    loss = reduced(policy_loss.loss)
    metrics: dict[str, Metric] = {
        "actor/pg_loss": Sum(float(loss.detach())),
        "actor/pg_clipfrac_higher": per_token_mean(policy_loss.clipped),
        "actor/pg_clipfrac_lower": per_token_mean(policy_loss.dual_clipped),
        "actor/ppo_kl": per_token_mean(old - logprobs),
        "actor/ratio_max": Max(float(torch.where(mask > 0, policy_loss.ratio, torch.zeros_like(mask)).max())),
        "actor/entropy": per_token_mean(said.entropy),
    }
    if terms.kl_estimator is not None:
        assert batch.ref_logprobs is not None, "a KL term needs the reference's log-probabilities"
        kl = kl_per_token(logprobs, batch.ref_logprobs, terms.kl_estimator)
        loss = loss + terms.kl_coefficient * reduced(kl)
        metrics["actor/kl_loss"] = per_token_mean(kl)
    torch.autograd.backward(loss * gradient_scale)
    if batch.old_logprobs is None:
        return merge(metrics, mismatch_metrics(batch.sampling_logprobs, logprobs, mask))
    return metrics


def idle_backward(policy: Policy, precision: Precision, *, touch_vision: bool) -> None:
    """Make a pass whose gradient is zero: what a rank without a micro-batch does while others have one."""
    with precision():
        said = policy(_idle_row(policy), touch_vision=touch_vision)
    torch.autograd.backward(said.logprobs.sum() * 0.0)


def score_rollouts(
    policy: Policy,
    groups: Sequence[RolloutGroup],
    *,
    max_tokens: int,
    positions: Positions,
    precision: Precision,
    device: torch.device,
    ranks: Ranks,
) -> list[list[Tensor]]:
    """Return the policy's log-probabilities: for each group, for each of its rollouts, float32 [R] on the CPU.

    groups: this rank's own; it may have none.
    """
    rows = pack_rollouts(groups, max_tokens=max_tokens, positions=positions)
    passes = passes_in_step([row.packed.pixel_values is not None for row in rows], ranks)
    said: list[Tensor] = []
    with torch.no_grad(), precision():
        for index, touch_vision in enumerate(passes):
            packed = rows[index].packed if index < len(rows) else _idle_row(policy)
            said.append(policy(to_device(packed, device), touch_vision=touch_vision).logprobs.cpu())
    ranks.after_pass(policy)
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
