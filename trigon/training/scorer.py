"""Scores completions without gradient.

LocalScorer is the reference policy's engine, and part of the train engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trigon.data.packing import by_group, pack_rollouts, tokens_of
from trigon.models.features import VisionFeatureCache
from trigon.models.logprobs import Predictions
from trigon.models.lora import adapters_off
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.training.device_memory import Placement
from trigon.training.parallel import passes_in_step
from trigon.training.protocol import LoadPixels, LogprobEngine
from trigon.training.step import Reference, idle_row
from trigon.types import PackedGroups, RolloutGroup, TokenLogprobs


class LocalScorer:
    """Scores completions under a policy. Satisfies LogprobEngine and step.Reference.

    All ranks of the process group call every method together, each with its own groups.

    max_tokens: token budget of a packed row. positions: computes the position ids of a prompt.
    """

    def __init__(
        self,
        policy: Policy,
        placement: Placement,
        *,
        max_tokens: int,
        features: VisionFeatureCache | None = None,
        load_pixels: LoadPixels = list,
    ) -> None:
        """Wrap a policy that is on its device, or sharded over the ranks.

        Args:
            features: cache for a vision tower that does not change; see Policy.use_feature_cache.
            load_pixels: processes the media of groups that are encoded files.
        """
        self.policy = policy
        self.device = placement.device
        self.positions = positions_of(policy.family, policy.model.config)
        self._load_pixels = load_pixels
        self.max_tokens = max_tokens
        self._compute_dtype = placement.compute_dtype
        self._offload_params = placement.offload_params
        self._process_group = process_group = placement.process_group
        self._placement = placement
        if features is not None:
            policy.use_feature_cache(
                features, all_reduce_max=lambda number: int(process_group.all_reduce_max([number])[0])
            )

    def precision(self) -> AbstractContextManager[object]:
        """Return the context in which the policy computes.

        Autocast, or nothing if all weights have the dtype already.
        """
        dtype = self._compute_dtype
        if dtype is None or all(parameter.dtype == dtype for parameter in self.policy.model.parameters()):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """See step.Reference. Moves offloaded weights only; frees weights that were gathered."""
        if self._offload_params:
            self.policy.to(self.device)
        try:
            yield
        finally:
            self._process_group.reshard(self.policy)
            if self._offload_params:
                self.policy.to("cpu")

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        with self._placement.explain_out_of_memory("log-probabilities", groups, max_tokens=self.max_tokens):
            return [[each[0] for each in group] for group in self.score(groups, self._row_logprobs)]

    def full_kl(self, groups: Sequence[RolloutGroup], reference: Reference) -> list[list[Tensor]]:
        """Return the KL of this policy and a reference at each token, as logprobs does."""
        explained = self._placement.explain_out_of_memory("log-probabilities", groups, max_tokens=self.max_tokens)
        with explained, reference.awake():
            scored = self.score(groups, partial(self._row_kl, reference))
        return [[each[0] for each in group] for group in scored]

    def dry_run(self, groups: Sequence[RolloutGroup], *, against: Reference | None = None) -> None:
        """Make the pass of logprobs over all groups in one row, and discard the result.

        against: make the pass of full_kl instead.
        """
        score = self._row_logprobs if against is None else partial(self._row_kl, against)
        with nullcontext() if against is None else against.awake():
            self.score(groups, score, max_tokens=sum(map(tokens_of, groups)))

    def score(
        self,
        groups: Sequence[RolloutGroup],
        score: Callable[[PackedGroups, bool], Tensor],
        *,
        max_tokens: int | None = None,
    ) -> list[list[Tensor]]:
        """Return what passes without gradient give for each completion: [K, S] float32 on the CPU.

        Args:
            groups: the groups of this rank; may be empty.
            score: makes the pass over a row, and returns [K, S]; gets the row, and whether the
                vision tower runs if it has no images.
            max_tokens: used in place of the budget.
        """
        values: list[Tensor] = []
        with self.awake():
            rows = pack_rollouts(
                self._load_pixels(groups), max_tokens=max_tokens or self.max_tokens, positions=self.positions
            )
            passes = passes_in_step([bool(row.packed.visions) for row in rows], self._process_group)
            with torch.no_grad(), self.precision():
                for index, run_dummy_vision in enumerate(passes):
                    packed = rows[index].packed if index < len(rows) else idle_row(self.policy)
                    values.append(score(packed, run_dummy_vision))
            if not rows:
                return []
            # Copied together, since each copy to the host waits for the passes before it.
            scored = torch.cat(values[: len(rows)], dim=1).cpu()
        return by_group(rows, torch.split(scored, [value.shape[1] for value in values[: len(rows)]], dim=1))

    def predictions(self, packed: PackedGroups, *, run_dummy_vision: bool) -> Predictions:
        """See Policy.predictions."""
        with self.precision():
            return self.policy.predictions(packed, run_dummy_vision=run_dummy_vision)

    def _row_logprobs(self, packed: PackedGroups, run_dummy_vision: bool) -> Tensor:
        outputs: TokenLogprobs = self.policy(packed, run_dummy_vision=run_dummy_vision)
        return outputs.logprobs[None]

    def _row_kl(self, reference: Reference, packed: PackedGroups, run_dummy_vision: bool) -> Tensor:
        against = reference.predictions(packed, run_dummy_vision=run_dummy_vision)
        kl: Tensor = self.policy(packed, run_dummy_vision=run_dummy_vision, against=against).kl
        return kl[None]


@dataclass(frozen=True, slots=True)
class ReferenceWithoutAdapters:
    """The policy with its LoRA adapters disabled. Satisfies LogprobEngine and step.Reference.

    engine: the train engine. scorer: the engine's scorer, of the same policy.
    """

    engine: LogprobEngine
    scorer: LocalScorer

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See LogprobEngine."""
        with self._as_reference():
            return self.engine.logprobs(groups)

    def awake(self) -> AbstractContextManager[None]:
        """See step.Reference. The weights are the policy's, which is awake already."""
        return nullcontext()

    def predictions(self, packed: PackedGroups, *, run_dummy_vision: bool) -> Predictions:
        """See Policy.predictions."""
        with self._as_reference():
            return self.scorer.predictions(packed, run_dummy_vision=run_dummy_vision)

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        policy = self.scorer.policy
        with adapters_off(policy.model), policy.own_routing():
            yield
