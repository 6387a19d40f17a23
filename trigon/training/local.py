"""The train engine of one process on one device: the whole of it, or one rank of several.

Knows the policy and its optimizer, and through Ranks that there may be others. Refuses to know Ray and vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trigon.algorithms.reduce import Denominators, count_denominators
from trigon.data.packing import Positions, pack_train, tokens_of
from trigon.errors import CheckpointError
from trigon.metrics import Mean, Metric, Metrics, Sum, merge
from trigon.models.features import VisionFeatureCache
from trigon.models.logprobs import Predictions
from trigon.models.lora import adapter_config, adapters_off
from trigon.models.policy import Policy, full_tensor
from trigon.training.optim import Schedule, Strategy, make_optimizer, on_this_rank, state_bytes, state_dtype
from trigon.training.parallel import ProcessGroup, SingleProcess, passes_in_step
from trigon.training.state import ShardedFiles, load_tensors, save_tensors, stage
from trigon.training.step import (
    LossTerms,
    Reference,
    idle_backward,
    micro_batch_backward,
    score_rollouts,
    to_device,
)
from trigon.types import NamedTensors, PackedGroups, RolloutGroup, TrainGroup

WEIGHTS_FOLDER = "weights"
ADAPTER_FOLDER = "adapter"
OPTIMIZER_FOLDER = "optimizer"
STATE_FILE = "state.json"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a policy and its training are, at their peak. parameters, trainable: numbers, of the whole policy.

    The rest in bytes, and on this rank alone.
    """

    parameters: int
    trainable: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


class LocalScorer:
    """Scores completions under a policy that somebody else trains, or nobody: the reference.

    Satisfies LogprobEngine and step.Reference.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        positions: Positions,
        max_tokens: int,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        offload_params: bool,
        process_group: ProcessGroup = SingleProcess(),  # noqa: B008  (it holds nothing)
        features: VisionFeatureCache | None = None,
    ) -> None:
        """max_tokens: token budget of a packed row. offload_params: keep the weights on the CPU between calls.

        compute_dtype: of the forward; None where the policy sees to that by itself, as one that is sharded does.
        features: for a policy whose vision tower never changes; see Policy.use_feature_cache.
        """
        self.policy = policy
        self.device = device
        self._positions = positions
        self._max_tokens = max_tokens
        self._compute_dtype = compute_dtype
        self._offload_params = offload_params
        self._process_group = process_group
        if features is not None:
            policy.use_feature_cache(features, all_reduce_max=lambda number: int(process_group.largest([number])[0]))

    def precision(self) -> AbstractContextManager[object]:
        """Return the context in which the policy computes: autocast, unless all weights have the dtype already."""
        wanted = self._compute_dtype
        if wanted is None or all(parameter.dtype == wanted for parameter in self.policy.parameters()):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=wanted)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """See step.Reference. Only what was offloaded moves; what was gathered from other ranks is let go of."""
        if self._offload_params:
            self.policy.to(self.device)
        try:
            yield
        finally:
            self._process_group.reshard(self.policy)
            if self._offload_params:
                self.policy.to("cpu")

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine. Of several ranks each is given its own groups, and all are to be called."""
        return self._scored(groups, against=None)

    def dry_run(self, groups: Sequence[RolloutGroup], *, against: Reference | None = None) -> None:
        """Make the pass of logprobs, or of full_kl, over groups in one row, however long, for nothing."""
        with nullcontext() if against is None else against.awake():
            self._scored(groups, against=against, max_tokens=sum(map(tokens_of, groups)))

    def use_budget(self, max_tokens: int) -> None:
        """Pack rows of another token budget from now on."""
        self._max_tokens = max_tokens

    def full_kl(self, groups: Sequence[RolloutGroup], reference: Reference) -> list[list[Tensor]]:
        """Return what logprobs does, but of each token the KL of the policy's whole distribution from a reference's."""
        with reference.awake():
            return self._scored(groups, against=reference)

    def predictions(self, packed: PackedGroups, *, run_dummy_vision: bool) -> Predictions:
        """See Policy.predictions."""
        with self.precision():
            return self.policy.predictions(packed, run_dummy_vision=run_dummy_vision)

    def _scored(
        self, groups: Sequence[RolloutGroup], *, against: Reference | None, max_tokens: int | None = None
    ) -> list[list[Tensor]]:
        with self.awake():
            return score_rollouts(
                self.policy,
                groups,
                max_tokens=self._max_tokens if max_tokens is None else max_tokens,
                positions=self._positions,
                precision=self.precision,
                device=self.device,
                process_group=self._process_group,
                against=against,
            )


class LocalTrainEngine:
    """TrainEngine in one process. Of several ranks each is given its own groups, and all are to be called together."""

    def __init__(
        self,
        policy: Policy,
        *,
        terms: LossTerms,
        strategy: Strategy,
        schedule: Schedule,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        positions: Positions,
        update_max_tokens: int,
        score_max_tokens: int,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        offload_params: bool,
        offload_optimizer: bool,
        process_group: ProcessGroup = SingleProcess(),  # noqa: B008  (it holds nothing)
        reference: LocalScorer | None = None,
        features: VisionFeatureCache | None = None,
    ) -> None:
        """policy: where it computes, on device, or sharded over ranks.

        reference: with what the full KL compares; None: nothing does, or LoRA's adapters are left out for it.
        update_max_tokens, score_max_tokens: token budgets of a packed row with and without gradient.
        compute_dtype, features: as in LocalScorer.
        offload_params, offload_optimizer: keep them on the CPU while the rollout engine has the device.
        """
        self._policy = policy
        self._terms = terms
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._positions = positions
        self._update_max_tokens = update_max_tokens
        self._device = device
        self._offload_params = offload_params
        self._offload_optimizer = offload_optimizer
        self._strategy = strategy
        self._process_group = process_group
        self._features = features
        self._optimizer = make_optimizer(
            policy.parameters(),
            strategy=strategy,
            learning_rate=schedule.peak,
            betas=betas,
            weight_decay=weight_decay,
        )
        self._updates = 0  # optimizer updates made; skipped ones do not count
        self._scorer = LocalScorer(
            policy,
            positions=positions,
            max_tokens=score_max_tokens,
            device=device,
            compute_dtype=compute_dtype,
            offload_params=False,  # weights() decides when the policy leaves the device
            process_group=process_group,
            features=features,
        )
        self._reference: Reference | None = reference or (
            self.reference_without_adapters() if policy.has_adapters else None
        )

    def reference_without_adapters(self) -> ReferenceWithoutAdapters:
        """Return the policy without LoRA's adapters, which training leaves as it was: the reference."""
        return ReferenceWithoutAdapters(self, self._scorer)

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        self._wake(optimizer=False)
        return self._scorer.logprobs(groups)

    def full_kl(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See TrainEngine."""
        assert self._reference is not None, "the full KL needs a reference"
        self._wake(optimizer=False)
        return self._scorer.full_kl(groups, self._reference)

    def step(self, groups: Sequence[TrainGroup]) -> Metrics:
        """See TrainEngine. Gradients are the sum over micro-batches; each was divided by the whole step's counts.

        The metrics of all ranks, merged, are those of the update.
        """
        reference = self._reference if self._terms.kl_estimator == "full" else None
        with nullcontext() if reference is None else reference.awake():
            return self._step(groups, reference)

    def _step(self, groups: Sequence[TrainGroup], reference: Reference | None) -> Metrics:
        self._wake(optimizer=True)
        denominators = self._count(groups)
        with_gradient = [group for group in groups if has_gradient(group, regularized=self._terms.regularized)]
        batches = pack_train(with_gradient, max_tokens=self._update_max_tokens, positions=self._positions)
        shows_image = [batch.packed.pixel_values is not None for batch in batches]
        if len(with_gradient) < len(groups):
            # A gradient of zero is not none: the optimizer moves on by its moments. So what is left out leaves a pass
            # that reaches the same parameters.
            had_image = any(group.prompt.vision is not None for group in groups)
            if not batches or (had_image and not any(shows_image)):
                shows_image.append(had_image)
        passes = passes_in_step(shows_image, self._process_group)
        metrics: Metrics = {}
        same_parameters = len(set(passes)) == 1  # without an image the vision tower gets no gradient
        for index, run_dummy_vision in enumerate(passes):
            self._process_group.before_forward(
                self._policy, sync_gradients=index == len(passes) - 1 or not same_parameters
            )
            if index >= len(batches):
                idle_backward(
                    self._policy, self._scorer.precision, reference=reference, run_dummy_vision=run_dummy_vision
                )
                continue
            shares = micro_batch_backward(
                self._policy,
                to_device(batches[index], self._device),
                self._terms,
                denominators,
                self._scorer.precision,
                reference=reference,
                run_dummy_vision=run_dummy_vision,
                gradient_scale=float(self._process_group.size),  # a sharded policy takes the mean over the ranks
            )
            metrics = merge(metrics, shares)
        rate = self._schedule.learning_rate(self._updates + 1)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = float(full_tensor(torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._max_grad_norm)))
        finite = norm < float("inf")  # False for nan as well
        learns = finite and denominators.tokens > 0  # else the optimizer would move on by its moments
        if learns:
            self._optimizer.step()
            self._updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        packed_tokens = float(sum(batch.packed.token_ids.numel() for batch in batches))
        share = metrics.get("actor/pg_loss", Sum(0.0)).value
        [loss] = self._process_group.totals([share])
        update_metrics: dict[str, Metric] = {
            # The micro-batches' shares add up to the loss of one update; a step's updates are averaged.
            "actor/pg_loss": Mean(loss),
            "actor/grad_norm": Mean(norm) if finite else Mean(0.0, 0.0),
            "actor/lr": Mean(rate),
            "actor/skipped_updates": Sum(float(not learns and self._process_group.rank == 0)),
            "actor/micro_batches": Sum(float(len(batches))),
            "actor/packed_tokens": Sum(packed_tokens),
            "actor/packing_fill": Mean(packed_tokens, float(len(batches) * self._update_max_tokens)),
            "actor/skipped_groups": Sum(float(len(groups) - len(with_gradient))),
            **self._policy.update_work(with_gradient),
        }
        remembered, shown = (0, 0) if self._features is None else self._features.pop_metrics()
        if shown:
            update_metrics["actor/vision_remembered"] = Mean(float(remembered), float(shown))
        return {**metrics, **update_metrics}

    @contextmanager
    def dry_run_updates(self) -> Iterator[Callable[[Sequence[TrainGroup]], None]]:
        """Return what makes an update's pass over groups in one row, however long, for nothing.

        Gradients add up until the context ends, and are forgotten then. Of several ranks all are to make the same.
        """
        reference = self._reference if self._terms.kl_estimator == "full" else None
        self._wake(optimizer=False)

        def dry_run(groups: Sequence[TrainGroup]) -> None:
            [batch] = pack_train(groups, max_tokens=sum(map(tokens_of, groups)), positions=self._positions)
            self._process_group.before_forward(self._policy, sync_gradients=False)
            micro_batch_backward(
                self._policy,
                to_device(batch, self._device),
                self._terms,
                Denominators(tokens=len(batch.loss_mask), sequences=batch.num_sequences),
                self._scorer.precision,
                reference=reference,
                run_dummy_vision=batch.packed.pixel_values is not None,
                gradient_scale=1.0,
            )

        try:
            with nullcontext() if reference is None else reference.awake():
                yield dry_run
                # What waits between the copies of a sharded policy would be added to the first update.
                self._process_group.before_forward(self._policy, sync_gradients=True)
                idle_backward(self._policy, self._scorer.precision, reference=reference, run_dummy_vision=True)
        finally:
            self._process_group.reshard(self._policy)
            self._optimizer.zero_grad(set_to_none=True)

    def dry_run(self, groups: Sequence[RolloutGroup]) -> None:
        """Make the pass of logprobs, with a reference at hand that of full_kl, over groups in one row, for nothing."""
        self._wake(optimizer=False)
        self._scorer.dry_run(groups, against=self._reference)

    def use_budgets(self, *, update_max_tokens: int, score_max_tokens: int) -> None:
        """Pack rows of other token budgets from now on."""
        self._update_max_tokens = update_max_tokens
        self._scorer.use_budget(score_max_tokens)

    @property
    def policy(self) -> Policy:
        """What it trains."""
        return self._policy

    @property
    def optimizer_bytes(self) -> int:
        """What the optimizer's states take of this rank's device during an update."""
        elsewhere = next(self._policy.parameters()).device.type != self._device.type  # with the weights, always
        return 0 if elsewhere else self.sizes().optimizer_bytes

    def weights(self) -> NamedTensors:
        """See TrainEngine. Once all have been taken, what is to be offloaded leaves the device."""
        self._wake(optimizer=False)
        yield from self._policy.named_weights()
        if self._offload_params:
            self._policy.to("cpu")
        if self._offload_optimizer:
            self._move_optimizer(torch.device("cpu"))

    def save_state(self, folder: Path, *, model_only: bool) -> Callable[[], None]:
        """See TrainEngine. Writes weights/ (adapter/ with LoRA), optimizer/ and state.json; each rank its part."""
        parts = {self._weights_folder: stage(self._saved_weights())}
        if not model_only:
            parts[OPTIMIZER_FOLDER] = stage(self._optimizer_tensors())
        state = {"updates": self._updates, "strategy": self._strategy}
        model: Any = self._policy.model
        adapter = adapter_config(model, base_model=model.name_or_path) if self._policy.has_adapters else None

        def write() -> None:
            for name, tensors in parts.items():
                save_tensors(tensors, folder / name, group=self._process_group.state_group)
            if self._process_group.rank > 0:
                return
            if not model_only:
                _write_json(folder / STATE_FILE, state)
            if adapter is not None:
                _write_json(folder / ADAPTER_CONFIG, adapter)

        return write

    def load_state(self, folder: Path) -> None:
        """See TrainEngine. How many ranks wrote it does not matter."""
        for name in (self._weights_folder, OPTIMIZER_FOLDER, STATE_FILE):
            if not (folder / name).exists():
                raise CheckpointError(
                    f"{folder} has no {name}: a checkpoint saved with trainer.save_model_only=true cannot be resumed; "
                    "export it and start from it as worker.actor.model.model_path instead. Nor can one of a run with "
                    "LoRA by a run without, or the other way round"
                )
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state["strategy"] != self._strategy:
            raise CheckpointError(
                f"{folder} was saved with worker.actor.optim.strategy={state['strategy']}, "
                f"this run has {self._strategy}"
            )
        self._wake(optimizer=True)
        load_tensors(self._saved_weights(), folder / self._weights_folder, group=self._process_group.state_group)
        self._policy.clear_features()
        self._load_optimizer_tensors(folder / OPTIMIZER_FOLDER)
        self._updates = int(state["updates"])

    def sizes(self) -> Sizes:
        """Return how much memory weights, gradients and optimizer take once training runs; activations not counted."""
        parameters = list(self._policy.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        gradient_bytes = sum(part.numel() * part.element_size() for part in map(on_this_rank, trainable))
        return Sizes(
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in trainable),
            weight_bytes=sum(part.numel() * part.element_size() for part in map(on_this_rank, parameters)),
            gradient_bytes=gradient_bytes,
            optimizer_bytes=sum(state_bytes(part, self._strategy) for part in map(on_this_rank, trainable)),
        )

    def close(self) -> None:
        """See TrainEngine. Nothing but memory is held."""

    @property
    def _weights_folder(self) -> str:
        return ADAPTER_FOLDER if self._policy.has_adapters else WEIGHTS_FOLDER

    def _saved_weights(self) -> dict[str, Tensor]:
        return dict(self._policy.saved_tensors())

    def _count(self, groups: Sequence[TrainGroup]) -> Denominators:
        """Return what the update trains on, on all ranks."""
        ours = count_denominators(sequence.loss_mask for group in groups for sequence in group.sequences)
        tokens, sequences = self._process_group.totals([ours.tokens, ours.sequences])
        return Denominators(int(tokens), int(sequences))

    def _wake(self, *, optimizer: bool) -> None:
        if self._offload_params:
            self._policy.to(self._device)
        if optimizer and self._offload_optimizer:
            self._move_optimizer(self._device)

    def _move_optimizer(self, device: torch.device) -> None:
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if key != "step":  # torch keeps the step count on the CPU by itself
                    state[key] = value.to(device)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._policy.named_parameters()}
        return {
            f"{names[parameter]}/{key}": value.detach().contiguous()
            for parameter, state in self._optimizer.state.items()
            for key, value in state.items()
        }

    def _load_optimizer_tensors(self, folder: Path) -> None:
        """Give every tensor back to its parameter. Raises: CheckpointError if they do not fit."""
        trainable = {name: parameter for name, parameter in self._policy.named_parameters() if parameter.requires_grad}
        wanted: dict[str, Tensor] = {}
        unknown: list[str] = []
        # A parameter that never received a gradient (a vision tower that saw no image) has no state.
        for full in ShardedFiles(folder).tensors:
            name, _, key = full.rpartition("/")
            if name not in trainable:
                unknown.append(full)
            elif key == "step":  # torch keeps the step count on the CPU
                wanted[full] = torch.zeros(())
            else:
                parameter = trainable[name]
                wanted[full] = torch.zeros_like(parameter, dtype=state_dtype(parameter, key, self._strategy))
        keys = {full.rpartition("/")[2] for full in wanted}
        stateful = {full.rpartition("/")[0] for full in wanted}
        incomplete = sorted(f"{name}/{key}" for name in stateful for key in keys if f"{name}/{key}" not in wanted)
        if unknown or incomplete:
            raise CheckpointError(
                f"the optimizer state in {folder} does not fit this model: unknown {sorted(unknown)[:3]}, missing "
                f"{incomplete[:3]} ({len(unknown)} and {len(incomplete)} in all)"
            )
        load_tensors(wanted, folder, group=self._process_group.state_group)
        self._optimizer.state.clear()
        for full, tensor in wanted.items():
            name, _, key = full.rpartition("/")
            self._optimizer.state[trainable[name]][key] = tensor


@dataclass(frozen=True, slots=True)
class ReferenceWithoutAdapters:
    """An engine's policy as if it had no adapters. Satisfies LogprobEngine and step.Reference."""

    engine: LocalTrainEngine
    scorer: LocalScorer

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        with adapters_off(self.scorer.policy.model):
            return self.engine.logprobs(groups)

    def awake(self) -> AbstractContextManager[None]:
        """See step.Reference. It is where the policy is."""
        return nullcontext()

    def predictions(self, packed: PackedGroups, *, run_dummy_vision: bool) -> Predictions:
        """See Policy.predictions."""
        with adapters_off(self.scorer.policy.model):
            return self.scorer.predictions(packed, run_dummy_vision=run_dummy_vision)


def has_gradient(group: TrainGroup, *, regularized: bool) -> bool:
    """Tell whether an update makes a pass for a group: where any token of it that trains has an advantage, or, as in
    LossTerms.regularized, a gradient without one.
    """
    return regularized or any(bool(((part.loss_mask > 0) & (part.advantages != 0)).any()) for part in group.sequences)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
