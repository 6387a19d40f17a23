"""The train engine of one process on one device. Knows the policy and its optimizer; refuses to know Ray and vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trigon.algorithms.reduce import count_denominators
from trigon.data.packing import Positions, pack_train
from trigon.errors import CheckpointError, ModelError
from trigon.metrics import Mean, Metric, Metrics, Sum, merge
from trigon.models.policy import Policy
from trigon.training.optim import Schedule, Strategy, make_optimizer, state_bytes, state_dtype
from trigon.training.step import LossTerms, micro_batch_backward, score_rollouts, to_device
from trigon.types import NamedTensors, RolloutGroup, TrainGroup

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a policy and its training are, at their peak. parameters, trainable: numbers; the rest in bytes."""

    parameters: int
    trainable: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


class LocalScorer:
    """Scores completions under a policy that somebody else trains, or nobody: the reference."""

    def __init__(
        self,
        policy: Policy,
        *,
        positions: Positions,
        max_tokens: int,
        device: torch.device,
        compute_dtype: torch.dtype,
        offload_params: bool,
    ) -> None:
        """max_tokens: token budget of a packed row. offload_params: keep the weights on the CPU between calls."""
        self.policy = policy
        self.device = device
        self._positions = positions
        self._max_tokens = max_tokens
        self._compute_dtype = compute_dtype
        self._offload_params = offload_params

    def precision(self) -> AbstractContextManager[object]:
        """Return the context in which the policy computes: autocast, unless the weights have the dtype already."""
        weights_dtype = next(self.policy.parameters()).dtype
        return torch.autocast(self.device.type, dtype=self._compute_dtype, enabled=self._compute_dtype != weights_dtype)

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        self.policy.to(self.device)
        result = score_rollouts(
            self.policy,
            groups,
            max_tokens=self._max_tokens,
            positions=self._positions,
            precision=self.precision,
            device=self.device,
        )
        if self._offload_params:
            self.policy.to("cpu")
        return result


class LocalTrainEngine:
    """TrainEngine in one process."""

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
        compute_dtype: torch.dtype,
        offload_params: bool,
        offload_optimizer: bool,
    ) -> None:
        """update_max_tokens, score_max_tokens: token budgets of a packed row with and without gradient.

        offload_params, offload_optimizer: keep them on the CPU while the rollout engine has the device.
        """
        self._policy = policy.to(device)
        self._terms = terms
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._positions = positions
        self._update_max_tokens = update_max_tokens
        self._device = device
        self._offload_params = offload_params
        self._offload_optimizer = offload_optimizer
        self._strategy = strategy
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
        )

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        return self._scorer.logprobs(groups)

    def step(self, groups: Sequence[TrainGroup]) -> Metrics:
        """See TrainEngine. Gradients are the sum over micro-batches; each was divided by the whole step's counts."""
        self._wake()
        batches = pack_train(groups, max_tokens=self._update_max_tokens, positions=self._positions)
        denominators = count_denominators(sequence.loss_mask for group in groups for sequence in group.sequences)
        metrics = merge(
            *(
                micro_batch_backward(
                    self._policy,
                    to_device(batch, self._device),
                    self._terms,
                    denominators,
                    self._scorer.precision,
                )
                for batch in batches
            )
        )
        rate = self._schedule.learning_rate(self._updates + 1)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = float(torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._max_grad_norm))
        finite = norm < float("inf")  # False for nan as well
        if finite:
            self._optimizer.step()
            self._updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        update_metrics: dict[str, Metric] = {
            # The micro-batches' shares add up to the loss of one update; a step's updates are averaged.
            "actor/pg_loss": Mean(metrics.pop("actor/pg_loss").value),
            "actor/grad_norm": Mean(norm) if finite else Mean(0.0, 0.0),
            "actor/lr": Mean(rate),
            "actor/skipped_updates": Sum(float(not finite)),
            "actor/micro_batches": Sum(float(len(batches))),
            "actor/packed_tokens": Sum(float(sum(batch.packed.token_ids.numel() for batch in batches))),
        }
        return merge(metrics, update_metrics)

    def weights(self) -> NamedTensors:
        """See TrainEngine. Once all have been taken, what is to be offloaded leaves the device."""
        yield from self._policy.named_weights()
        if self._offload_params:
            self._policy.to("cpu")
        if self._offload_optimizer:
            self._move_optimizer(torch.device("cpu"))

    def save_state(self, folder: Path, *, model_only: bool) -> None:
        """See TrainEngine. Writes weights.safetensors, optimizer.safetensors and state.json."""
        save_file({name: tensor.contiguous() for name, tensor in self._policy.named_weights()}, folder / WEIGHTS_FILE)
        if model_only:
            return
        save_file(self._optimizer_tensors(), folder / OPTIMIZER_FILE)
        state = {"updates": self._updates, "strategy": self._strategy}
        (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    def load_state(self, folder: Path) -> None:
        """See TrainEngine."""
        for name in (WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE):
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{folder} has no {name}: a checkpoint saved with trainer.save_model_only=true cannot be resumed; "
                    "export it and start from it as worker.actor.model.model_path instead"
                )
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state["strategy"] != self._strategy:
            raise CheckpointError(
                f"{folder} was saved with worker.actor.optim.strategy={state['strategy']}, "
                f"this run has {self._strategy}"
            )
        self._load_weights(load_file(folder / WEIGHTS_FILE), folder)
        self._load_optimizer_tensors(load_file(folder / OPTIMIZER_FILE), folder)
        self._updates = int(state["updates"])

    def sizes(self) -> Sizes:
        """Return how much memory weights, gradients and optimizer take once training runs; activations not counted."""
        parameters = list(self._policy.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trainable)
        return Sizes(
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in trainable),
            weight_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            gradient_bytes=gradient_bytes,
            optimizer_bytes=sum(state_bytes(parameter, self._strategy) for parameter in trainable),
        )

    def close(self) -> None:
        """See TrainEngine. Nothing but memory is held."""

    def _load_weights(self, tensors: dict[str, Tensor], folder: Path) -> None:
        own = {name: tensor.dtype for name, tensor in self._policy.named_weights()}
        retyped = sorted(name for name, tensor in tensors.items() if name in own and tensor.dtype != own[name])
        if retyped:
            raise CheckpointError(
                f"{folder} holds {retyped[0]} as {tensors[retyped[0]].dtype}, this run as {own[retyped[0]]} "
                f"({len(retyped)} such tensors in all); set worker.actor.fsdp.torch_dtype as it was when it was saved"
            )
        try:
            self._policy.load_named_weights(tensors)
        except ModelError as error:
            raise CheckpointError(f"{folder} cannot be resumed: {error}") from error

    def _wake(self) -> None:
        self._policy.to(self._device)
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

    def _load_optimizer_tensors(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Give every tensor back to its parameter. Raises: CheckpointError if they do not fit."""
        parameters = dict(self._policy.named_parameters())
        keys = {key.rpartition("/")[2] for key in tensors}
        trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        # A parameter that never received a gradient (a vision tower that saw no image) has no state.
        stateful = {key.rpartition("/")[0] for key in tensors}
        unknown = sorted(stateful - trainable.keys())
        incomplete = sorted(
            f"{name}/{key}" for name in stateful & trainable.keys() for key in keys if f"{name}/{key}" not in tensors
        )
        misshapen = sorted(
            full
            for full, tensor in tensors.items()
            if not full.endswith("/step")
            and (name := full.rpartition("/")[0]) in trainable
            and (
                tensor.shape != trainable[name].shape
                or tensor.dtype != state_dtype(trainable[name], full.rpartition("/")[2], self._strategy)
            )
        )
        if unknown or incomplete or misshapen:
            raise CheckpointError(
                f"the optimizer state in {folder} does not fit this model: "
                f"unknown {unknown[:3]}, missing {incomplete[:3]}, of another shape or dtype {misshapen[:3]} "
                f"({len(unknown)}, {len(incomplete)} and {len(misshapen)} in all)"
            )
        self._optimizer.state.clear()
        for full, tensor in tensors.items():
            name, _, key = full.rpartition("/")
            parameter = trainable[name]
            self._optimizer.state[parameter][key] = tensor if key == "step" else tensor.to(parameter.device)
