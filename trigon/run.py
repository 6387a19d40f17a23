"""What a training run consists of: its parts, already built, and the state between its steps.

trigon.assemble makes a Run, and trigon.loop runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trigon.algorithms.kl import AdaptiveKl
from trigon.checkpoint.store import CheckpointStore, Finish
from trigon.config.plan import Plan
from trigon.hooks import Hooks
from trigon.report.reporter import Reporter
from trigon.report.watch import Watch
from trigon.rewards.pool import RewardPool
from trigon.rollout.buffer import RolloutBuffer
from trigon.rollout.parity import ParityCheck
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.validation import Evaluator
from trigon.system.grace import Grace
from trigon.system.resuming import SameCommand
from trigon.train_groups import AdvantageSettings
from trigon.training.protocol import CriticEngine, LogprobEngine, TrainEngine
from trigon.training.updates import Updater


class SaveState(Protocol):
    """Writes the engines' part of a checkpoint into a folder.

    Or copies it, and returns a function that writes the copy.
    """

    def __call__(self, folder: Path) -> Finish | None: ...


@dataclass(frozen=True, slots=True)
class Intervals:
    """When to validate, save and show generations, in steps; 0 is never.

    The last step validates if validate_last, and always saves. validate_only: validate the loaded
    weights, and make no step. generations_shown: completions printed per validation.
    train_samples_every: when the loggers get completions of a step.
    """

    validate_first: bool
    validate_only: bool
    validate_every: int
    validate_last: bool
    save_every: int
    generations_shown: int
    train_samples_every: int


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a training run, already built.

    buffer: gives each step its groups; None if the run only validates.
    rollout: samples validations. val_rewards: scores them.
    reference: None where no term needs its log-probabilities.
    kl: the initial coefficient of a KL in the reward. needs_old_logprobs: see
    train_groups.prepare_groups.
    evaluator: None where there are no validation prompts.
    token_groups: groups of each step and validation that are recorded with per-token values.
    should_stop: asked after each step; True saves and ends the run.
    defer_interrupts: a context around the steps, in which an interrupt (Ctrl-C) makes should_stop
    True instead of ending the run.
    same_command: goes on with the run.
    made_from: entries of every checkpoint that say what the run is made from, as JSON.
    grace: whether a step is finished after a request to stop, or left.
    critic: of the estimator gae; None for the others. critic_warmup: first steps in which only the
    critic learns.
    """

    plan: Plan
    intervals: Intervals
    buffer: RolloutBuffer | None
    rollout: RolloutEngine
    val_rewards: RewardPool
    trainer: TrainEngine
    updater: Updater
    reference: LogprobEngine | None
    advantage_settings: AdvantageSettings
    kl: AdaptiveKl
    needs_old_logprobs: bool
    evaluator: Evaluator | None
    token_groups: int
    parity: ParityCheck
    store: CheckpointStore
    save_state: SaveState
    report: Reporter
    should_stop: Callable[[], bool]
    defer_interrupts: Callable[[], AbstractContextManager[None]]
    same_command: SameCommand
    hooks: Hooks = field(default_factory=Hooks)
    watch: Watch = field(default_factory=Watch)
    made_from: Mapping[str, Any] = field(default_factory=dict)
    grace: Grace = field(default_factory=Grace)
    critic: CriticEngine | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """State of the loop between steps.

    A checkpoint holds it, and the state of the buffer and the engines.
    """

    step: int
    kl: AdaptiveKl
