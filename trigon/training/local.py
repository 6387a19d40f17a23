"""The train engine of one process on one device: alone, or one rank of several.

An update passes through LocalTrainEngine.step and, for each packed row, PolicyLoss.backward
(step.py). Does not depend on Ray and vLLM; other ranks are reached through the process group only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from trigon.algorithms.reduce import Denominators, ExpertShares, count_denominators
from trigon.algorithms.unread import UnreadMetrics, read_metrics
from trigon.config.plan import ModelPlan
from trigon.config.schema import Config, TrainedConfig
from trigon.data.packing import Positions, by_owner, pack_train, tokens_of
from trigon.errors import ModelError, NotFiniteError
from trigon.metrics import Max, Mean, Metric, Metrics, Sum
from trigon.models.features import VisionFeatureCache
from trigon.models.policy import Policy, full_tensor
from trigon.training import checkpointing
from trigon.training.checkpointing import require_finite
from trigon.training.device_memory import Placement, free_cached_memory
from trigon.training.optim import Schedule, make_optimizer, move_states, on_this_rank, state_bytes, update_bytes
from trigon.training.protocol import SKIPPED_GRAD_NORM, GroupOutputs, LoadPixels
from trigon.training.scorer import LocalScorer, ReferenceWithoutAdapters
from trigon.training.step import (
    ROUTER_LOSS,
    AppliedUpdate,
    PolicyLoss,
    Reference,
    UpdatePlan,
    ValueLoss,
    count_expert_shares,
    plan_update,
    to_device,
)
from trigon.training.train_groups import has_gradient
from trigon.types import NO_RECORD, LocalWeights, NamedTensors, RolloutGroup, TokenLogprobs, TrainGroup

ModelName = Literal["actor", "critic"]
"""What a run has a trained model for: the prefix of its metrics, and its section in worker."""

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

    def free_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


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
        positions: Positions,
        reference: LocalScorer | None = None,
        features: VisionFeatureCache | None = None,
        load_pixels: LoadPixels = list,
    ) -> None:
        """Make the optimizer of a policy that is on its device, or sharded over the ranks.

        With trainer.val_only there is none, and only weights are loaded from a checkpoint.

        Args:
            plan: the updates of this model.
            positions: computes the position ids of a prompt.
            reference: the reference of the full KL; None with LoRA, where it is the policy without
                its adapters, and if there is no full KL.
            features: cache for a frozen vision tower; see Policy.use_feature_cache.
            load_pixels: processes the media of groups that are encoded files.
        """
        self._policy = policy
        self._config = config
        self._positions = positions
        self._update_max_tokens = plan.tokens_per_update_pass
        self._device = placement.device
        self._placement = placement
        self._offload_params = placement.offload_params
        self._offload_optimizer = placement.offload_optimizer
        self._process_group = placement.process_group
        self.features = features
        section = config.worker.actor if self.name == "actor" else config.critic
        self._strategy = section.optim.strategy
        makes_updates = not config.trainer.val_only
        self._made = Trained(self.name, self._module, section, plan) if makes_updates else None
        # What the gradients of one backward pass update: the policy, and a head on its trunk.
        self._updated = [] if self._made is None else [self._made]
        # Which weights may have changed since the last weight sync that found them finite.
        self._unchecked: Literal["all", "trainable", "none"] = "all"
        self._scorer = LocalScorer(
            policy,
            replace(placement, offload_params=False),  # weights() offloads the policy
            positions=positions,
            max_tokens=plan.tokens_per_experience_pass,
            features=features,
            load_pixels=load_pixels,
        )
        self._load_pixels = load_pixels
        self._reference: Reference | None = reference or (
            self.reference_without_adapters() if policy.has_adapters else None
        )
        self._loss = self._make_loss()

    def _make_loss(self) -> PolicyLoss | ValueLoss:
        """Return the loss that updates minimize."""
        reference = self._reference if self._config.algorithm.kl_in_loss == "full" else None
        return PolicyLoss(self._policy, self._config, self._scorer.precision, reference=reference)

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
        reference = self._loss.reference
        with explained, nullcontext() if reference is None else reference.awake():
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
            recorded = RecordedOutputs(plan, () if outputs is None else outputs)
            shares = self._count_expert_shares(plan)
            unread: list[UnreadMetrics] = []
            for index, run_dummy_vision in enumerate(plan.passes):
                self._process_group.before_forward(self._policy, sync_gradients=plan.syncs_gradients(index))
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
                        on_outputs=recorded.receiver(index),
                    )
                )
            applied, metrics = self._apply_update(plan, unread)
            for trained, done in zip(self._updated, applied, strict=True):
                metrics |= self._loss_metrics(trained, done, metrics)
            metrics |= self._update_metrics(plan, applied[0], num_groups=len(groups))
            if not self._counts_row:
                metrics = {key: metrics[key] for key in _OF_EACH_RANK if key in metrics}
            if outputs is not None:
                outputs.update(recorded.by_group())  # read_metrics has waited for their copies
            return metrics

    def _count_expert_shares(self, plan: UpdatePlan) -> ExpertShares | None:
        """Return the shares of the experts in an update; None without a load-balancing loss.

        They depend on all micro-batches, and are needed before the first backward.
        """
        if not self._loss.balances_experts:
            return None
        shares = count_expert_shares(
            self._policy,
            [batch.packed for batch in plan.batches],
            plan.passes,
            precision=self._scorer.precision,
            process_group=self._process_group,
            counts_row=self._counts_row,
        )
        return replace(shares, fractions=shares.fractions.to(self._device))

    def _denominators(self, groups: Sequence[TrainGroup]) -> Denominators:
        """Return the trainable tokens and sequences of the update, over all ranks."""
        local = count_denominators(sequence.loss_mask for group in groups for sequence in group.sequences)
        own = float(self._counts_row)
        tokens, sequences = self._process_group.all_reduce_sum([own * local.tokens, own * local.sequences])
        return Denominators(int(tokens), int(sequences))

    def _apply_update(
        self, plan: UpdatePlan, unread: Sequence[UnreadMetrics]
    ) -> tuple[list[AppliedUpdate], dict[str, Metric]]:
        """Clip the gradients, apply them unless the update is skipped, and free them.

        Returns what was done to each of _updated, and the metrics of the micro-batches, merged.
        They are read from the device together with the norms of the gradients: the one time that an
        update waits for it.
        """
        metrics, norms = read_metrics(unread, *[trained.clip_gradients() for trained in self._updated])
        is_finite = all(norm < float("inf") for norm in norms)  # False for nan as well
        # Without a trainable token the moments alone would move the parameters.
        is_applied = is_finite and plan.denominators.tokens > 0
        rates = [trained.set_learning_rate() for trained in self._updated]
        if is_applied:
            for trained in self._updated:
                trained.update()
        self._free_gradients()
        if not is_finite:  # of both, if one is not
            norms = [next(norm for norm in norms if not norm < float("inf"))] * len(norms)
        each = zip(rates, norms, strict=True)
        return [AppliedUpdate(*done, is_finite=is_finite, is_applied=is_applied) for done in each], metrics

    def _free_gradients(self) -> None:
        for trained in self._updated:
            trained.free_gradients()

    def _update_metrics(self, plan: UpdatePlan, applied: AppliedUpdate, *, num_groups: int) -> dict[str, Metric]:
        """Return the metrics of the update, without those of its micro-batches and its losses.

        num_groups: number of groups of this rank.
        """
        packed_tokens = float(sum(batch.packed.token_ids.numel() for batch in plan.batches))
        metrics: dict[str, Metric] = {
            f"{self.name}/skipped_updates": Sum(float(not applied.is_applied and self._process_group.rank == 0)),
            f"{self.name}/nonfinite_updates": Sum(float(not applied.is_finite and self._process_group.rank == 0)),
            f"{self.name}/micro_batches": Sum(float(len(plan.batches))),
            f"{self.name}/packed_tokens": Sum(packed_tokens),
            f"{self.name}/packing_fill": Mean(packed_tokens, float(len(plan.batches) * self._update_max_tokens)),
            f"{self.name}/skipped_groups": Sum(float(num_groups - len(plan.with_gradient))),
            **self._count_work(plan.with_gradient),
        }
        if self.name == "actor" and self._config.worker.actor.replays_routing:
            replayed = sum(_num_recorded(batch.packed.routed_experts) for batch in plan.batches)
            metrics["actor/router_replay_fraction"] = Mean(float(replayed), packed_tokens)
        if not applied.is_finite:
            metrics[SKIPPED_GRAD_NORM] = Max(applied.grad_norm)
        cached, total = (0, 0) if self.features is None else self.features.pop_metrics()
        if total:
            metrics[f"{self.name}/vision_cached_fraction"] = Mean(float(cached), float(total))
        return metrics

    def _count_work(self, groups: Sequence[TrainGroup]) -> dict[str, Metric]:
        """Return the operations of an update on these groups; see Policy.update_work."""
        return self._policy.update_work(groups, name=self.name)

    def _loss_metrics(self, trained: Trained, applied: AppliedUpdate, batch_metrics: Metrics) -> dict[str, Metric]:
        """Return the losses of the update, the norm of its gradient, and its learning rate.

        batch_metrics: the metrics of this rank's micro-batches, merged.
        """
        keys = [trained.loss_key, *([ROUTER_LOSS] if trained.name == "actor" and self._loss.balances_experts else [])]
        own = [batch_metrics.get(key, Sum(0.0)).value if self._counts_row else 0.0 for key in keys]
        losses = self._process_group.all_reduce_sum(own)
        return {
            # The summands of the micro-batches add up to the loss of one update; updates of a step
            # are averaged.
            **{key: Mean(loss) for key, loss in zip(keys, losses, strict=True)},
            f"{trained.name}/grad_norm": Mean(applied.grad_norm) if applied.is_finite else Mean(0.0, 0.0),
            f"{trained.name}/lr": Mean(applied.learning_rate),
        }

    @contextmanager
    def dry_run_updates(self) -> Iterator[Callable[[Sequence[TrainGroup]], None]]:
        """Return a context with a function that makes one update pass over all groups in one row.

        Gradients accumulate inside the context and are discarded at its end. All ranks have to make
        the same passes.
        """
        reference = self._loss.reference
        self.wake(optimizer=False)
        with nullcontext() if reference is None else reference.awake():
            try:
                yield self._dry_run_update
                # FSDP would add deferred gradients of a sharded policy to the first real update.
                self._process_group.before_forward(self._policy, sync_gradients=True)
                self._loss.idle_backward(run_dummy_vision=True)
            finally:
                self._process_group.reshard(self._policy)
                self._free_gradients()

    def _dry_run_update(self, groups: Sequence[TrainGroup]) -> None:
        """Make one update pass over all groups in one row. The gradients are discarded later."""
        [batch] = pack_train(groups, max_tokens=sum(map(tokens_of, groups)), positions=self._positions)
        shares = None
        if self._loss.balances_experts:  # any, since their values do not change the memory of a pass
            shares = ExpertShares(torch.zeros(self._policy.num_experts, device=self._device), tokens=1.0)
        self._process_group.before_forward(self._policy, sync_gradients=False)
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
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self._policy

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of this rank's device that an update takes: optimizer states and temporaries.

        0 if updates are made on another device than the one that computes (FSDP's CPU offload).
        """
        is_on_device = next(self._policy.parameters()).device.type == self._device.type
        if self._made is None or not (is_on_device or self._offload_params):
            return 0
        trainable = [on_this_rank(part) for part in self._module.parameters() if part.requires_grad]
        states = sum(state_bytes(part, self._strategy) for part in trainable)
        return states + update_bytes(trainable, self._strategy)

    @property
    def resting_bytes(self) -> int:
        """Bytes of this rank's device that optimizer states take between updates, or may take."""
        return 0 if self._offload_optimizer else self.optimizer_bytes

    def offload(self) -> None:
        """Move what is offloaded between uses to host memory now, and free cached device memory."""
        self.offload_weights()
        self._offload_states()

    def offload_weights(self) -> None:
        """Move the weights to host memory if they are offloaded; their next use moves them back."""
        if self._offload_params:
            self._policy.to("cpu")

    def weights(self) -> LocalWeights:
        """See TrainEngine. Offloaded weights leave the device when all tensors are read.

        Called on all ranks together: weights that have changed since the last call are checked.
        """
        if self._unchecked != "none":
            checked = {
                name: parameter
                for name, parameter in self._policy.named_parameters()
                if parameter.requires_grad or self._unchecked == "all"
            }
            try:
                require_finite(checked, self._process_group, what=f"the weights after {self._num_updates:,} updates")
            except NotFiniteError as error:
                if self._num_updates > 0:
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
        yield from self._policy.named_weights(dtype)
        self.offload_weights()

    def _offload_states(self) -> None:
        """Offload the optimizer states if configured, and free what the allocator has cached."""
        if self._offload_optimizer:
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
            strategy=self._strategy,
            model_only=model_only,
            process_group=self._process_group,
        )

    def load_state(self, folder: Path) -> None:
        """See TrainEngine. Any number of ranks may have written it."""
        self._unchecked = "all"
        if self._made is None:
            self.wake(optimizer=False)
            checkpointing.load_policy(self._saved, folder, process_group=self._process_group)
            return
        has_adapters, section = self._saved.has_adapters, f"worker.{self.name}"
        updates = checkpointing.read_updates(
            folder, has_adapters=has_adapters, strategy=self._strategy, section=section
        )
        self.wake(optimizer=True)
        checkpointing.load_policy_and_optimizer(
            self._saved, self._made.optimizer, folder, strategy=self._strategy, process_group=self._process_group
        )
        self._made.updates = updates

    def close(self) -> None:
        """See TrainEngine. There is nothing to free but memory."""

    @property
    def _module(self) -> nn.Module:
        """What the optimizer updates: the policy's model, without a value head on its trunk."""
        model: nn.Module = self._policy.model
        return model

    @property
    def _saved(self) -> checkpointing.Saved:
        """What a checkpoint has."""
        return self._policy

    @property
    def _counts_row(self) -> bool:
        """Whether this rank counts its rows: of the ranks that compute them together, the first."""
        return self._policy.row_ranks is None or self._policy.row_ranks.rank == 0

    @property
    def _trained(self) -> Trained:
        assert self._made is not None, "this engine makes no updates"
        return self._made

    @property
    def _num_updates(self) -> int:
        return 0 if self._made is None else self._made.updates

    def wake(self, *, optimizer: bool) -> None:
        """Move offloaded weights, and if asked for the optimizer states, to the device."""
        if self._offload_params:
            self._policy.to(self._device)
        if optimizer and self._offload_optimizer:
            move_states(self._trained.optimizer, self._device)


def _num_recorded(experts: Tensor | None) -> int:
    """Return how many tokens of a row have a record of their experts."""
    return 0 if experts is None else int((experts[:, 0, 0] != NO_RECORD).sum())


class RecordedOutputs:
    """Collects the outputs of the rows that contain recorded groups."""

    def __init__(self, plan: UpdatePlan, recorded: Collection[int]) -> None:
        """Collect outputs of this update. recorded: indices among all groups of this rank."""
        self._plan = plan
        self._recorded = {place: index for place, index in enumerate(plan.indices) if index in recorded}
        self._rows: dict[int, Tensor] = {}  # by the number of the batch: [2, S]

    def receiver(self, number: int) -> Callable[[TokenLogprobs], None] | None:
        """Return what receives the outputs of a batch; None if it has no recorded group."""
        if any(group in self._recorded for group, _ in self._plan.batches[number].owners):
            return partial(self._receive, number)
        return None

    def by_group(self) -> dict[int, list[TokenLogprobs]]:
        """Return the outputs of each recorded group that has a gradient, by its index.

        Called after the device has finished the passes. The tensors are float32 [S] on the CPU.
        """
        batches = [self._plan.batches[number] for number in self._rows]
        owned = by_owner(batches, list(self._rows.values()))
        outputs: dict[int, list[TokenLogprobs]] = {index: [] for index in self._recorded.values()}
        for place, number in sorted(owned):
            if place in self._recorded:
                logprobs, entropy = owned[place, number]
                outputs[self._recorded[place]].append(TokenLogprobs(logprobs, entropy, None))
        return outputs

    def _receive(self, number: int, outputs: TokenLogprobs) -> None:
        stacked = torch.stack([outputs.logprobs.detach().float(), outputs.entropy.detach().float()])
        self._rows[number] = stacked.to("cpu", non_blocking=True)  # into pinned memory
