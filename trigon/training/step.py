"""The plan of an update, and the forward and backward pass of one packed row.

Does not depend on optimizers and engines. It assumes only that all other ranks make the same
passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trigon.algorithms.losses import correction_weights, kl_per_token, mismatch_metrics, policy_loss, value_loss
from trigon.algorithms.reduce import Denominators, ExpertShares, load_balancing_loss, reduce_loss
from trigon.algorithms.unread import Unread, UnreadMetrics
from trigon.config.names import KlEstimator
from trigon.config.schema import Config, CriticConfig
from trigon.data.packing import Positions, pack_train
from trigon.metrics import Max, Mean, Sum
from trigon.models import transfer
from trigon.models.logprobs import Predictions
from trigon.models.policy import Policy
from trigon.models.value import ActorCritic
from trigon.training.parallel import ProcessGroup, passes_in_step
from trigon.training.train_groups import has_gradient
from trigon.types import GroupSpan, MicroBatch, PackedGroups, TokenLogprobs, TrainGroup, has_media

ROUTER_LOSS = "actor/router_aux_loss"
"""The metric of the load-balancing loss."""

Precision = Callable[[], AbstractContextManager[object]]
"""Returns the context in which the policy computes: autocast, or nullcontext."""


class Reference(Protocol):
    """A reference policy for the full KL, which needs its distributions in every pass."""

    def awake(self) -> AbstractContextManager[None]:
        """Return a context inside which the weights are on the device."""
        ...

    def predictions(self, packed: PackedGroups, *, run_dummy_vision: bool) -> Predictions:
        """See Policy.predictions."""
        ...


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return a micro-batch with the inputs of its loss on the device, without waiting for a GPU.

    Its packed row stays on the CPU: the policy copies what it needs.
    """
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = transfer.to_device(value, device)
    return dataclasses.replace(batch, **moved)


class PolicyLoss:
    """The loss of a policy over the packed rows of an update.

    It is the policy loss + kl_coef * KL - entropy_coeff * entropy + router_aux_loss_coef * the
    load-balancing loss of the experts. A critic on the policy's trunk adds its loss, whose gradient
    reaches the trunk times vf_coef, and its head whole.

    is_regularized: whether a token whose advantage is zero can have a gradient. balances_experts:
    whether the loss has the load-balancing loss.
    """

    def __init__(self, policy: Policy, config: Config, precision: Precision, *, reference: Reference | None) -> None:
        """reference: the reference of the full KL; None if the loss has no full KL."""
        self._policy, self._config, self._precision, self._reference = policy, config, precision, reference
        self.is_regularized = config.learns_without_advantage
        self.balances_experts = config.worker.actor.router_aux_loss_coef > 0

    def awake(self) -> AbstractContextManager[None]:
        """Return a context inside which the reference's weights are on the device."""
        return nullcontext() if self._reference is None else self._reference.awake()

    def backward(
        self,
        batch: MicroBatch,
        denominators: Denominators,
        *,
        run_dummy_vision: bool,
        gradient_scale: float,
        shares: ExpertShares | None = None,
        recorded: list[Tensor] | None = None,
    ) -> UnreadMetrics:
        """Add the gradient of one micro-batch to the parameters, and return its metrics.

        Nothing here makes the host wait for a GPU, so that it prepares the next micro-batch, its
        images included, while the GPU computes this one.

        Means are weighted by the trainable tokens; "actor/pg_loss" is this micro-batch's summand of
        the update's loss.

        Args:
            denominators: trainable tokens and sequences of the whole update, over all ranks.
            run_dummy_vision: see Policy.forward.
            gradient_scale: factor of the gradient; the metrics are not scaled.
            shares: the shares of the experts in the whole update, on the device; None without the
                load-balancing loss.
            recorded: the log-probabilities and the entropies are appended to it, float32 [2, S] on
                the CPU, which a GPU writes later.
        """
        against = None
        if self._reference is not None:
            against = self._reference.predictions(batch.packed, run_dummy_vision=run_dummy_vision)
        outputs, values = self._pass(batch.packed, run_dummy_vision, against, router_load=shares is not None)
        if recorded is not None:
            stacked = torch.stack([outputs.logprobs.detach().float(), outputs.entropy.detach().float()])
            recorded.append(stacked.to("cpu", non_blocking=True))  # into pinned memory
        # Without an update since sampling, old and current log-probabilities are equal: the ratio
        # is exactly 1.
        old = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        loss, metrics = _total_loss(outputs, old, batch, self._config, denominators)
        if shares is not None:
            assert outputs.router_probabilities is not None
            balance = load_balancing_loss(outputs.router_probabilities, shares)
            loss = loss + self._config.worker.actor.router_aux_loss_coef * balance
            metrics[ROUTER_LOSS] = Unread(Sum, (balance.detach(),))
        if values is not None:
            of_values, value_metrics = reduced_value_loss(values, batch, self._config.worker.critic, denominators)
            loss, metrics = loss + of_values, metrics | value_metrics
        torch.autograd.backward(loss * gradient_scale)
        return metrics | mismatch_metrics(batch.sampling_logprobs, old, batch.trainable)

    def idle_backward(self, *, run_dummy_vision: bool) -> None:
        """Make a pass whose gradient is zero, for a rank with fewer micro-batches than another."""
        row = idle_row(self._policy)
        if self._reference is not None:
            self._reference.predictions(row, run_dummy_vision=run_dummy_vision)
        outputs, values = self._pass(row, run_dummy_vision, None)
        total = outputs.logprobs.sum() if values is None else outputs.logprobs.sum() + values.sum()
        torch.autograd.backward(total * 0.0)

    def _pass(
        self,
        packed: PackedGroups,
        run_dummy_vision: bool,
        against: Predictions | None,
        *,
        router_load: bool = False,
    ) -> tuple[TokenLogprobs, Tensor | None]:
        """Return the outputs of a row, and its values if the loss has a value term."""
        policy, config = self._policy, self._config
        entropy_gradient = config.worker.actor.entropy_coeff > 0
        with self._precision():
            if not config.shares_trunk:
                outputs: TokenLogprobs = policy(
                    packed,
                    run_dummy_vision=run_dummy_vision,
                    entropy_gradient=entropy_gradient,
                    against=against,
                    router_load=router_load,
                )
                return outputs, None
            assert isinstance(policy, ActorCritic), "the value loss needs a value head"
            return policy.with_values(
                packed,
                run_dummy_vision=run_dummy_vision,
                entropy_gradient=entropy_gradient,
                against=against,
                trunk_gradient=config.worker.critic.vf_coef,
                router_load=router_load,
            )


class ValueLoss:
    """The loss of a critic over the packed rows of an update. As PolicyLoss."""

    is_regularized = True  # every value has a gradient
    balances_experts = False

    def __init__(
        self, policy: Policy, config: Config, precision: Precision, *, values: Callable[[PackedGroups, bool], Tensor]
    ) -> None:
        """Compute the loss of these values of rows: [S] with gradient. policy: the model.

        values: gets a row, and whether the vision tower runs if it has no images.
        """
        self._policy, self._critic, self._precision, self._values = policy, config.worker.critic, precision, values

    def awake(self) -> AbstractContextManager[None]:
        """See PolicyLoss."""
        return nullcontext()

    def backward(
        self,
        batch: MicroBatch,
        denominators: Denominators,
        *,
        run_dummy_vision: bool,
        gradient_scale: float,
        shares: ExpertShares | None = None,
        recorded: list[Tensor] | None = None,
    ) -> UnreadMetrics:
        """See PolicyLoss."""
        assert shares is None, "the loss of a critic does not balance experts"
        assert recorded is None, "a critic computes no log-probabilities"
        with self._precision():
            values = self._values(batch.packed, run_dummy_vision)
        loss, metrics = reduced_value_loss(values, batch, self._critic, denominators)
        torch.autograd.backward(loss * gradient_scale)
        return metrics

    def idle_backward(self, *, run_dummy_vision: bool) -> None:
        """See PolicyLoss."""
        with self._precision():
            values = self._values(idle_row(self._policy), run_dummy_vision)
        torch.autograd.backward(values.sum() * 0.0)


def _total_loss(
    outputs: TokenLogprobs, old: Tensor, batch: MicroBatch, config: Config, denominators: Denominators
) -> tuple[Tensor, dict[str, Unread]]:
    """Return this micro-batch's summand of the update's loss, with gradient, and its metrics.

    old: [S] log-probabilities before the update, without gradient.
    """
    actor, algorithm = config.worker.actor, config.algorithm
    mask, count = batch.loss_mask, float(len(batch.trainable))
    surrogate = policy_loss(
        outputs.logprobs,
        old,
        # A masked advantage may be infinite, and 0 * inf would be nan.
        torch.where(mask > 0, batch.advantages, torch.zeros_like(mask)),
        actor,
        loss_mask=mask,
        sequence_index=batch.sequence_index,
        num_sequences=batch.num_sequences,
    )
    per_token_loss = surrogate.loss
    metrics: dict[str, Unread] = {
        "actor/ppo_kl": _token_mean(old - outputs.logprobs, mask, count),
        "actor/ratio_max": Unread(Max, (torch.where(mask > 0, surrogate.ratio, torch.zeros_like(mask)).max(),)),
        "actor/entropy": _token_mean(outputs.entropy, mask, count),
    }
    if surrogate.clipped is not None:
        metrics["actor/pg_clipfrac_higher"] = _token_mean(surrogate.clipped, mask, count)
    if surrogate.dual_clipped is not None:
        metrics["actor/pg_clipfrac_lower"] = _token_mean(surrogate.dual_clipped, mask, count)
    if config.mismatch_correction != "off":
        weights, corrected = correction_weights(
            old,
            batch.sampling_logprobs,
            config.mismatch_correction,
            algorithm,
            loss_mask=mask,
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
        )
        per_token_loss = per_token_loss * weights
        metrics["mismatch/corrected_fraction"] = _token_mean(corrected, mask, count)
    loss = _reduce(per_token_loss, batch, config, denominators)
    metrics["actor/pg_loss"] = Unread(Sum, (loss.detach(),))
    if actor.entropy_coeff > 0:
        loss = loss - actor.entropy_coeff * _reduce(outputs.entropy, batch, config, denominators)
    if algorithm.kl_in_loss is not None:
        kl = _kl_of(outputs, batch, algorithm.kl_in_loss)
        loss = loss + algorithm.kl_coef * _reduce(kl, batch, config, denominators)
        metrics["actor/kl_loss"] = _token_mean(kl, mask, count)
    return loss, metrics


def _reduce(per_token: Tensor, batch: MicroBatch, config: Config, denominators: Denominators) -> Tensor:
    """Return this micro-batch's summand of a per-token value's average over the update."""
    return reduce_loss(
        per_token,
        batch.loss_mask,
        batch.sequence_index,
        batch.num_sequences,
        averaging=config.worker.actor.loss_avg_mode,
        fixed_length=config.loss_fixed_length,
        denominators=denominators,
    )


def reduced_value_loss(
    values: Tensor, batch: MicroBatch, critic: CriticConfig, denominators: Denominators
) -> tuple[Tensor, dict[str, Unread]]:
    """Return this micro-batch's summand of the update's value loss, with gradient, and its metrics.

    values: [S] float32, with gradient. denominators: see PolicyLoss.backward.
    """
    assert batch.values is not None, "the loss of a critic needs its values before the update"
    assert batch.returns is not None, "a critic learns from returns"
    mask, count = batch.loss_mask, float(len(batch.trainable))
    per_token, clipped = value_loss(values, batch.values, batch.returns, clip=critic.cliprange_value)
    loss = reduce_loss(
        per_token,
        mask,
        batch.sequence_index,
        batch.num_sequences,
        averaging=critic.loss_avg_mode,
        fixed_length=1,  # only for seq_fixed, which a critic does not have
        denominators=denominators,
    )
    return loss, {
        "critic/vf_loss": Unread(Sum, (loss.detach(),)),
        "critic/vf_clipfrac": _token_mean(clipped, mask, count),
        "critic/vpred_mean": _token_mean(values, mask, count),
    }


def _token_mean(per_token: Tensor, mask: Tensor, count: float) -> Unread:
    """Return the mean over the trainable tokens, weighted by their number."""
    unmasked = torch.where(mask > 0, per_token.detach(), torch.zeros_like(mask))
    return Unread(Mean, (unmasked.sum(), count))


def _kl_of(outputs: TokenLogprobs, batch: MicroBatch, estimator: KlEstimator) -> Tensor:
    """Return the KL of each token from the reference, with gradient."""
    if estimator == "full":
        assert outputs.kl is not None, "the full KL needs the reference's predictions"
        return outputs.kl
    assert batch.ref_logprobs is not None, "a KL term needs the reference's log-probabilities"
    return kl_per_token(outputs.logprobs, batch.ref_logprobs, estimator)


def idle_row(policy: Policy) -> PackedGroups:
    """Return the smallest possible row: a prompt of one token and a completion of one token."""
    return PackedGroups(
        token_ids=torch.zeros(2, dtype=torch.int64),
        position_ids=torch.arange(2).expand(3 if policy.family.rope == "mrope" else 1, 2).contiguous(),
        spans=(GroupSpan(prompt=(0, 1), completions=((1, 2),)),),
    )


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The passes of one update on this rank.

    with_gradient: the groups that have a gradient. batches: these groups, packed.
    indices: the indices of these groups among all groups of the update on this rank.
    denominators: the denominators of the update, over all ranks.
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

    regularized: see has_gradient. max_tokens: token budget of a packed row.
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
