"""Looks at each step's numbers and memory, and says once what goes wrong, or stops the run.

A warning is printed once per episode: an episode begins when a rule has held for enough steps in a
row, and ends after as many in which it did not hold. Steps that say nothing change neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from trigon.config.names import WatchLevel
from trigon.metrics import Max, Metric, Metrics, values
from trigon.report.watch.history import History
from trigon.report.watch.memory import HOST, Growth, MemoryGrowth, MemoryKind
from trigon.report.watch.meter import MemoryMeter
from trigon.report.watch.rules import REMEMBERED, RULES, VALIDATIONS, Rule, Thresholds, WatcherName
from trigon.system.resuming import WEIGHTS_ONLY, SameCommand

MEMORY = "perf/watch_memory"
"""The metric of a memory alarm; those of the others are watch/<name>. It is a measurement."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a watcher has seen.

    first_step: the first step in which it was so. stops: its level is stop. saves: the step is
    worth a checkpoint, since what fails is not the training.
    """

    watcher: WatcherName
    first_step: int
    text: str
    stops: bool
    saves: bool


@dataclass(frozen=True, slots=True)
class Watched:
    """What all watchers say about a step.

    metrics: of the step, to be recorded: the memory, and 1 for each alarm that is on. new: alarms
    to be printed. stop: the alarm that stops the run, if any.
    """

    metrics: Metrics
    new: tuple[Alarm, ...] = ()
    stop: Alarm | None = None


@dataclass(slots=True)
class Episode:
    """How long a rule holds or does not.

    held: steps in a row in which it held; first_step: the first of them. rested: steps in a row in
    which it did not. is_on: whether the alarm is on.
    """

    held: int = 0
    rested: int = 0
    first_step: int = 0
    is_on: bool = False

    def add(self, step: int, holds: bool, *, needed: int) -> bool:
        """Count a step, and return whether the alarm has just been raised.

        needed: steps in a row that raise it, and that end it.
        """
        if holds:
            if self.held == 0 and not self.is_on:
                self.first_step = step
            self.held, self.rested = self.held + 1, 0
            raised = not self.is_on and self.held >= needed
            self.is_on = self.is_on or raised
            return raised
        self.held, self.rested = 0, self.rested + 1
        if self.rested >= needed:
            self.is_on = False
        return False


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """The levels by watcher, the thresholds, and the steps that memory must last for.

    num_workers, save_gb: see MemoryGrowth.
    """

    levels: Mapping[WatcherName, WatchLevel]
    thresholds: Thresholds
    memory_steps: int
    total_steps: int
    num_workers: int
    save_gb: float


@dataclass(slots=True)
class BestValidation:
    """The validation rewards so far: the highest with its step, and the lowest."""

    best: float | None = None
    best_step: int = 0
    worst: float = 0.0

    def add(self, step: int, score: float) -> None:
        """Count a validation."""
        if self.best is None:
            self.best, self.best_step, self.worst = score, step, score
            return
        if score > self.best:
            self.best, self.best_step = score, step
        self.worst = min(self.worst, score)

    def drop(self, score: float) -> float:
        """Return how far a score is below the best, as a share of the best or of the range."""
        if self.best is None:
            return 0.0
        scale = max(abs(self.best), self.best - self.worst)
        return (self.best - score) / scale if scale > 0 else 0.0


_VALIDATION = "validation"
_VALIDATION_TEXT = (
    "The policy has learned something that the validation does not reward: it is too far from where it started, or "
    "the training reward can be had without the task. Compare the rollouts of both, and train from the best "
    "checkpoint (checkpoint_tracker.json in the run folder names it) with a lower worker.actor.optim.lr"
)


class Watch:
    """The watchers of a run.

    settings: None: nothing is watched. meter: None: memory is not measured.
    """

    def __init__(self, settings: WatchSettings | None = None, meter: MemoryMeter | None = None) -> None:
        self._settings = settings
        self._meter = meter
        self._history = History(REMEMBERED)
        self._episodes: dict[str, Episode] = {}
        self._validations = BestValidation()
        self._memory = MemoryGrowth()
        if settings is not None:
            self._memory = MemoryGrowth(num_workers=settings.num_workers, save_gb=settings.save_gb)
        self._holds_save = False
        self._warned_of: set[MemoryKind] = set()

    def begin_step(self, *, saving: bool) -> None:
        """Take note that a step begins. saving: with copies of a save in progress in memory."""
        self._holds_save = saving

    def validation(self, step: int, metrics: Metrics) -> None:
        """Take the validation before training as the first one."""
        score = metrics["val/reward_score"].value
        if isfinite(score):  # nan: no completion could be scored
            self._validations.add(step, score)

    def observe(self, step: int, metrics: Metrics) -> Watched:
        """Return what the watchers say about a step. To be called once for each step, in order."""
        measured: dict[str, Metric] = {} if self._meter is None else self._meter.measure()
        if self._settings is None:
            return Watched(measured)
        numbers = values(metrics)
        alarms: list[tuple[Alarm, bool]] = []  # with whether it is new
        for rule in RULES:
            alarms += self._apply(rule, step, numbers)
        alarms += self._watch_validation(step, numbers)
        self._history.add(numbers)
        # A worker's part of the memory is in the metrics of the updates.
        alarms += self._watch_memory(step, {**numbers, **values(_least(metrics, measured))}, self._left_now(numbers))
        on = {MEMORY if alarm.watcher == "memory" else f"watch/{alarm.watcher}": Max(1.0) for alarm, _ in alarms}
        stopping = [alarm for alarm, _ in alarms if alarm.stops]
        return Watched(
            {**measured, **on},
            tuple(alarm for alarm, is_new in alarms if is_new),
            # Training that fails is not saved, not even if memory runs out at the same step.
            min(stopping, key=lambda alarm: alarm.saves, default=None),
        )

    def state(self) -> dict[str, Any]:
        """Return what load_state takes, as JSON."""
        episodes = {
            name: [each.held, each.rested, each.first_step, each.is_on] for name, each in self._episodes.items()
        }
        best = self._validations
        return {
            "history": self._history.state(),
            "episodes": episodes,
            "validations": None if best.best is None else [best.best, best.best_step, best.worst],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on as the watch whose state this is; {}: of a checkpoint that has none."""
        if not state:
            return
        self._history.load_state(state["history"])
        self._episodes = {name: Episode(*each) for name, each in state["episodes"].items()}
        if state["validations"] is not None:
            self._validations = BestValidation(*state["validations"])

    def _apply(self, rule: Rule, step: int, numbers: Mapping[str, float]) -> list[tuple[Alarm, bool]]:
        assert self._settings is not None
        thresholds = self._settings.thresholds
        if self._level(rule.watcher) == "off":
            return []
        seen = rule.look(numbers, self._history, thresholds)
        needed = rule.num_steps(thresholds)
        return self._count(rule.watcher, rule.name, step, seen, needed=needed, text=f"{rule.means} {rule.advice}")

    def _watch_validation(self, step: int, numbers: Mapping[str, float]) -> list[tuple[Alarm, bool]]:
        assert self._settings is not None
        score = numbers.get("val/reward_score")
        if score is None or not isfinite(score):
            return self._count("validation", _VALIDATION, step, True, needed=VALIDATIONS, text=_VALIDATION_TEXT)
        limit = self._settings.thresholds.max_validation_drop
        best, best_step = self._validations.best, self._validations.best_step
        is_far_below = self._validations.drop(score) > limit
        self._validations.add(step, score)
        if self._level("validation") == "off":
            return []
        seen = f"val/reward_score is {score:.3g}, and was {best:.3g} after step {best_step}" if is_far_below else False
        return self._count("validation", _VALIDATION, step, seen, needed=VALIDATIONS, text=_VALIDATION_TEXT)

    def _count(
        self, watcher: WatcherName, name: str, step: int, seen: str | bool, *, needed: int, text: str
    ) -> list[tuple[Alarm, bool]]:
        """Count a step of a rule, and return its alarm, with whether it is new, if it is on.

        seen: as Rule.look returns it.
        """
        episode = self._episodes.setdefault(f"{watcher}/{name}", Episode())
        if seen is True:
            return []
        raised = episode.add(step, seen is not False, needed=needed)
        if not episode.is_on or seen is False:
            return []
        stops = self._level(watcher) == "stop"
        return [(Alarm(watcher, episode.first_step, f"{seen}. {text}", stops, saves=False), raised)]

    def _left_now(self, numbers: Mapping[str, float]) -> float | None:
        """Return the host memory left after the updates, on the machine that has least.

        None while a save is in progress, whose copies the next save frees first.
        """
        if self._holds_save:
            return None
        own = None if self._meter is None else self._meter.left_gb
        return min((left for left in (own, numbers.get(HOST.left)) if left is not None), default=None)

    def _watch_memory(
        self, step: int, numbers: Mapping[str, float], left_now_gb: float | None
    ) -> list[tuple[Alarm, bool]]:
        assert self._settings is not None
        if self._level("memory") == "off":
            return []
        self._memory.add(step, numbers, left_now_gb=left_now_gb)
        found = self._memory.find(steps_to_stop=self._settings.memory_steps, total_steps=self._settings.total_steps)
        if found is None:
            return []
        growth, must_stop = found
        is_new = growth.kind not in self._warned_of
        self._warned_of.add(growth.kind)
        stops = must_stop and self._level("memory") == "stop"
        return [(Alarm("memory", growth.first_step, _memory_text(growth), stops, saves=True), is_new or stops)]

    def _level(self, watcher: WatcherName) -> WatchLevel:
        assert self._settings is not None
        return self._settings.levels[watcher]


def describe_stop(step: int, alarm: Alarm, saved: Path | None, same_command: SameCommand) -> str:
    """Return what a watcher saw, which checkpoint is from before, and how to go on.

    saved: the newest checkpoint from before the alarm's first step, if there is one. same_command:
    goes on with the run.
    """
    text = (
        f"trainer.watch.{alarm.watcher} stopped the run after step {step}: since step {alarm.first_step}: {alarm.text}"
    )
    if alarm.saves:
        return f"{text}. The step was saved; {same_command.from_step(step, 'goes on after it, with its memory empty')}"
    on = f"To go on regardless, set trainer.watch.{alarm.watcher}=warn"
    if saved is None:
        return f"{text}. There is no checkpoint from before step {alarm.first_step}. {on}"
    resume = (
        f"resume from it with trainer.load_checkpoint_path={saved}, and name the options that you change in "
        "trainer.accept_changes"
    )
    return (
        f"{text}. This step was not saved; the last checkpoint from before step {alarm.first_step} is {saved}: "
        f"{WEIGHTS_ONLY if same_command.saves_weights_only else resume}. {on}"
    )


def _least(metrics: Metrics, measured: Metrics) -> dict[str, Metric]:
    """Return the measured memory with that of the workers, which is in the metrics of the step."""
    merged = dict(measured)
    for key, metric in metrics.items():
        if key in measured and type(metric) is type(measured[key]):
            merged[key] = metric.merged(measured[key])  # type: ignore[arg-type]
    return merged


def _memory_text(growth: Growth) -> str:
    names = [key for key, _ in growth.growing]
    advice = {
        "perf/memory_reward_workers_gb": "The reward function keeps what it should free: a cache or a list that grows",
        "perf/memory_driver_gb": "A hook or a logger in this process, or Trigon itself, keeps what it should free",
        "perf/memory_worker_gb": "The trainer or vLLM in a worker keeps what it should free",
        "perf/memory_children_gb": "A process below the driver, such as vLLM's, keeps what it should free",
    }.get(names[0] if names else "", "See which of the memory metrics in docs/metrics.md grow")
    return f"{growth.describe()}. {advice}"
