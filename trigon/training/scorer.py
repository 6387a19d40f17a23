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

from trigon.data.packing import Positions, tokens_of
from trigon.models.features import VisionFeatureCache
from trigon.models.logprobs import Predictions
from trigon.models.lora import adapters_off
from trigon.models.policy import Policy
from trigon.training.device_memory import Placement
from trigon.training.protocol import LoadPixels, LogprobEngine
from trigon.training.step import Reference, score_rows
from trigon.types import PackedGroups, RolloutGroup, TokenLogprobs


class LocalScorer:
    """Scores completions under a policy. Satisfies LogprobEngine and step.Reference.

    All ranks of the process group call every method together, each with its own groups.

    max_tokens: token budget of a packed row.
    """

    def __init__(
        self,
        policy: Policy,
        placement: Placement,
        *,
        positions: Positions,
        max_tokens: int,
        features: VisionFeatureCache | None = None,
        load_pixels: LoadPixels = list,
    ) -> None:
        """Wrap a policy that is on its device, or sharded over the ranks.

        Args:
            positions: computes the position ids of a prompt.
            features: cache for a vision tower that does not change; see Policy.use_feature_cache.
            load_pixels: processes the media of groups that are encoded files.
        """
        self.policy = policy
        self.device = placement.device
        self._positions = positions
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

        score: see score_rows. max_tokens: used in place of the budget.
        """
        with self.awake():
            return score_rows(
                self.policy,
                self._load_pixels(groups),
                score,
                max_tokens=self.max_tokens if max_tokens is None else max_tokens,
                positions=self._positions,
                precision=self.precision,
                process_group=self._process_group,
            )

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
