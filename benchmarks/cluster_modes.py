"""How a cluster samples and learns: in turn, at the same time, or group by group as they end.

The events and the times are those of benchmarks/simulation.py. Version v is the weights after v
steps; the age of a token that step t learns from is t - 1 less the version that sampled it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Literal

from simulation import Action, Clock, Completion, Group, Replica, SamplingTimes, Serial

Kind = Literal["in turn", "pipeline", "streamed", "partial", "oversampling"]


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to sample and learn.

    separate: the pools have GPUs of their own; False: the same GPUs do both in turn.
    max_staleness: k, the oldest age that is learned from. oversampling: groups in flight beyond
    those that a step learns from, as a share of them.
    """

    name: str
    kind: Kind
    separate: bool
    max_staleness: int = 0
    oversampling: float = 0.0


MODES = (
    Mode("colocated", "in turn", separate=False),
    Mode("colocated, oversampling", "oversampling", separate=False, oversampling=0.25),
    Mode("separate, k = 0", "in turn", separate=True),
    Mode("separate, k = 1", "pipeline", separate=True, max_staleness=1),
    Mode("separate, k = 4, finish", "streamed", separate=True, max_staleness=4),
    Mode("separate, k = 4, continue", "partial", separate=True, max_staleness=4),
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the cluster is made of, and what each part takes.

    replicas: of the rollout engine. learn_fixed, learn_token: seconds of a step on all learners
    together, and of each token of its packed rows. sync_seconds: of a weight sync. group_seconds:
    of the driver, for each group.
    """

    replicas: int
    sampling: SamplingTimes
    learn_token: float
    sync_seconds: float
    learn_fixed: float = 0.0
    group_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation found, over the steps after the warm-up.

    step_ends: the times at which steps ended, the last one of the warm-up first. tokens: sampled
    ones that were learned from. sampling, learning, driver: shares of the time in which the pools
    and the driver worked; sampling is the mean over the replicas. running: sequences of a replica
    while it works, in the mean.
    ages: tokens by their age. dropped: groups that had become too old. Over all steps: started,
    learned, unfinished: groups, the last ones being those that were in flight or unused at the end.
    """

    step_ends: Sequence[float]
    tokens: int
    sampling: float
    learning: float
    driver: float
    running: float
    ages: Mapping[int, float]
    dropped: int
    started: int
    learned: int
    unfinished: int

    @property
    def step_seconds(self) -> float:
        """The mean seconds of a step."""
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens that were learned from, for each second."""
        return self.tokens / (self.step_ends[-1] - self.step_ends[0])

    @property
    def mean_age(self) -> float:
        """The mean age of the tokens."""
        return sum(age * tokens for age, tokens in self.ages.items()) / sum(self.ages.values())

    @property
    def max_age(self) -> int:
        """The age of the oldest token."""
        return max(self.ages)


def simulate(
    mode: Mode,
    hardware: Hardware,
    groups: Iterator[Sequence[int]],
    *,
    groups_per_step: int,
    prompt: int,
    steps: int,
    warm_up: int,
) -> Outcome:
    """Return what a number of steps take.

    Args:
        groups: the lengths of each group's completions; as many as are needed are taken.
        groups_per_step: that a step learns from.
        prompt: tokens of a prompt.
        steps: after the warm-up.
        warm_up: steps that are not counted; 0 counts from the start.
    """
    run = _RUNS[mode.kind](mode, hardware, groups, groups_per_step, prompt, steps, warm_up)
    return run.outcome()


class _Run(ABC):
    """One simulation; its subclasses decide what follows what."""

    def __init__(
        self,
        mode: Mode,
        hardware: Hardware,
        groups: Iterator[Sequence[int]],
        groups_per_step: int,
        prompt: int,
        steps: int,
        warm_up: int,
    ) -> None:
        self.mode, self.hardware, self.groups_per_step = mode, hardware, groups_per_step
        self._groups, self._prompt, self._steps, self._warm_up = groups, prompt, steps, warm_up
        self.clock = Clock()
        self.learners, self.driver = Serial(self.clock), Serial(self.clock)
        self.replicas = [
            Replica(self.clock, hardware.sampling, self.on_group, number) for number in range(hardware.replicas)
        ]
        self.started = self.learned_groups = self.dropped = self.version = self._tokens = 0
        self._ages: Counter[int] = Counter()
        self._ends: list[float] = []
        self._dropped_before = 0
        if warm_up == 0:
            self._measure()

    def outcome(self) -> Outcome:
        """Run the simulation, and return what it found."""
        self.begin()
        self.clock.run()
        before, after = self._before, self._totals()
        seconds = self._ends[-1] - self._ends[0]
        busy, sequences, learned, driven = (new - old for old, new in zip(before, after, strict=True))
        sampling = busy / seconds / len(self.replicas)
        return Outcome(
            step_ends=tuple(self._ends),
            tokens=self._tokens,
            sampling=sampling,
            learning=learned / seconds,
            driver=driven / seconds,
            running=sequences / busy if busy else 0.0,
            ages=dict(sorted(self._ages.items())),
            dropped=self.dropped - self._dropped_before,
            started=self.started,
            learned=self.learned_groups,
            unfinished=self.started - self.learned_groups - self.dropped,
        )

    @abstractmethod
    def begin(self) -> None:
        """Start the first step."""

    @abstractmethod
    def on_group(self, group: Group) -> None:
        """Take a group that was sampled."""

    def new_groups(self, number: int) -> list[Group]:
        """Return this many new groups."""
        found = [Group.of(self.started + each, self._prompt, next(self._groups)) for each in range(number)]
        self.started += number
        return found

    def deal(self, parts: Iterable[Sequence[Completion]]) -> None:
        """Deal completions, those of a group together, to the replicas in turn."""
        dealt: list[list[Completion]] = [[] for _ in self.replicas]
        for number, part in enumerate(parts):
            dealt[number % len(dealt)] += part
        for replica, completions in zip(self.replicas, dealt, strict=True):
            replica.submit(completions)

    def learn(self, groups: Sequence[Group], then: Action) -> None:
        """Learn from groups, and then call an action."""
        seconds = self.hardware.learn_fixed + self.hardware.learn_token * sum(group.row_tokens for group in groups)
        self.learners.work(seconds, partial(self._learned, groups, then))

    def load_everywhere(self, version: int, then: Action) -> None:
        """Load a version in all replicas, which sample nothing meanwhile; then call an action."""
        for replica in self.replicas:
            replica.pause()
        self.clock.after(self.hardware.sync_seconds, partial(self._loaded, version, then))

    def _loaded(self, version: int, then: Action) -> None:
        for replica in self.replicas:
            replica.load(version)
        then()

    def _learned(self, groups: Sequence[Group], then: Action) -> None:
        self.learned_groups += len(groups)
        if self.version >= self._warm_up:
            for group in groups:
                self._tokens += group.sampled_tokens
                for completion in group.completions:
                    for version, tokens in completion.segments:
                        self._ages[self.version - version] += tokens
        self.version += 1
        if self.version >= self._warm_up:
            self._measure()
        if self.version == self._warm_up + self._steps:
            self.clock.stop()
        else:
            then()

    def _measure(self) -> None:
        self._ends.append(self.clock.now)
        if len(self._ends) == 1:
            self._before, self._dropped_before = self._totals(), self.dropped

    def _totals(self) -> tuple[float, float, float, float]:
        sampled = [replica.totals() for replica in self.replicas]
        busy, sequences = sum(each[0] for each in sampled), sum(each[1] for each in sampled)
        return busy, sequences, self.learners.total(), self.driver.total()

    def _drive(self, groups: int, then: Action) -> None:
        """Let the driver handle this many groups."""
        self.driver.work(groups * self.hardware.group_seconds, then)


class _InTurn(_Run):
    """k = 0: sample a batch, learn from it, load the weights. Colocated or in separate pools."""

    def begin(self) -> None:
        self._batch: list[Group] = []
        self.deal(group.completions for group in self.new_groups(self.groups_per_step))

    def on_group(self, group: Group) -> None:
        self._batch.append(group)
        if len(self._batch) == self.groups_per_step:
            self._drive(self.groups_per_step, self._learn)

    def _learn(self) -> None:
        self.learn(self._batch, self._load)

    def _load(self) -> None:
        self.load_everywhere(self.version, self.begin)


class _Oversampling(_Run):
    """Colocated: more groups are in flight than a step learns from. It learns once enough have
    ended; the others continue in the next step, with its weights.
    """

    def begin(self) -> None:
        self._ended: list[Group] = []
        self._unfinished: list[list[Completion]] = []
        self._sample()

    def on_group(self, group: Group) -> None:
        self._ended.append(group)
        self._learn_if_enough()

    def _sample(self) -> None:
        self._is_sampling = True
        in_flight = ceil(self.groups_per_step * (1 + self.mode.oversampling))
        new = self.new_groups(in_flight - len(self._unfinished) - len(self._ended))
        self.deal([*self._unfinished, *(group.completions for group in new)])
        self._learn_if_enough()

    def _learn_if_enough(self) -> None:
        if self._is_sampling and len(self._ended) >= self.groups_per_step:
            self._is_sampling = False
            by_group: dict[Group, list[Completion]] = {}
            for replica in self.replicas:
                for completion in replica.withdraw():
                    by_group.setdefault(completion.group, []).append(completion)
            self._unfinished = list(by_group.values())
            self._drive(self.groups_per_step, self._learn)

    def _learn(self) -> None:
        # Several may have ended with the same token.
        batch, self._ended = self._ended[: self.groups_per_step], self._ended[self.groups_per_step :]
        self.learn(batch, self._load)

    def _load(self) -> None:
        self.load_everywhere(self.version, self._sample)


class _Pipeline(_Run):
    """k = 1: batch t is sampled with version t - 2 while step t - 1 learns."""

    def begin(self) -> None:
        self._batches: deque[list[Group]] = deque()  # that the driver has handled
        self._sampled = 0  # batches whose sampling has ended
        self._version_loaded = 0  # the version in the replicas
        self._is_sampling = self._is_loading = self._is_learning = False
        self._proceed()

    def on_group(self, group: Group) -> None:
        self._batch.append(group)
        if len(self._batch) == self.groups_per_step:
            self._sampled += 1
            self._is_sampling = False
            self._drive(self.groups_per_step, partial(self._scored, self._batch))
            self._proceed()

    def _scored(self, batch: list[Group]) -> None:
        self._batches.append(batch)
        self._proceed()

    def _proceed(self) -> None:
        """Start what can start. Learners send the weights, and learn nothing meanwhile."""
        if self._is_loading:
            return
        needed = max(0, self._sampled - 1)  # for the batch after those that are sampled
        if not self._is_sampling and self._version_loaded < needed <= self.version:
            self._is_loading = True
            self.load_everywhere(needed, partial(self._on_loaded, needed))
            return
        if not self._is_sampling and self._version_loaded == needed:
            self._batch: list[Group] = []
            self._is_sampling = True
            self.deal(group.completions for group in self.new_groups(self.groups_per_step))
        if not self._is_learning and self._batches:
            self._is_learning = True
            self.learn(self._batches.popleft(), self._on_learned)

    def _on_loaded(self, version: int) -> None:
        self._is_loading, self._version_loaded = False, version
        self._proceed()

    def _on_learned(self) -> None:
        self._is_learning = False
        self._proceed()


class _Streamed(_Run):
    """k > 1: replicas start a group whenever they have room, and a step learns from the first
    groups that have ended. Groups are started only as long as they could be learned from within k
    steps, if they ended in their order; those that became older are dropped.

    A replica finishes what is running before it loads newer weights, which it does once it is k / 2
    versions behind; each replica loads by itself.
    """

    def begin(self) -> None:
        self._usable: deque[Group] = deque()
        self._is_learning = False
        self._loading: set[int] = set()
        completions = self._peek()
        # Of each replica: groups that it can run at a time.
        self._room = max(1, self.hardware.sampling.max_sequences // completions)
        self._in_flight = [0] * len(self.replicas)
        self._place: dict[Group, int] = {}
        self._start_anywhere()

    def _peek(self) -> int:
        first = next(self._groups)
        rest = self._groups
        self._groups = _chain(first, rest)
        return len(first)

    def on_group(self, group: Group) -> None:
        number = self._place.pop(group)
        self._in_flight[number] -= 1
        self._drive(1, partial(self._scored, group))
        self.on_room(number)

    def on_room(self, number: int) -> None:
        """Continue after a group of a replica has ended."""
        self._load_if_behind(number)
        self._start([number])

    def on_version(self) -> None:
        """Continue after a step has learned."""
        for number in range(len(self.replicas)):
            self._load_if_behind(number)
        self._start_anywhere()
        self._learn_if_enough()

    def _start_anywhere(self) -> None:
        self._start(range(len(self.replicas)))

    def _start(self, numbers: Iterable[int]) -> None:
        """Start groups in these replicas, in turn, where there is room, as far as k allows."""
        most = (self.version + self.mode.max_staleness + 1) * self.groups_per_step + self.dropped
        open_ = [number for number in numbers if self._takes_groups(number)]
        parts: dict[int, list[Completion]] = {}
        while open_ and self.started < most:
            number = min(open_, key=self._in_flight.__getitem__)
            [group] = self.new_groups(1)
            self._place[group] = number
            self._in_flight[number] += 1
            parts.setdefault(number, []).extend(group.completions)
            if self._in_flight[number] >= self._room:
                open_.remove(number)
        for number, completions in parts.items():
            self.replicas[number].submit(completions)

    def _takes_groups(self, number: int) -> bool:
        return self._in_flight[number] < self._room and not self._is_behind(number) and number not in self._loading

    def _is_behind(self, number: int) -> bool:
        return self.version - self.replicas[number].version >= max(1, self.mode.max_staleness // 2)

    def _load_if_behind(self, number: int) -> None:
        if self._is_behind(number) and self._in_flight[number] == 0 and number not in self._loading:
            self._loading.add(number)
            self.replicas[number].pause()
            self.clock.after(self.hardware.sync_seconds, partial(self._on_loaded, number, self.version))

    def _on_loaded(self, number: int, version: int) -> None:
        self._loading.remove(number)
        self.replicas[number].load(version)
        self._load_if_behind(number)
        self._start([number])

    def _scored(self, group: Group) -> None:
        self._usable.append(group)
        self._learn_if_enough()

    def _learn_if_enough(self) -> None:
        """Drop groups that are too old, once there are enough, and learn from the others."""
        if self._is_learning or len(self._usable) < self.groups_per_step:
            return
        fresh = [group for group in self._usable if self.version - group.oldest <= self.mode.max_staleness]
        num_dropped, self._usable = len(self._usable) - len(fresh), deque(fresh)
        self.dropped += num_dropped
        if len(fresh) >= self.groups_per_step:
            self._is_learning = True
            self.learn([self._usable.popleft() for _ in range(self.groups_per_step)], self._on_learned)
        if num_dropped:
            self._start_anywhere()

    def _on_learned(self) -> None:
        self._is_learning = False
        self.on_version()


class _Partial(_Streamed):
    """The same, but all replicas load new weights at once, and what is running continues with them.
    The learners send the weights, and learn nothing meanwhile.
    """

    def on_room(self, number: int) -> None:
        self._start([number])

    def on_version(self) -> None:
        self._is_learning = True
        self.load_everywhere(self.version, self._on_sent)

    def _is_behind(self, number: int) -> bool:
        return False

    def _on_sent(self) -> None:
        self._is_learning = False
        self._start_anywhere()
        self._learn_if_enough()


def _chain(first: Sequence[int], rest: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
    yield first
    yield from rest


_RUNS: Mapping[Kind, type[_Run]] = {
    "in turn": _InTurn,
    "oversampling": _Oversampling,
    "pipeline": _Pipeline,
    "streamed": _Streamed,
    "partial": _Partial,
}
