"""The interfaces of train engines.

The single-process engine, the worker group and the fake engine implement TrainEngine. What needs an
engine on its own device (workers, the measurement of token budgets) uses LocalTrainEngine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from trigon.metrics import Metrics
from trigon.types import RolloutGroup, TokenLogprobs, TrainGroup, WeightsHandle

Group = TypeVar("Group", RolloutGroup, TrainGroup)

ModelName = Literal["actor", "critic"]
"""What a run has a trained model for: the prefix of its metrics, and its section in worker."""

SKIPPED_GRAD_NORM = "skipped_grad_norm"
"""Key of the gradient's norm in the metrics of an update that was skipped because of it."""


GroupOutputs = dict[int, Sequence[TokenLogprobs] | None]
"""What the forward passes of an update compute for the completions of groups, by the group's index.

It is computed with the weights from before the update: float32 [S] on the CPU, for the S sampled
tokens of a completion; kl is None. None for a group without a pass, such as one without gradient.
"""


class LoadPixels(Protocol):
    """Processes the media of groups that are encoded files, in the process of the engine."""

    def __call__(self, groups: Sequence[Group], /) -> list[Group]:
        """Return the groups, with pixel values in place of encoded files."""
        ...


class LogprobEngine(Protocol):
    """Scores completions: the reference policy, or the policy before an update."""

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """Return log-probabilities without gradient.

        Returns: for each group, for each rollout, float32 [S] on the CPU, for its S sampled tokens.
        """
        ...


class TrainedModel(Protocol):
    """Holds a model and its optimizer."""

    def step(self, groups: Sequence[TrainGroup], outputs: GroupOutputs | None = None) -> Metrics:
        """Make one optimizer update from these groups (one mini-batch) and return its metrics.

        An update whose gradient is not finite, or that has no trainable token, is skipped and
        counted in actor/skipped_updates (critic/ for a critic). An update whose gradient is not
        finite also counts in actor/nonfinite_updates, and has its norm as SKIPPED_GRAD_NORM.
        outputs: receives the outputs of the groups whose indices are its keys, if they have any.
        """
        ...

    def save_state(self, folder: Path, *, model_only: bool) -> Callable[[], None]:
        """Copy the state to host memory, and return a function that writes it into a folder.

        The function may run in another thread while training continues. It writes safetensors and
        JSON files only.

        Args:
            folder: exists when the function is called.
            model_only: leave out the optimizer states, without which training cannot be resumed.
        Raises: NotFiniteError if a weight or an optimizer state to be saved is not finite.
        """
        ...

    def load_state(self, folder: Path) -> None:
        """Restore what save_state wrote, bit for bit.

        Raises: CheckpointError unless the names, shapes and dtypes of all tensors match.
        """
        ...


class TrainEngine(TrainedModel, LogprobEngine, Protocol):
    """Holds the policy and its optimizer."""

    def full_kl(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """Return the exact KL of policy and reference at each token, in the format of logprobs.

        Only for engines that were built with a reference.
        """
        ...

    def weights(self) -> WeightsHandle:
        """Return a handle of the policy's weights for a rollout engine; no weight is copied.

        Optimizer states that are offloaded leave the device at once, before the rollout engine
        allocates memory for its weights. Ask for a new handle for each sync.
        Raises: NotFiniteError if a weight that may have changed since the last call is not finite.
        """
        ...


class CriticEngine(TrainedModel, Protocol):
    """Holds a critic, which estimates the reward that is to come, and its optimizer.

    The groups of an update have values and returns. A critic computes no outputs.
    """

    def values(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """Return the values of the states of each completion, without gradient.

        Returns: for each group, for each rollout, float32 [S + 1] on the CPU: of the state before
        each of S sampled tokens, and of the state after the last one.
        """
        ...


@runtime_checkable
class TrunkCriticEngine(CriticEngine, Protocol):
    """A critic on the policy's trunk. TrainEngine.step updates both; step updates the critic alone.

    The metrics of TrainEngine.step then include the metrics of the critic's loss.
    """

    def logprobs_and_values(self, groups: Sequence[RolloutGroup]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return what TrainEngine.logprobs and values do, from one pass."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of a policy, and the memory that training it needs on each rank without activations.

    parameters, trainable: numbers of parameters of the full policy, adapters included.
    weight_bytes, gradient_bytes, optimizer_bytes: bytes on a rank during an update.
    """

    parameters: int
    trainable: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
