"""The critic of one process on one device: alone, or one rank of several.

LocalCriticEngine has a model of its own, LocalTrunkCritic a head on the policy's trunk. Packing,
the optimizer, checkpoints and the skipping of updates come from LocalTrainEngine; the model and its
loss do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from trigon.config.plan import ModelPlan
from trigon.config.schema import Config
from trigon.data.packing import tokens_of
from trigon.metrics import Metric, Metrics
from trigon.models.features import VisionFeatureCache
from trigon.models.value import ActorCritic, ValueModel
from trigon.training.checkpointing import Saved
from trigon.training.device_memory import Placement
from trigon.training.local import LocalTrainEngine
from trigon.training.protocol import GroupOutputs, LoadPixels, ModelName
from trigon.training.step import ValueLoss
from trigon.types import PackedGroups, RolloutGroup, TrainGroup


class LocalCriticEngine(LocalTrainEngine):
    """The critic of one process. Satisfies CriticEngine.

    All ranks of the process group call every method together, each with its own groups. What is
    offloaded leaves the device at the end of each call.
    """

    name: ModelName = "critic"

    def __init__(
        self,
        model: ValueModel | ActorCritic,
        config: Config,
        plan: ModelPlan,
        placement: Placement,
        *,
        features: VisionFeatureCache | None = None,
        load_pixels: LoadPixels = list,
        before_use: Callable[[], object] = lambda: None,
    ) -> None:
        """Make the optimizer of a value model.

        Args: the arguments of LocalTrainEngine, and
            before_use: called before the critic takes memory, to offload the policy.
        """
        super().__init__(model, config, plan, placement, features=features, load_pixels=load_pixels)
        self._before_use = before_use
        self._feature_counts = (0, 0)  # hits and lookups of the critic, in a cache that may be shared

    def values(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """See CriticEngine."""
        explained = self._placement.explain_out_of_memory("values", groups, max_tokens=self._scorer.max_tokens)
        with explained, self._counting_apart():
            scored = self._score(groups, partial(self._values, with_next=True))
        self.offload()
        return [[_with_last(each) for each in group] for group in scored]

    def step(self, groups: Sequence[TrainGroup], outputs: GroupOutputs | None = None) -> Metrics:
        """See CriticEngine."""
        with self._counting_apart():
            metrics = super().step(groups)
        self.offload()
        return metrics

    def load_state(self, folder: Path) -> None:
        """See CriticEngine."""
        super().load_state(folder)
        self.offload()

    def dry_run(self, groups: Sequence[RolloutGroup]) -> None:
        """See LocalTrainEngine: the pass of values."""
        self._score(groups, partial(self._values, with_next=True), max_tokens=sum(map(tokens_of, groups)))

    def _score(
        self,
        groups: Sequence[RolloutGroup],
        score: Callable[[PackedGroups, bool], Tensor],
        *,
        max_tokens: int | None = None,
    ) -> list[list[Tensor]]:
        """See LocalScorer.score."""
        self.wake(optimizer=False)
        return self._scorer.score(groups, score, max_tokens=max_tokens)

    @contextmanager
    def _counting_apart(self) -> Iterator[None]:
        """Count lookups of image features in this context apart from the policy's."""
        if self.features is None:
            yield
            return
        others = self.features.swap_counts(self._feature_counts)
        try:
            yield
        finally:
            self._feature_counts = self.features.swap_counts(others)

    def wake(self, *, optimizer: bool) -> None:
        self._before_use()
        super().wake(optimizer=optimizer)

    def _make_loss(self) -> ValueLoss:
        return ValueLoss(self.policy, self._config, self._scorer.precision, values=self._values)

    def _values(self, packed: PackedGroups, run_dummy_vision: bool, *, with_next: bool = False) -> Tensor:
        """Return the values of a row; see ValueModel.forward."""
        values: Tensor = self.policy(packed, run_dummy_vision=run_dummy_vision, with_next=with_next)
        return values


class LocalTrunkCritic(LocalCriticEngine):
    """A value head on the trunk of the policy's engine. Satisfies TrunkCriticEngine.

    It has an optimizer and a checkpoint of its own. Updates of the policy's engine update the head
    too, from the same passes; step updates the head alone, for steps in which the policy is not
    updated.
    """

    def __init__(
        self,
        policy: ActorCritic,
        config: Config,
        plan: ModelPlan,
        placement: Placement,
        *,
        trainer: LocalTrainEngine,
        load_pixels: LoadPixels = list,
    ) -> None:
        """Make the optimizer of the head, which the policy's engine updates too.

        Args: the arguments of LocalTrainEngine, and
            placement: the placement of the policy, which offloads the head with the trunk.
            trainer: the engine of the policy.
        """
        self._head = policy.value_head
        super().__init__(
            policy,
            config,
            plan,
            replace(placement, offload_params=False, offload_optimizer=False),
            load_pixels=load_pixels,
        )
        self._trunk = policy
        self.features = trainer.features  # which the trunk uses; the lookups of the critic are counted apart
        self._trainer = trainer
        trainer.update_too(self._trained)

    def logprobs_and_values(self, groups: Sequence[RolloutGroup]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """See TrunkCriticEngine."""
        with self._placement.explain_out_of_memory("values", groups, max_tokens=self._scorer.max_tokens):
            scored = self._score(groups, self._score_row_with_logprobs)
        logprobs = [[each[0] for each in group] for group in scored]
        return logprobs, [[_with_last(each[1:]) for each in group] for group in scored]

    def offload(self) -> None:
        """Do nothing: the engine of the policy offloads the head with its trunk."""

    @property
    def _module(self) -> nn.Module:
        return self._head

    def _count_work(self, groups: Sequence[TrainGroup]) -> dict[str, Metric]:
        return {}  # the trunk computes it, whose engine counts its own updates

    @property
    def _saved(self) -> Saved:
        return self._head

    def _score_row_with_logprobs(self, packed: PackedGroups, run_dummy_vision: bool) -> Tensor:
        outputs, values = self._trunk.with_values(packed, run_dummy_vision=run_dummy_vision, with_next=True)
        return torch.cat([outputs.logprobs[None], values])

    def _values(self, packed: PackedGroups, run_dummy_vision: bool, *, with_next: bool = False) -> Tensor:
        return self._trunk.values(packed, run_dummy_vision=run_dummy_vision, with_next=with_next)

    def wake(self, *, optimizer: bool) -> None:
        self._trainer.wake(optimizer=False)


def _with_last(scored: Tensor) -> Tensor:
    """Return the values before S tokens, and the value after the last: [2, S] -> [S + 1]."""
    before, after = scored.float()
    return torch.cat([before, after[-1:]])
