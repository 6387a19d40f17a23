"""The critic of one process on one device: alone, or one rank of several.

LocalCriticEngine has a model of its own, LocalTrunkCritic a head on the policy's trunk. Packing,
the optimizer, checkpoints and the skipping of updates are those of LocalTrainEngine; the model, its
loss and the names of its metrics are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from trigon.algorithms.reduce import Denominators
from trigon.algorithms.unread import UnreadMetrics
from trigon.config.critic import as_critic
from trigon.data.packing import Positions, tokens_of
from trigon.errors import CheckpointError
from trigon.metrics import Metrics
from trigon.models.features import VisionFeatureCache
from trigon.models.value import ActorCritic, ValueModel
from trigon.training.checkpointing import Saved
from trigon.training.local import LocalTrainEngine
from trigon.training.protocol import LoadPixels
from trigon.training.settings import Placement, TrainSettings
from trigon.training.step import idle_row, score_rows
from trigon.training.value_step import idle_value_backward, value_backward
from trigon.training.value_terms import ValueTerms
from trigon.types import MicroBatch, PackedGroups, RolloutGroup, TokenLogprobs, TrainGroup


class LocalCriticEngine(LocalTrainEngine):
    """The critic of one process. Satisfies CriticEngine.

    All ranks of the process group call every method together, each with its own groups. What is
    offloaded leaves the device at the end of each call.
    """

    name: ClassVar[str] = "critic"
    loss_key: ClassVar[str] = "critic/vf_loss"
    counts_work: ClassVar[bool] = True  # an update has the operations that update_work counts

    def __init__(
        self,
        model: ValueModel | ActorCritic,
        settings: TrainSettings,
        placement: Placement,
        *,
        positions: Positions,
        features: VisionFeatureCache | None = None,
        load_pixels: LoadPixels = list,
        before_use: Callable[[], object] = lambda: None,
    ) -> None:
        """Make the optimizer of a value model.

        Args: those of LocalTrainEngine, and
            before_use: called before the critic takes memory, to offload the policy.
        """
        super().__init__(model, settings, placement, positions=positions, features=features, load_pixels=load_pixels)
        self._before_use = before_use
        self._feature_counts = (0, 0)  # hits and lookups of the critic, of a cache that may be shared
        self._score_max_tokens = settings.score_max_tokens

    def values(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See CriticEngine."""
        explained = self._placement.explain_out_of_memory("values", groups, max_tokens=self._score_max_tokens)
        with explained, self._counting_apart():
            scored = self._score(groups, max_tokens=self._score_max_tokens)
        self.offload()
        return [[_with_last(each) for each in group] for group in scored]

    def step(self, groups: Sequence[TrainGroup]) -> Metrics:
        """See CriticEngine."""
        with self._counting_apart():
            metrics = dict(super().step(groups))
        self.offload()
        work = metrics.pop("actor/model_tflops", None)
        if work is not None and self.counts_work:
            metrics["critic/model_tflops"] = work
        return metrics

    def load_state(self, folder: Path) -> None:
        """See CriticEngine."""
        try:
            super().load_state(folder)
        except CheckpointError as error:
            raise type(error)(as_critic(str(error))) from error
        self.offload()

    def dry_run(self, groups: Sequence[RolloutGroup]) -> None:
        """See TunableEngine: the pass of values."""
        self._score(groups, max_tokens=sum(map(tokens_of, groups)))

    def use_budgets(self, *, update_max_tokens: int, score_max_tokens: int) -> None:
        """See TunableEngine."""
        super().use_budgets(update_max_tokens=update_max_tokens, score_max_tokens=score_max_tokens)
        self._score_max_tokens = score_max_tokens

    def _score(self, groups: Sequence[RolloutGroup], *, max_tokens: int) -> list[list[Tensor]]:
        """Return [2, S] for each completion: values before and after each token."""
        return self._score_with(groups, self._score_row, max_tokens=max_tokens)

    def _score_with(
        self, groups: Sequence[RolloutGroup], score: Callable[[PackedGroups, bool], Tensor], *, max_tokens: int
    ) -> list[list[Tensor]]:
        """Return what score_rows returns for the groups. score: see score_rows."""
        self._wake(optimizer=False)
        return score_rows(
            self._policy,
            self._load_pixels(groups),
            score,
            max_tokens=max_tokens,
            positions=self._positions,
            precision=self._scorer.precision,
            process_group=self._process_group,
        )

    @contextmanager
    def _counting_apart(self) -> Iterator[None]:
        """Count lookups of image features in this context apart from those of the policy."""
        if self.features is None:
            yield
            return
        others = self.features.swap_counts(self._feature_counts)
        try:
            yield
        finally:
            self._feature_counts = self.features.swap_counts(others)

    def _wake(self, *, optimizer: bool) -> None:
        self._before_use()
        super()._wake(optimizer=optimizer)

    def _score_row(self, packed: PackedGroups, run_dummy_vision: bool) -> Tensor:
        return self._values(packed, run_dummy_vision=run_dummy_vision, with_next=True)

    def _values(self, packed: PackedGroups, *, run_dummy_vision: bool, with_next: bool = False) -> Tensor:
        """Return the values of a row; see ValueModel.forward."""
        values: Tensor = self._policy(packed, run_dummy_vision=run_dummy_vision, with_next=with_next)
        return values

    def _backward(
        self,
        batch: MicroBatch,
        denominators: Denominators,
        *,
        run_dummy_vision: bool,
        gradient_scale: float,
        on_outputs: Callable[[TokenLogprobs], None] | None = None,
    ) -> UnreadMetrics:
        assert on_outputs is None, "a critic computes no log-probabilities"
        assert isinstance(self._terms, ValueTerms), "a critic has a value loss"
        return value_backward(
            self._values,
            batch,
            self._terms,
            denominators,
            self._scorer.precision,
            run_dummy_vision=run_dummy_vision,
            gradient_scale=gradient_scale,
        )

    def _idle_backward(self, run_dummy_vision: bool) -> None:
        row = idle_row(self._policy)
        idle_value_backward(self._values, row, self._scorer.precision, run_dummy_vision=run_dummy_vision)


class LocalTrunkCritic(LocalCriticEngine):
    """A value head on the trunk of the policy's engine. Satisfies TrunkCriticEngine.

    It has an optimizer and a checkpoint of its own. Updates of the policy's engine update the head
    too, from the same passes; step updates the head alone, for steps in which the policy rests.
    """

    counts_work: ClassVar[bool] = False

    def __init__(
        self,
        policy: ActorCritic,
        settings: TrainSettings,
        placement: Placement,
        *,
        trainer: LocalTrainEngine,
        positions: Positions,
        load_pixels: LoadPixels = list,
    ) -> None:
        """Make the optimizer of the head, and tell the policy's engine to update it too.

        Args: those of LocalTrainEngine, and
            placement: that of the policy, which offloads the head with the trunk.
            trainer: the engine of the policy.
        """
        self._head = policy.value_head
        super().__init__(
            policy,
            settings,
            replace(placement, offload_params=False, offload_optimizer=False),
            positions=positions,
            load_pixels=load_pixels,
        )
        self._trunk = policy
        self.features = trainer.features  # which the trunk uses; the lookups of the critic are counted apart
        self._trainer = trainer
        trainer.update_together_with(self)

    def logprobs_and_values(self, groups: Sequence[RolloutGroup]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """See TrunkCriticEngine."""
        with self._placement.explain_out_of_memory("values", groups, max_tokens=self._score_max_tokens):
            scored = self._score_with(groups, self._score_row_with_logprobs, max_tokens=self._score_max_tokens)
        logprobs = [[each[0] for each in group] for group in scored]
        return logprobs, [[_with_last(each[1:]) for each in group] for group in scored]

    def offload(self) -> None:
        """Do nothing: the engine of the policy offloads the head with its trunk."""

    def dry_run(self, groups: Sequence[RolloutGroup]) -> None:
        """Do nothing: the dry runs of the policy's engine are those of both."""

    @property
    def _trained(self) -> nn.Module:
        return self._head

    @property
    def _saved(self) -> Saved:
        return self._head

    def _score_row_with_logprobs(self, packed: PackedGroups, run_dummy_vision: bool) -> Tensor:
        outputs, values = self._trunk.with_values(packed, run_dummy_vision=run_dummy_vision, with_next=True)
        return torch.cat([outputs.logprobs[None], values])

    def _values(self, packed: PackedGroups, *, run_dummy_vision: bool, with_next: bool = False) -> Tensor:
        return self._trunk.values(packed, run_dummy_vision=run_dummy_vision, with_next=with_next)

    def _wake(self, *, optimizer: bool) -> None:
        self._trainer._wake(optimizer=False)


def _with_last(scored: Tensor) -> Tensor:
    """Return the values before each of S tokens, and that after the last: [2, S] -> [S + 1]."""
    before, after = scored.float()
    return torch.cat([before, after[-1:]])
