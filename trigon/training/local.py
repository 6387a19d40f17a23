"""The train engine of one process on one device: alone, or one rank of several.

An update passes through LocalTrainEngine.step and, for each packed row, micro_batch_backward
(step.py). Does not depend on Ray and vLLM; other ranks are reached through the process group only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from trigon.algorithms.reduce import Denominators, count_denominators
from trigon.algorithms.unread import UnreadMetrics, read_metrics
from trigon.data.packing import Positions, pack_train
from trigon.errors import ModelError, NotFiniteError
from trigon.metrics import Max, Mean, Metric, Metrics, Sum
from trigon.models.features import VisionFeatureCache
from trigon.models.policy import Policy, full_tensor
from trigon.training import checkpointing
from trigon.training.dry_run import update_passes
from trigon.training.finite import require_finite
from trigon.training.memory import free_cached_memory
from trigon.training.optim import make_optimizer, move_states, on_this_rank, state_bytes, update_bytes
from trigon.training.parallel import passes_in_step
from trigon.training.protocol import SKIPPED_GRAD_NORM, LoadPixels, Sizes
from trigon.training.scorer import LocalScorer, ReferenceWithoutAdapters
from trigon.training.settings import Placement, TrainSettings
from trigon.training.step import Reference, idle_backward, micro_batch_backward, to_device
from trigon.types import LocalWeights, MicroBatch, NamedTensors, RolloutGroup, TokenLogprobs, TrainGroup, has_media


class LocalTrainEngine:
    """The train engine of one process. Satisfies TunableEngine.

    All ranks of the process group call every method together, each with its own groups.
    """

    def __init__(
        self,
        policy: Policy,
        settings: TrainSettings,
        placement: Placement,
        *,
        positions: Positions,
        reference: LocalScorer | None = None,
        features: VisionFeatureCache | None = None,
        load_pixels: LoadPixels = list,
    ) -> None:
        """Make the optimizer of a policy that is on its device, or sharded over the ranks.

        Args:
            positions: computes the position ids of a prompt.
            reference: the reference of the full KL; None with LoRA, where it is the policy without
                its adapters, and if there is no full KL.
            features: cache for a frozen vision tower; see Policy.use_feature_cache.
            load_pixels: processes the media of groups that are encoded files.
        """
        self._policy = policy
        self._settings = settings
        self._terms = settings.terms
        self._positions = positions
        self._update_max_tokens = settings.update_max_tokens
        self._device = placement.device
        self._offload_params = placement.offload_params
        self._offload_optimizer = placement.offload_optimizer
        self._process_group = placement.process_group
        self._features = features
        self._made_optimizer = (
            make_optimizer(
                policy.parameters(),
                strategy=settings.strategy,
                learning_rate=settings.schedule.peak,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
            )
            if settings.makes_updates
            else None
        )
        self._updates = 0  # optimizer updates made; skipped ones do not count
        # Which weights may have changed since the last weight sync that found them finite.
        self._unchecked: Literal["all", "trainable", "none"] = "all"
        self._scorer = LocalScorer(
            policy,
            replace(placement, offload_params=False),  # weights() offloads the policy
            positions=positions,
            max_tokens=settings.score_max_tokens,
            features=features,
            load_pixels=load_pixels,
        )
        self._load_pixels = load_pixels
        self._reference: Reference | None = reference or (
            self.reference_without_adapters() if policy.has_adapters else None
        )

    def reference_without_adapters(self) -> ReferenceWithoutAdapters:
        """Return the reference policy of LoRA: the policy with its adapters disabled."""
        return ReferenceWithoutAdapters(self, self._scorer)

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        self._wake(optimizer=False)
        return self._scorer.logprobs(groups)

    def token_logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[TokenLogprobs]]:
        """See TrainEngine."""
        self._wake(optimizer=False)
        with nullcontext() if self._features is None else self._features.unchanged():
            return self._scorer.token_logprobs(groups)

    def full_kl(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See TrainEngine."""
        assert self._reference is not None, "the full KL needs a reference"
        self._wake(optimizer=False)
        return self._scorer.full_kl(groups, self._reference)

    def step(self, groups: Sequence[TrainGroup]) -> Metrics:
        """See TrainEngine. The merged metrics of all ranks are those of the update.

        The gradient is the sum over the micro-batches of all ranks; each of them divides by the
        token and sequence counts of the whole update.
        """
        if self._unchecked == "none":
            self._unchecked = "trainable"
        reference = self._full_kl_reference()
        with nullcontext() if reference is None else reference.awake():
            self._wake(optimizer=True)
            groups = self._load_pixels(groups)
            plan = self._plan_passes(groups)
            unread: list[UnreadMetrics] = []
            for index, run_dummy_vision in enumerate(plan.passes):
                self._process_group.before_forward(self._policy, sync_gradients=plan.syncs_gradients(index))
                if index >= len(plan.batches):  # other ranks have more micro-batches
                    idle_backward(
                        self._policy, self._scorer.precision, reference=reference, run_dummy_vision=run_dummy_vision
                    )
                    continue
                unread.append(
                    micro_batch_backward(
                        self._policy,
                        to_device(plan.batches[index], self._device),
                        self._terms,
                        plan.denominators,
                        self._scorer.precision,
                        reference=reference,
                        run_dummy_vision=run_dummy_vision,
                        gradient_scale=float(self._process_group.size),  # FSDP averages gradients over the ranks
                    )
                )
            applied, metrics = self._apply_update(plan, unread)
            return {**metrics, **self._update_metrics(plan, applied, metrics, num_groups=len(groups))}

    def _plan_passes(self, groups: Sequence[TrainGroup]) -> _UpdatePlan:
        """Pack this rank's groups, and agree with the other ranks on the number of passes."""
        denominators = self._denominators(groups)
        with_gradient = [group for group in groups if has_gradient(group, regularized=self._terms.regularized)]
        batches = pack_train(with_gradient, max_tokens=self._update_max_tokens, positions=self._positions)
        shows_image = [bool(batch.packed.visions) for batch in batches]
        if len(with_gradient) < len(groups):
            # AdamW treats a gradient of zero and no gradient differently: with the former the
            # moments still move the parameter. If all groups of a kind are left out, one idle pass
            # gives the same parameters a gradient.
            had_image = any(has_media(group) for group in groups)
            if not batches or (had_image and not any(shows_image)):
                shows_image.append(had_image)
        return _UpdatePlan(
            with_gradient=with_gradient,
            batches=batches,
            denominators=denominators,
            passes=passes_in_step(shows_image, self._process_group),
        )

    def _denominators(self, groups: Sequence[TrainGroup]) -> Denominators:
        """Return the trainable tokens and sequences of the update, over all ranks."""
        local = count_denominators(sequence.loss_mask for group in groups for sequence in group.sequences)
        tokens, sequences = self._process_group.all_reduce_sum([local.tokens, local.sequences])
        return Denominators(int(tokens), int(sequences))

    def _apply_update(
        self, plan: _UpdatePlan, unread: Sequence[UnreadMetrics]
    ) -> tuple[_AppliedUpdate, dict[str, Metric]]:
        """Clip the gradients, apply them unless the update is skipped, and free them.

        Returns what was done, and the metrics of the micro-batches, merged. They are read from the
        device together with the norm of the gradient: the one time that an update waits for it.
        """
        rate = self._settings.schedule.learning_rate(self._updates + 1)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        clipped = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._settings.max_grad_norm)
        metrics, [norm] = read_metrics(unread, full_tensor(clipped))
        is_finite = norm < float("inf")  # False for nan as well
        # Without a trainable token the moments alone would move the parameters.
        is_applied = is_finite and plan.denominators.tokens > 0
        if is_applied:
            self._optimizer.step()
            self._updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        return _AppliedUpdate(rate, norm, is_finite=is_finite, is_applied=is_applied), metrics

    def _update_metrics(
        self, plan: _UpdatePlan, applied: _AppliedUpdate, batch_metrics: Metrics, *, num_groups: int
    ) -> dict[str, Metric]:
        """Return the metrics of the update that are not those of its micro-batches.

        batch_metrics: of this rank's micro-batches, merged. num_groups: of this rank.
        """
        packed_tokens = float(sum(batch.packed.token_ids.numel() for batch in plan.batches))
        [loss] = self._process_group.all_reduce_sum([batch_metrics.get("actor/pg_loss", Sum(0.0)).value])
        metrics: dict[str, Metric] = {
            # The summands of the micro-batches add up to the loss of one update; updates of a step
            # are averaged.
            "actor/pg_loss": Mean(loss),
            "actor/grad_norm": Mean(applied.grad_norm) if applied.is_finite else Mean(0.0, 0.0),
            "actor/lr": Mean(applied.learning_rate),
            "actor/skipped_updates": Sum(float(not applied.is_applied and self._process_group.rank == 0)),
            "actor/nonfinite_updates": Sum(float(not applied.is_finite and self._process_group.rank == 0)),
            "actor/micro_batches": Sum(float(len(plan.batches))),
            "actor/packed_tokens": Sum(packed_tokens),
            "actor/packing_fill": Mean(packed_tokens, float(len(plan.batches) * self._update_max_tokens)),
            "actor/skipped_groups": Sum(float(num_groups - len(plan.with_gradient))),
            **self._policy.update_work(plan.with_gradient),
        }
        if not applied.is_finite:
            metrics[SKIPPED_GRAD_NORM] = Max(applied.grad_norm)
        cached, total = (0, 0) if self._features is None else self._features.pop_metrics()
        if total:
            metrics["actor/vision_remembered"] = Mean(float(cached), float(total))
        return metrics

    @contextmanager
    def dry_run_updates(self) -> Iterator[Callable[[Sequence[TrainGroup]], None]]:
        """See TunableEngine."""
        reference = self._full_kl_reference()
        self._wake(optimizer=False)
        with (
            nullcontext() if reference is None else reference.awake(),
            update_passes(
                self._scorer,
                self._optimizer,
                self._terms,
                positions=self._positions,
                reference=reference,
                process_group=self._process_group,
            ) as dry_run,
        ):
            yield dry_run

    def dry_run(self, groups: Sequence[RolloutGroup]) -> None:
        """See TunableEngine."""
        self._wake(optimizer=False)
        self._scorer.dry_run(groups, against=self._reference)

    def use_budgets(self, *, update_max_tokens: int, score_max_tokens: int) -> None:
        """See TunableEngine."""
        self._update_max_tokens = update_max_tokens
        self._scorer.use_budget(score_max_tokens)

    @property
    def policy(self) -> Policy:
        """See TunableEngine."""
        return self._policy

    @property
    def optimizer_bytes(self) -> int:
        """See TunableEngine.

        0 if updates are made on another device than the one that computes (FSDP's CPU offload).
        """
        is_on_device = next(self._policy.parameters()).device.type == self._device.type
        if self._made_optimizer is None or not (is_on_device or self._offload_params):
            return 0
        trainable = [on_this_rank(part) for part in self._policy.parameters() if part.requires_grad]
        return self.sizes().optimizer_bytes + update_bytes(trainable, self._settings.strategy)

    def offload(self) -> None:
        """See TunableEngine."""
        if self._offload_params:
            self._policy.to("cpu")
        self._offload_states()

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
                require_finite(checked, self._process_group, what=f"the weights after {self._updates:,} updates")
            except NotFiniteError as error:
                if self._updates > 0:
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
        self._wake(optimizer=False)
        yield from self._policy.named_weights(dtype)
        if self._offload_params:
            self._policy.to("cpu")

    def _offload_states(self) -> None:
        """Offload the optimizer states if configured, and free what the allocator has cached."""
        if self._offload_optimizer:
            move_states(self._optimizer, torch.device("cpu"))
        free_cached_memory(self._device)

    def save_state(self, folder: Path, *, model_only: bool) -> Callable[[], None]:
        """See TrainEngine."""
        return checkpointing.stage_state(
            self._policy,
            self._optimizer,
            folder,
            updates=self._updates,
            strategy=self._settings.strategy,
            model_only=model_only,
            process_group=self._process_group,
        )

    def load_state(self, folder: Path) -> None:
        """See TrainEngine. Any number of ranks may have written it."""
        self._unchecked = "all"
        if self._made_optimizer is None:
            self._wake(optimizer=False)
            checkpointing.load_policy(self._policy, folder, process_group=self._process_group)
            return
        strategy = self._settings.strategy
        updates = checkpointing.read_updates(folder, has_adapters=self._policy.has_adapters, strategy=strategy)
        self._wake(optimizer=True)
        checkpointing.load_policy_and_optimizer(
            self._policy, self._optimizer, folder, strategy=strategy, process_group=self._process_group
        )
        self._updates = updates

    def sizes(self) -> Sizes:
        """See TunableEngine."""
        parameters = list(self._policy.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        gradient_bytes = sum(part.numel() * part.element_size() for part in map(on_this_rank, trainable))
        return Sizes(
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in trainable),
            weight_bytes=sum(part.numel() * part.element_size() for part in map(on_this_rank, parameters)),
            gradient_bytes=gradient_bytes if self._settings.makes_updates else 0,
            optimizer_bytes=(
                sum(state_bytes(part, self._settings.strategy) for part in map(on_this_rank, trainable))
                if self._settings.makes_updates
                else 0
            ),
        )

    def close(self) -> None:
        """See TrainEngine. There is nothing to free but memory."""

    def _full_kl_reference(self) -> Reference | None:
        """Return the reference of the full KL; None if the loss does not have one."""
        return self._reference if self._terms.kl_estimator == "full" else None

    @property
    def _optimizer(self) -> Optimizer:
        assert self._made_optimizer is not None, "this engine makes no updates"
        return self._made_optimizer

    def _wake(self, *, optimizer: bool) -> None:
        """Move offloaded weights, and if asked for the optimizer states, to the device."""
        if self._offload_params:
            self._policy.to(self._device)
        if optimizer and self._offload_optimizer:
            move_states(self._optimizer, self._device)


@dataclass(frozen=True, slots=True)
class _UpdatePlan:
    """The passes of one update on this rank.

    with_gradient: the groups that have a gradient. batches: these groups, packed.
    denominators: of the update, over all ranks.
    passes: for each pass that all ranks make together, whether the vision tower runs; see
    passes_in_step. At least as many as batches.
    """

    with_gradient: list[TrainGroup]
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
class _AppliedUpdate:
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

    regularized: see LossTerms.regularized. If False, only tokens whose advantage is not zero have a
    gradient.
    """
    return regularized or any(bool(((part.loss_mask > 0) & (part.advantages != 0)).any()) for part in group.sequences)
