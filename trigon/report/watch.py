"""Rules that check each step's metrics and memory, and warn of a run that fails, or stop it.

A rule raises its alarm when its metric has been out of bounds in several steps in a row, and warns
once; after as many steps within the bounds the alarm is off. A step in which the metric is missing
or not finite changes neither. docs/troubleshooting.md says what each rule means, and why its bounds
are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any, Literal

from trigon.config.names import WatchRule
from trigon.config.schema import WatchConfig
from trigon.metrics import Max, Metric, Metrics, merge, values
from trigon.report.memory_growth import HOST, MemoryGrowth, MemoryMeter
from trigon.system.stopping import WEIGHTS_ONLY, SameCommand

MEMORY = "perf/watch_memory"
"""The metric of a memory alarm, which is a measurement; other rules have watch/<name>."""

FIRST_STEPS = 3
"""Values whose median is the level at the start: so few that a fast collapse is not among them."""

RECENT_STEPS, LEAST_RECENT_STEPS = 20, 10
"""The most and the fewest values whose median is the recent level."""

VALIDATION, VALIDATIONS, MAX_VALIDATION_DROP = "val/reward_score", 2, 0.5
"""The metric of the rule `validation`, the validations in a row that have to be far below the best,
and how far: as a share of the best, or of the range of all validations if that is more."""


NOT_WATCHED = WatchConfig(level="off")


@dataclass(frozen=True, slots=True)
class Rule:
    """A metric, and the bounds outside of which it means that training fails.

    name: its name in trainer.watch.ignore; several metrics may share one. above: upper bound of the
    absolute value; below: lower bound. level, times: if given, the value also has to be above (or
    below) this multiple of its level at the start of the run, or of its recent level.
    steps: number of steps in a row. lasts: a step without the metric has the value of the step
    before: without an update the policy stays as it is. advice: what the alarm means, and what to
    do.
    """

    name: WatchRule
    metric: str
    advice: str
    above: float | None = None
    below: float = inf
    level: Literal["", "start", "recent"] = ""
    times: float = 1.0
    steps: int = 5
    lasts: bool = False

    def check(self, value: float, level: float | None) -> str | None:
        """Return what is wrong with a value, or None. level: None while it is not known yet."""
        if self.level and not level:
            return None
        bound = self.times * (level or 0.0)
        if self.above is not None:
            fails = abs(value) > max(self.above, bound)
        else:
            fails = value < (min(self.below, bound) if self.level else self.below)
        if not fails:
            return None
        return f"{self.metric} is {value:.3g}" + (f", and was {level:.3g} before" if self.level else "")


_LOSS = (
    "An update was too large, or the advantages are: the weights are probably damaged. Lower worker.actor.optim.lr or "
    "worker.actor.max_grad_norm (worker.critic for a critic), and see whether the rewards are bounded"
)
_KL = (
    "The policy writes text that the reference would hardly ever write. Lower worker.actor.optim.lr, or raise "
    "algorithm.kl_coef"
)
_LENGTH = (
    "The reward function pays for short or empty completions, or the policy is damaged. Compare the rollouts with "
    "what the reward function returns for an empty completion"
)
_MISMATCH = (
    "The engine samples from another policy than the one that is trained: rounding that grows with the weights, a "
    "stale cache, or weights that are several steps old. Set algorithm.mismatch_correction=truncate, use the same "
    "precision for engine and trainer, or lower worker.actor.optim.lr, algorithm.max_staleness or "
    "worker.rollout.max_carried_steps"
)

RULES: tuple[Rule, ...] = (
    # On-policy losses are near 0, where ratios say little.
    Rule("loss", "actor/pg_loss", _LOSS, above=10.0, level="recent", times=100.0),
    Rule("loss", "actor/grad_norm", _LOSS, above=0.0, level="recent", times=100.0),
    Rule("loss", "critic/grad_norm", _LOSS, above=0.0, level="recent", times=100.0),
    Rule("kl", "actor/kl_loss", _KL, above=5.0),
    Rule("kl", "actor/kl_penalty", _KL, above=5.0),
    Rule(
        "kl",
        "actor/ppo_kl",
        "The updates of one step move the policy far from the one that sampled. Lower worker.actor.optim.lr or "
        "worker.actor.ppo_epochs, or raise worker.actor.global_batch_size",
        above=1.0,
    ),
    Rule(
        "entropy",
        "actor/entropy",
        "The policy samples the same completions again and again, and can find no better ones. Lower "
        "worker.actor.optim.lr, raise worker.actor.entropy_coeff or worker.actor.clip_ratio_high, or add a KL term "
        "(algorithm.disable_kl=false)",
        below=0.005,
        lasts=True,
    ),
    Rule(
        "length",
        "response_length/clip_ratio",
        "Completions that are cut at their limit are seldom right. Raise data.max_response_length, or set "
        "algorithm.overlong_filtering=true; the rollouts show whether the policy has learned to ramble",
        above=0.95,
    ),
    Rule("length", "response_length/mean", _LENGTH, level="start", times=0.1),
    Rule(
        "equal_rewards",
        "group/equal_rewards_fraction",
        "Nothing is learned from equal rewards: the task is too hard or too easy for the model, or the reward function "
        "does not see what it expects. Compare completions and ground truths in the rollouts; use data on which the "
        "model is sometimes right, or raise worker.rollout.n",
        above=0.9999,
        steps=10,  # on a solved task a few steps without a gradient are common
    ),
    Rule(
        "reward_failures",
        "reward_function/failed_fraction",
        "Completions without a score are not learned from, which biases what is learned. The log has the errors of the "
        "reward function; see reward_function/num_failed, reward_function/num_timed_out and "
        "worker.reward.timeout_seconds",
        above=0.05,
    ),
    Rule("mismatch", "mismatch/k3", _MISMATCH, above=0.1),
    # 0.02 is twice the rounding of bfloat16.
    Rule("mismatch", "mismatch/logprobs_diff_mean", _MISMATCH, above=0.02, level="start", times=5.0),
    Rule(
        "critic",
        "critic/vf_explained_var",
        "The errors of the critic's values vary much more than the returns, and make the advantages noisier. Raise "
        "trainer.critic_warmup, worker.critic.optim.lr or worker.critic.ppo_epochs, or set algorithm.lam_critic=1; "
        "with worker.critic.share_trunk=true lower worker.actor.optim.lr, since the trunk changes under the values",
        below=-1.0,
        steps=20,  # of a small batch it is noisy
    ),
)
"""All rules but `validation`, which compares with the best one so far, and `memory`."""

_VALIDATION_ADVICE = (
    "The policy has learned something that the validation does not reward: it is too far from where it started, or the "
    "training reward can be had without the task. Compare the rollouts of both, and train from the best checkpoint "
    "(checkpoint_tracker.json in the run folder names it) with a lower worker.actor.optim.lr"
)


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a rule has found.

    rule: its name. first_step: the first step that was out of bounds. text: what is wrong, and what
    to do. is_new: whether it is to be printed. stops: the run ends. saves: the step is worth a
    checkpoint, since what fails is not the training.
    """

    rule: WatchRule
    first_step: int
    text: str
    is_new: bool
    stops: bool
    saves: bool = False


@dataclass(frozen=True, slots=True)
class Watched:
    """What all rules say about a step.

    metrics: metrics to be recorded: the memory, and 1 for each alarm that is on. new: alarms to be
    printed.
    stop: the alarm that stops the run, if any.
    """

    metrics: Metrics
    new: tuple[Alarm, ...] = ()
    stop: Alarm | None = None


@dataclass(slots=True)
class _Series:
    """The steps in a row in which a metric was out of bounds, or within them, and its values.

    first_step: the first step that was out of bounds. first, recent: values for the levels.
    """

    num_out: int = 0
    num_within: int = 0
    first_step: int = 0
    is_on: bool = False
    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)

    def level(self, kind: str) -> float | None:
        """Return the median of the first or of the recent values; None until there are enough."""
        if not kind:
            return None
        if kind == "start":
            return median(self.first) if len(self.first) == FIRST_STEPS else None
        return median(map(abs, self.recent)) if len(self.recent) >= LEAST_RECENT_STEPS else None

    def remember(self, value: float) -> None:
        """Add a value to the levels."""
        self.first = [*self.first, value][:FIRST_STEPS]
        self.recent = [*self.recent, value][-RECENT_STEPS:]

    def count(self, step: int, *, is_out: bool, needed: int) -> bool:
        """Count a step, and return whether the alarm has just been raised.

        needed: steps in a row that raise the alarm, and that end it.
        """
        was_on = self.is_on
        if is_out:
            self.first_step = step if self.num_out == 0 and not was_on else self.first_step
            self.num_out, self.num_within = self.num_out + 1, 0
            self.is_on = was_on or self.num_out >= needed
        else:
            self.num_out, self.num_within = 0, self.num_within + 1
            self.is_on = was_on and self.num_within < needed
        return self.is_on and not was_on


@dataclass(slots=True)
class _Best:
    """The validation rewards so far: the highest with its step, and the lowest."""

    step: int
    best: float
    worst: float

    def add(self, step: int, score: float) -> None:
        if score > self.best:
            self.step, self.best = step, score
        self.worst = min(self.worst, score)

    def drop(self, score: float) -> float:
        """Return how far a score is below the best, as a share of the best or of the range."""
        scale = max(abs(self.best), self.best - self.worst)
        return (self.best - score) / scale if scale > 0 else 0.0


class Watch:
    """The rules of a run, applied to each step in order.

    config: the level, and the rules that are not applied. groups_compared: the advantages compare
    the completions of a group, so that equal rewards in each group give no gradient; otherwise all
    rewards of a step have to be equal. completions_end: completions may end before their limit.
    memory: None: its growth is not watched. meter: None: memory is not measured.
    """

    def __init__(
        self,
        config: WatchConfig = NOT_WATCHED,
        *,
        groups_compared: bool = True,
        completions_end: bool = True,
        memory: MemoryGrowth | None = None,
        meter: MemoryMeter | None = None,
        rules: Sequence[Rule] = RULES,
    ) -> None:
        self._level = config.level
        self._ignored = set(config.ignore) | (set() if completions_end else {"response_length/clip_ratio"})
        self._groups_compared = groups_compared
        self._memory = memory
        self._meter = meter
        self._rules = rules
        self._series: dict[str, _Series] = {}
        self._best: _Best | None = None
        self._holds_save = False
        self._warned_of: set[str] = set()

    def begin_step(self, *, saving: bool) -> None:
        """Begin a step. saving: memory has the copies of a save in progress."""
        self._holds_save = saving

    def validation(self, step: int, metrics: Metrics) -> None:
        """Add the validation before training."""
        score = metrics[VALIDATION].value
        if isfinite(score):  # nan: no completion could be scored
            self._best = _Best(step, score, score)

    def observe(self, step: int, metrics: Metrics) -> Watched:
        """Return what the rules say about a step."""
        measured: dict[str, Metric] = {} if self._meter is None else self._meter.measure()
        if self._level == "off":
            return Watched(measured)
        numbers = {key: value for key, value in values(metrics).items() if isfinite(value)}
        alarms = self._apply_rules(step, numbers)
        alarms += self._check_validation(step, numbers.get(VALIDATION))
        # A worker's part of the memory is in the metrics of the updates.
        of_workers = {key: metrics[key] for key in measured if key in metrics}
        alarms += self._check_memory(step, {**numbers, **values(merge(of_workers, measured))}, numbers.get(HOST.left))
        on = {MEMORY if alarm.rule == "memory" else f"watch/{alarm.rule}": Max(1.0) for alarm in alarms}
        return Watched(
            {**measured, **on},
            tuple(alarm for alarm in alarms if alarm.is_new),
            # Training that fails is not saved, not even if memory runs out at the same step.
            min((alarm for alarm in alarms if alarm.stops), key=lambda alarm: alarm.saves, default=None),
        )

    def state(self) -> dict[str, Any]:
        """Return what load_state takes, as JSON."""
        series = {metric: asdict(each) for metric, each in self._series.items()}
        return {"series": series, "best": None if self._best is None else asdict(self._best)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue as the watch that returned this state. {}: a checkpoint without one."""
        self._series = {metric: _Series(**each) for metric, each in state.get("series", {}).items()}
        self._best = _Best(**state["best"]) if state.get("best") else None

    def forget_validations(self) -> None:
        """Begin again with validations: those so far were measured with other data or rewards."""
        self._series.pop(VALIDATION, None)
        self._best = None

    def _apply_rules(self, step: int, numbers: Mapping[str, float]) -> list[Alarm]:
        alarms: list[Alarm] = []
        for rule in self._rules:
            series = self._series.setdefault(rule.metric, _Series())
            value = self._value(rule.metric, numbers)
            if value is None and rule.lasts and series.recent:
                value = series.recent[-1]
            if value is None:
                continue
            wrong = rule.check(value, series.level(rule.level))
            alarms += self._count(rule.name, rule.metric, step, wrong, rule.advice, needed=rule.steps)
            series.remember(value)
        return alarms

    def _value(self, metric: str, numbers: Mapping[str, float]) -> float | None:
        """Return the value that a rule checks; None if the step says nothing."""
        match metric:
            case "group/equal_rewards_fraction" if not self._groups_compared:
                ends = numbers.get("critic/score/min"), numbers.get("critic/score/max")
                return None if None in ends else float(ends[0] == ends[1])
            case "mismatch/logprobs_diff_mean" if numbers.get("staleness/max", 0.0) > 0:
                return None  # it is also the distance between two versions of the weights
            case "critic/vf_explained_var" if "actor/lr" not in numbers:
                return None  # only the critic learns (trainer.critic_warmup)
            case _:
                return numbers.get(metric)

    def _check_validation(self, step: int, score: float | None) -> list[Alarm]:
        if score is None:
            return []
        best = self._best = self._best or _Best(step, score, score)
        wrong = None
        if best.drop(score) > MAX_VALIDATION_DROP:
            wrong = f"{VALIDATION} is {score:.3g}, and was {best.best:.3g} after step {best.step}"
        best.add(step, score)
        return self._count("validation", VALIDATION, step, wrong, _VALIDATION_ADVICE, needed=VALIDATIONS)

    def _count(
        self, name: WatchRule, metric: str, step: int, wrong: str | None, advice: str, *, needed: int
    ) -> list[Alarm]:
        """Count a step, and return the alarm if it is on."""
        series = self._series.setdefault(metric, _Series())
        is_new = series.count(step, is_out=wrong is not None, needed=needed)
        if wrong is None or not series.is_on or {name, metric} & self._ignored:
            return []
        return [Alarm(name, series.first_step, f"{wrong}. {advice}", is_new, stops=self._level == "stop")]

    def _check_memory(self, step: int, numbers: Mapping[str, float], worker_left: float | None) -> list[Alarm]:
        if self._memory is None or "memory" in self._ignored:
            return []
        own_left = None if self._meter is None else self._meter.left_gb
        lefts = [] if self._holds_save else [left for left in (own_left, worker_left) if left is not None]
        self._memory.add(step, numbers, left_now_gb=min(lefts, default=None))
        found = self._memory.find()
        if found is None:
            return []
        growth, must_stop = found
        is_new = growth.kind.name not in self._warned_of
        self._warned_of.add(growth.kind.name)
        text = growth.describe()
        return [Alarm("memory", growth.first_step, text, is_new or must_stop, stops=must_stop, saves=True)]


def describe_stop(step: int, alarm: Alarm, saved: Path | None, same_command: SameCommand) -> str:
    """Return what a rule found, which checkpoint is from before, and how to continue.

    saved: the newest checkpoint from before the alarm's first step, if there is one. same_command:
    resumes the run.
    """
    found = (
        f"trainer.watch: {alarm.rule} stopped the run after step {step}: since step {alarm.first_step}: {alarm.text}"
    )
    if alarm.saves:
        advice = same_command.from_step(step, "continues after it, with its memory empty")
        return f"{found}. The step was saved; {advice}"
    on = f"To continue regardless, set trainer.watch.level=warn or trainer.watch.ignore={alarm.rule}"
    if saved is None:
        return f"{found}. There is no checkpoint from before step {alarm.first_step}. {on}"
    resume = (
        f"resume from it with trainer.load_checkpoint_path={saved}, and name the options that you change in "
        "trainer.accept_changes"
    )
    return (
        f"{found}. This step was not saved; the last checkpoint from before step {alarm.first_step} is {saved}: "
        f"{WEIGHTS_ONLY if same_command.saves_weights_only else resume}. {on}"
    )
