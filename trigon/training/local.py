"""The train engine of one process on one device: alone, or one rank of several.

An update passes through LocalTrainEngine.step and, for each packed row, PolicyLoss.backward
(step.py). Does not depend on Ray and vLLM; other ranks are reached through the process group only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from trigon.algorithms.reduce import Denominators, ExpertShares, count_denominators, expert_shares
from trigon.algorithms.unread import UnreadMetrics, read_metrics
from trigon.config.plan import ModelPlan
from trigon.config.schema import Config, TrainedConfig
from trigon.data.packing import by_owner, pack_train, tokens_of
from trigon.errors import ModelError, NotFiniteError
from trigon.metrics import Max, Mean, Metric, Metrics, Sum
from trigon.models.features import VisionFeatureCache
from trigon.models.policy import Policy, full_tensor
from trigon.training import checkpointing
from trigon.training.checkpointing import require_finite
from trigon.training.device_memory import Placement, free_cached_memory
from trigon.training.optim import Schedule, make_optimizer, move_states, on_this_rank, state_bytes, update_bytes
from trigon.training.protocol import SKIPPED_GRAD_NORM, GroupOutputs, LoadPixels, ModelName
from trigon.training.scorer import LocalScorer, ReferenceWithoutAdapters
from trigon.training.step import (
    ROUTER_LOSS,
    PolicyLoss,
    Reference,
    UpdatePlan,
    ValueLoss,
    idle_row,
    plan_update,
    to_device,
)
from trigon.training.train_groups import has_gradient
from trigon.types import NO_RECORD, LocalWeights, NamedTensors, RolloutGroup, TokenLogprobs, TrainGroup

_OF_EACH_RANK = ("actor/vision_cached_fraction", "critic/vision_cached_fraction")
"""The metrics that differ between the ranks that compute rows together."""


class Trained:
    """What one optimizer trains: a module, its learning rates, and the updates made so far.

    name: prefix of its metrics. loss_key: the metric of its loss. updates: number of updates made,
    without skipped ones.
    """

    def __init__(self, name: ModelName, module: nn.Module, section: TrainedConfig, plan: ModelPlan) -> None:
        """Make the optimizer of a module that is on its device, or sharded over the ranks."""
        self.name, self.module = name, module
        self.loss_key = "actor/pg_loss" if name == "actor" else "critic/vf_loss"
        self.updates = 0
        self.optimizer = make_optimizer(module.parameters(), section.optim)
        self._max_grad_norm = section.max_grad_norm
        self._schedule = Schedule(section.optim, plan.warmup_updates, plan.total_updates)

    def clip_gradients(self) -> Tensor:
        """Clip the gradients, and return their norm before."""
        return full_tensor(nn.utils.clip_grad_norm_(self.module.parameters(), self._max_grad_norm))

    def set_learning_rate(self) -> float:
        """Set and return the learning rate of the next update."""
        rate = self._schedule.learning_rate(self.updates + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def update(self) -> None:
        """Make an update from the gradients."""
        self.optimizer.step()
        self.updates += 1


class LocalTrainEngine:
    """The train engine of one process. Satisfies TrainEngine.

    Its token budgets can be measured and set.

    All ranks of the process group call every method together, each with its own groups.
    """

    name: ModelName = "actor"

    def __init__(
        self,
        policy: Policy,
        config: Config,
        plan: ModelPlan,
        placement: Placement,
        *,
        reference: LocalScorer | None = None,
        features: VisionFeatureCache | None = None,
        load_pixels: LoadPixels = list,
    ) -> None:
        """Make the optimizer of a policy that is on its device, or sharded over the ranks.

        With trainer.val_only it makes no update, and only weights are loaded from a checkpoint.

        Args:
            plan: the updates of this model.
            reference: the reference of the full KL; None with LoRA, where it is the policy without
                its adapters, and if there is no full KL.
            features: cache for a frozen vision tower; see Policy.use_feature_cache.
            load_pixels: processes the media of groups that are encoded files.
        """
        self.policy = policy
        self.features = features
        self._config = config
        self._update_max_tokens = plan.tokens_per_update_pass
        self._placement = placement
        self._device = placement.device
        self._process_group = placement.process_group
        self._load_pixels = load_pixels
        self._section = config.worker.actor if self.name == "actor" else config.critic
        self._trained = Trained(self.name, self._module, self._section, plan)
        # What the gradients of one backward pass update: the policy, and a head on its trunk.
        self._updated = [self._trained]
        # Which weights may have changed since the last weight sync that found them finite.
        self._unchecked: Literal["all", "trainable", "none"] = "all"
        self._scorer = LocalScorer(
            policy,
            replace(placement, offload_params=False),  # weights() offloads the policy
            max_tokens=plan.tokens_per_experience_pass,
            features=features,
            load_pixels=load_pixels,
        )
        self._positions = self._scorer.positions
        self._reference: Reference | None = reference or (
            self.reference_without_adapters() if policy.has_adapters else None
        )
        self._loss = self._make_loss()

    def _make_loss(self) -> PolicyLoss | ValueLoss:
        """Return the loss that updates minimize."""
        reference = self._reference if self._config.algorithm.kl_in_loss == "full" else None
        return PolicyLoss(self.policy, self._config, self._scorer.precision, reference=reference)

    def update_too(self, trained: Trained) -> None:
        """Update this too in each update, from the same backward passes."""
        self._updated.append(trained)

    def reference_without_adapters(self) -> ReferenceWithoutAdapters:
        """Return the reference policy of LoRA: the policy with its adapters disabled."""
        return ReferenceWithoutAdapters(self, self._scorer)

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        self.wake(optimizer=False)
        return self._scorer.logprobs(groups)

    def full_kl(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See TrainEngine."""
        assert self._reference is not None, "the full KL needs a reference"
        self.wake(optimizer=False)
        return self._scorer.full_kl(groups, self._reference)

    def step(self, groups: Sequence[TrainGroup], outputs: GroupOutputs | None = None) -> Metrics:
        """See TrainedModel. Merged over all ranks, the metrics describe the update.

        The gradient is the sum over the micro-batches of all ranks; each of them divides by the
        token and sequence counts of the whole update.
        """
        if self._unchecked == "none":
            self._unchecked = "trainable"
        learned = (group for group in groups if has_gradient(group, regularized=self._loss.is_regularized))
        explained = self._placement.explain_out_of_memory("update", learned, max_tokens=self._update_max_tokens)
        with explained, self._loss.awake():
            self.wake(optimizer=True)
            groups = self._load_pixels(groups)
            plan = plan_update(
                groups,
                self._denominators(groups),
                regularized=self._loss.is_regularized,
                max_tokens=self._update_max_tokens,
                positions=self._positions,
                process_group=self._process_group,
            )
            recorded: list[Tensor] | None = [] if outputs else None
            shares = self._count_expert_shares(plan)
            unread: list[UnreadMetrics] = []
            for index, run_dummy_vision in enumerate(plan.passes):
                self._process_group.before_forward(self.policy, sync_gradients=plan.syncs_gradients(index))
                if index >= len(plan.batches):  # other ranks have more micro-batches
                    self._loss.idle_backward(run_dummy_vision=run_dummy_vision)
                    continue
                unread.append(
                    self._loss.backward(
                        to_device(plan.batches[index], self._device),
                        plan.denominators,
                        run_dummy_vision=run_dummy_vision,
                        gradient_scale=float(self._process_group.size),  # FSDP averages gradients over the ranks
                        shares=shares,
                        recorded=recorded,
                    )
                )
            metrics = self._apply_update(plan, unread)
            metrics |= self._reduce_losses(metrics)
            metrics |= self._describe_plan(plan, num_groups=len(groups))
            if not self._counts_row:
                metrics = {key: metrics[key] for key in _OF_EACH_RANK if key in metrics}
            if outputs and recorded is not None:  # read_metrics has waited for their copies
                outputs.update(outputs_by_group(plan, recorded, indices=outputs))
            return metrics

    def _count_expert_shares(self, plan: UpdatePlan) -> ExpertShares | None:
        """Return the shares of the experts in an update; None without a load-balancing loss.

        They depend on all micro-batches, and are needed before the first backward: passes without
        gradient count them.
        """
        if not self._loss.balances_experts:
            return None
        policy = self.policy
        totals = torch.zeros(policy.num_experts)
        with torch.no_grad(), self._scorer.precision():
            for index, run_dummy_vision in enumerate(plan.passes):
                is_idle = index >= len(plan.batches)
                row = idle_row(policy) if is_idle else plan.batches[index].packed
                counted = policy.router_assignments(row, run_dummy_vision=run_dummy_vision)
                if self._counts_row and not is_idle:
                    totals = totals.to(counted.device) + counted
        self._process_group.reshard(policy)
        assignments = self._process_group.all_reduce_sum(totals.tolist())
        shares = expert_shares(assignments, experts_per_token=policy.experts_per_token)
        return replace(shares, fractions=shares.fractions.to(self._device))

    def _denominators(self, groups: Sequence[TrainGroup]) -> Denominators:
        """Return the trainable tokens and sequences of the update, over all ranks."""
        local = count_denominators(sequence.loss_mask for group in groups for sequence in group.sequences)
        own = float(self._counts_row)
        tokens, sequences = self._process_group.all_reduce_sum([own * local.tokens, own * local.sequences])
        return Denominators(int(tokens), int(sequences))

    def _apply_update(self, plan: UpdatePlan, unread: Sequence[UnreadMetrics]) -> dict[str, Metric]:
        """Clip the gradients, apply them unless the update is skipped, and free them.

        Returns the metrics of the micro-batches, merged, and of the gradients. They are read from
        the device together: the one time that an update waits for it.
        """
        metrics, norms = read_metrics(unread, *[trained.clip_gradients() for trained in self._updated])
        is_finite = all(norm < float("inf") for norm in norms)  # False for nan as well
        # Without a trainable token the moments alone would move the parameters.
        is_applied = is_finite and plan.denominators.tokens > 0
        for trained, norm in zip(self._updated, norms, strict=True):
            metrics[f"{trained.name}/grad_norm"] = Mean(norm) if is_finite else Mean(0.0, 0.0)
            metrics[f"{trained.name}/lr"] = Mean(trained.set_learning_rate())
            if is_applied:
                trained.update()
        self._free_gradients()
        if not is_finite:
            metrics[SKIPPED_GRAD_NORM] = Max(next(norm for norm in norms if not norm < float("inf")))
        is_first = self._process_group.rank == 0
        metrics[f"{self.name}/skipped_updates"] = Sum(float(is_first and not is_applied))
        metrics[f"{self.name}/nonfinite_updates"] = Sum(float(is_first and not is_finite))
        return metrics

    def _free_gradients(self) -> None:
        for trained in self._updated:
            trained.optimizer.zero_grad()

    def _reduce_losses(self, metrics: Metrics) -> dict[str, Metric]:
        """Return the losses of the update. metrics: of this rank's micro-batches, merged."""
        keys = [trained.loss_key for trained in self._updated]
        if self._loss.balances_experts:
            keys.append(ROUTER_LOSS)
        own = [metrics.get(key, Sum(0.0)).value if self._counts_row else 0.0 for key in keys]
        losses = self._process_group.all_reduce_sum(own)
        # The summands of the micro-batches add up to the loss of one update; updates of a step are
        # averaged.
        return {key: Mean(loss) for key, loss in zip(keys, losses, strict=True)}

    def _describe_plan(self, plan: UpdatePlan, *, num_groups: int) -> dict[str, Metric]:
        """Return the metrics of the work of this rank. num_groups: number of its groups."""
        packed_tokens = float(sum(batch.packed.token_ids.numel() for batch in plan.batches))
        metrics: dict[str, Metric] = {
            f"{self.name}/micro_batches": Sum(float(len(plan.batches))),
            f"{self.name}/packed_tokens": Sum(packed_tokens),
            f"{self.name}/packing_fill": Mean(packed_tokens, float(len(plan.batches) * self._update_max_tokens)),
            f"{self.name}/skipped_groups": Sum(float(num_groups - len(plan.with_gradient))),
            **self._count_work(plan.with_gradient),
        }
        if self.name == "actor" and self._config.worker.actor.replays_routing:
            replayed = sum(_num_recorded(batch.packed.routed_experts) for batch in plan.batches)
            metrics["actor/router_replay_fraction"] = Mean(float(replayed), packed_tokens)
        cached, total = (0, 0) if self.features is None else self.features.pop_metrics()
        if total:
            metrics[f"{self.name}/vision_cached_fraction"] = Mean(float(cached), float(total))
        return metrics

    def _count_work(self, groups: Sequence[TrainGroup]) -> dict[str, Metric]:
        """Return the operations of an update on these groups; see Policy.update_work."""
        return self.policy.update_work(groups, name=self.name)

    @contextmanager
    def dry_run_updates(self) -> Iterator[Callable[[Sequence[TrainGroup]], None]]:
        """Return a context with a function that makes one update pass over all groups in one row.

        Gradients accumulate inside the context and are discarded at its end. All ranks have to make
        the same passes.
        """
        self.wake(optimizer=False)
        with self._loss.awake():
            try:
                yield self._dry_run_update
                # FSDP would add deferred gradients of a sharded policy to the first real update.
                self._process_group.before_forward(self.policy, sync_gradients=True)
                self._loss.idle_backward(run_dummy_vision=True)
            finally:
                self._process_group.reshard(self.policy)
                self._free_gradients()

    def _dry_run_update(self, groups: Sequence[TrainGroup]) -> None:
        """Make one update pass over all groups in one row. The gradients are discarded later."""
        [batch] = pack_train(groups, max_tokens=sum(map(tokens_of, groups)), positions=self._positions)
        shares = None
        if self._loss.balances_experts:  # any, since their values do not change the memory of a pass
            shares = ExpertShares(torch.zeros(self.policy.num_experts, device=self._device), tokens=1.0)
        self._process_group.before_forward(self.policy, sync_gradients=False)
        self._loss.backward(
            to_device(batch, self._device),
            Denominators(tokens=len(batch.loss_mask), sequences=batch.num_sequences),
            run_dummy_vision=bool(batch.packed.visions),
            gradient_scale=1.0,
            shares=shares,
        )

    def dry_run(self, groups: Sequence[RolloutGroup]) -> None:
        """Make the longest pass of a step without gradient over all groups in one row.

        It is that of logprobs, or of full_kl if the run makes that one. Discards the result.
        """
        self.wake(optimizer=False)
        has_full_kl = self._config.algorithm.kl_in_reward == "full"
        self._scorer.dry_run(groups, against=self._reference if has_full_kl else None)

    def use_budgets(self, *, update_max_tokens: int, score_max_tokens: int) -> None:
        """Set the token budgets of a packed row with and without gradient."""
        self._update_max_tokens = update_max_tokens
        self._scorer.max_tokens = score_max_tokens

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of this rank's device that an update takes: optimizer states and temporaries.

        0 if updates are made on another device than the one that computes (FSDP's CPU offload).
        """
        is_on_device = next(self.policy.parameters()).device.type == self._device.type
        if self._config.trainer.val_only or not (is_on_device or self._placement.offload_params):
            return 0
        trainable = [on_this_rank(part) for part in self._module.parameters() if part.requires_grad]
        states = sum(state_bytes(part, self._section.optim.strategy) for part in trainable)
        return states + update_bytes(trainable, self._section.optim.strategy)

    @property
    def resting_bytes(self) -> int:
        """Bytes of this rank's device that optimizer states take between updates, or may take."""
        return 0 if self._placement.offload_optimizer else self.optimizer_bytes

    def offload(self) -> None:
        """Move what is offloaded between uses to host memory now, and free cached device memory."""
        self.offload_weights()
        self._offload_states()

    def offload_weights(self) -> None:
        """Move the weights to host memory if they are offloaded; their next use moves them back."""
        if self._placement.offload_params:
            self.policy.to("cpu")

    def weights(self) -> LocalWeights:
        """See TrainEngine. Offloaded weights leave the device when all tensors are read.

        Called on all ranks together: weights that have changed since the last call are checked.
        """
        if self._unchecked != "none":
            checked = {
                name: parameter
                for name, parameter in self.policy.named_parameters()
                if parameter.requires_grad or self._unchecked == "all"
            }
            updates = self._trained.updates
            try:
                require_finite(checked, self._process_group, what=f"the weights after {updates:,} updates")
            except NotFiniteError as error:
                if updates > 0:
                    raise
                raise ModelError(
                    f"{error}. No update was made: the model's own weights are not finite. Its files "
                    "(worker.actor.model.model_path) are damaged, or hold values that are too large for "
                    "worker.actor.fsdp.torch_dtype"
                ) from error
            self._unchecked = "none"
        self._offload_states()
        return LocalWeights(self._read_weights)

    def _read_weights(self, dtype: torch.dtype | None = None) -> NamedTensors:
        self.wake(optimizer=False)
        yield from self.policy.named_weights(dtype)
        self.offload_weights()

    def _offload_states(self) -> None:
        """Offload the optimizer states if configured, and free what the allocator has cached."""
        if self._placement.offload_optimizer:
            move_states(self._trained.optimizer, torch.device("cpu"))
        free_cached_memory(self._device)

    def save_state(self, folder: Path, *, model_only: bool) -> Callable[[], None]:
        """See TrainEngine."""
        free_cached_memory(self._device)  # the copy needs host memory
        return checkpointing.stage_state(
            self._saved,
            self._trained.optimizer,
            folder,
            updates=self._trained.updates,
            strategy=self._section.optim.strategy,
            model_only=model_only,
            process_group=self._process_group,
        )

    def load_state(self, folder: Path) -> None:
        """See TrainEngine. Any number of ranks may have written it."""
        self._unchecked = "all"
        if self._config.trainer.val_only:
            self.wake(optimizer=False)
            checkpointing.load_policy(self._saved, folder, process_group=self._process_group)
            return
        strategy = self._section.optim.strategy
        updates = checkpointing.read_updates(
            folder,
            lora_rank=self._section.model.lora.rank if self._saved.has_adapters else 0,
            strategy=strategy,
            section=f"worker.{self.name}",
        )
        self.wake(optimizer=True)
        checkpointing.load_policy(self._saved, folder, process_group=self._process_group)
        checkpointing.load_optimizer(
            self._saved, self._trained.optimizer, folder, strategy=strategy, process_group=self._process_group
        )
        self._trained.updates = updates

    @property
    def _module(self) -> nn.Module:
        """What the optimizer updates: the policy's model, without a value head on its trunk."""
        model: nn.Module = self.policy.model
        return model

    @property
    def _saved(self) -> checkpointing.Saved:
        """What a checkpoint has."""
        return self.policy

    @property
    def _counts_row(self) -> bool:
        """Whether this rank counts its rows: of the ranks that compute them together, the first."""
        return self.policy.row_ranks is None or self.policy.row_ranks.rank == 0

    def wake(self, *, optimizer: bool) -> None:
        """Move offloaded weights, and if asked for the optimizer states, to the device."""
        if self._placement.offload_params:
            self.policy.to(self._device)
        if optimizer and self._placement.offload_optimizer:
            move_states(self._trained.optimizer, self._device)


def _num_recorded(experts: Tensor | None) -> int:
    """Return how many tokens of a row have a record of their experts."""
    return 0 if experts is None else int((experts[:, 0, 0] != NO_RECORD).sum())


def outputs_by_group(
    plan: UpdatePlan, rows: Sequence[Tensor], *, indices: Collection[int]
) -> dict[int, list[TokenLogprobs]]:
    """Return the outputs of these groups of the update, for those that have a gradient.

    rows: log-probabilities and entropies of each batch, [2, S]. indices: among all groups of this
    rank.
    """
    owned = by_owner(plan.batches, rows)
    outputs: dict[int, list[TokenLogprobs]] = {index: [] for index in plan.indices if index in indices}
    for place, number in sorted(owned):
        if (index := plan.indices[place]) in outputs:
            logprobs, entropy = owned[place, number]
            outputs[index].append(TokenLogprobs(logprobs, entropy, None))
    return outputs
