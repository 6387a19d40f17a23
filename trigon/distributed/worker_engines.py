"""The engines that a worker hosts, and how they are built in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trigon.data.media_processing import MediaProcessor
from trigon.rollout.protocol import RolloutEngine
from trigon.training.critic import LocalCriticEngine
from trigon.training.fsdp import TorchProcessGroup
from trigon.training.protocol import LogprobEngine, Sizes, TunableEngine


@dataclass(frozen=True, slots=True, eq=False)
class WorkerEngines:
    """The engines of one worker.

    trainer, rollout: None in a worker that only samples, or only trains. reference: None if no loss
    term needs one. images: loads the pixels of prompts to be sampled; trainer and reference load
    from it themselves. None for a text model. replica_rank: this worker's index among the ranks
    that sample the same prompts together (tensor parallelism); only index 0 returns the
    completions. has_episodes: rollout has environments or tools, which of these ranks only index 0
    has, and loads the pixels of prompts itself. critic: None but for the
    estimator gae.
    """

    trainer: TunableEngine | None
    reference: LogprobEngine | None
    rollout: RolloutEngine | None
    images: MediaProcessor | None
    replica_rank: int
    has_episodes: bool = False
    critic: LocalCriticEngine | None = None


Opened = tuple[Sizes, Sizes | None]
"""The sizes of the trainer's model and of the critic's on a rank; None without a critic."""


class OpenWorkerEngines(Protocol):
    """Builds a worker's engines. Called in the worker, on all ranks at once."""

    def __call__(self, process_group: TorchProcessGroup) -> WorkerEngines: ...
